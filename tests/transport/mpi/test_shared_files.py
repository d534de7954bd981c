"""The files in which MPI shares memory: no job leaves one, however it ends."""

import os
import time

import pytest

from mpidist.cli.leftovers import find_leftovers, remove

pytestmark = [pytest.mark.no_mpi, pytest.mark.core]

# Writes down which files MPI has made, as the library does not: a launcher that is killed passes on no output.
PROGRAM = """
import os, signal, sys, time
from mpi4py import MPI
comm = MPI.COMM_WORLD
comm.Barrier()
if comm.rank == 0:
    files = {line.split()[5] for line in open("/proc/self/maps") if "/dev/shm/" in line and "(deleted)" not in line}
    open(f"{sys.argv[0]}.files", "w").write("\\n".join(sorted(files)))
import mpidist
strategy = mpidist.MultiWorkerMirroredStrategy()
strategy.barrier()
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
ENDS = {
    "kill": f"if comm.rank == 1: {KILL}\ntime.sleep(60)",
    "kill of the launcher": f"if comm.rank == 1: os.kill(os.getppid(), signal.SIGKILL)\n{KILL}",
    "abort": "if comm.rank == 1: comm.Abort(3)\ntime.sleep(60)",
}
# All that opens memory of MPI later: it needs no names.
LATER = """
import numpy as np
for part in (comm.Dup(), comm.Split(comm.rank % 2), comm.Split_type(MPI.COMM_TYPE_SHARED)):
    window = MPI.Win.Allocate_shared(1 << 16, comm=part)
    for count in (1, 1_000_000):
        numbers = np.ones(count)
        part.Allreduce(MPI.IN_PLACE, numbers)
        assert numbers[-1] == part.size
    window.Free()
    part.Free()
strategy.close()
"""


@pytest.fixture
def run(job, tmp_path):
    """Run a job, and list the files that MPI has made for it."""

    def run(program, **variables):
        ended = job(PROGRAM + program, head="", TMPDIR=str(tmp_path), **variables)
        files = (tmp_path / "program.py.files").read_text().split()
        assert files, ended.err
        return ended, files

    return run


@pytest.mark.parametrize("end", ENDS)
def test_shared_files_of_a_job_are_gone_after_its_end(run, end):
    ended, files = run(ENDS[end])
    assert ended.status != 0
    assert [path for path in files if os.path.exists(path)] == []


def test_shared_files_without_names_serve_later_communicators(run):
    ended, files = run(LATER, MPIDIST_PRETEND_NODES="0,1,1")
    assert (ended.status, ended.err) == (0, "")
    assert [path for path in files if os.path.exists(path)] == []


def test_shared_files_keep_names_by_variable_until_doctor_removes_them(run):
    _, files = run(ENDS["kill of the launcher"], MPIDIST_UNLINK_MPI_FILES="0")
    assert [path for path in files if os.path.exists(path)] == files
    while len(left := [one for one in find_leftovers() if str(one.path) in files]) < len(files):
        time.sleep(0.1)  # a rank may outlive the launcher for a moment; the test's limit ends a wait in vain
    remove(left)
    assert [path for path in files if os.path.exists(path)] == []
