"""Jobs of real ranks that an error ends: what they wrote, and with which exit status."""

import contextlib
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from mpi_session import HANG_SECONDS, OF_RANKS, clean_environment
from mpi_session.launch import Launcher

import mpidist

PROJECT = str(Path(mpidist.__file__).parents[1])
HERE = socket.gethostname()
LONG_SECONDS = 10 * HANG_SECONDS  # of work that must not be waited for
HEAD = """
import os, signal, sys, threading, time
import mpidist
strategy = mpidist.MultiWorkerMirroredStrategy()
rank = strategy.topology.rank
def reduce_for_ever():
    while True:
        strategy.reduce("SUM", 1.0)
"""
# How the ranks of a program wait for each other without MPI: for files beside the program.
SIGNS = """
import os, time
def leave_sign(name):
    open(os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), name), "w").close()
def await_signs(*names):  # the test's limit ends a wait in vain
    folder = os.path.dirname(os.path.abspath(sys.argv[0]))
    while not all(os.path.exists(os.path.join(folder, name)) for name in names):
        time.sleep(0.05)
"""


def environment():
    return {
        **clean_environment(),
        "PYTHONPATH": PROJECT,
        "MALLOC_ARENA_MAX": "1",  # of others, 64 MiB of addresses each are had in advance, whatever the limit is
        **OF_RANKS,
        "OMPI_MCA_osc": "^ucx",  # writes of its own when a shared window is made, and is not used
    }


@dataclass(frozen=True)
class Ended:
    """A job that has come to its end."""

    status: int
    out: str
    err: str

    def lines_of(self, rank):
        """Return what a rank wrote with its name in front, as `mpidist` does for an uncaught error."""
        prefix = f"[rank {rank} on {HERE}] "
        return [line.partition(prefix)[2] for line in self.err.splitlines() if prefix in line]


@pytest.fixture
def job(tmp_path):
    """Run a program on 3 ranks of the MPI library that these tests run with."""

    def run(body, ranks=3, head=HEAD, before=(), **variables):
        script = tmp_path / "program.py"
        script.write_text(head + body)
        command = [*Launcher.find(None).command, "-n", str(ranks), *before, sys.executable, str(script)]
        return end_of(command, **variables)

    return run


def stand_in(folder, name, body):
    """Write a program that answers for another one, such as one of Slurm's."""
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def ran(command, **how):
    """Run a command to its end, whatever that is, and keep what it writes."""
    return subprocess.run(command, capture_output=True, text=True, check=False, **how)


def processes_with(**variables):
    """Return the commands of processes that have these variables, by the processes' numbers."""
    own, found = {f"{name}={value}" for name, value in variables.items()}, {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if own <= {*(path / "environ").read_text(errors="replace").split("\0")}:
                found[int(path.name)] = (path / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
    return {pid: command for pid, command in found.items() if command}  # without one, it is just ending


def end_of(command, **variables):
    """Run a command to its end, with temporary files of its own: a killed launcher leaves some, by its number."""
    with tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True) as temporary:
        its = {**environment(), "TMPDIR": temporary, **variables}
        limit = 0.8 * HANG_SECONDS  # before the test's own, so that what the job wrote is shown
        try:
            done = ran(command, env=its, timeout=limit)
        except subprocess.TimeoutExpired as error:
            pytest.fail(f"the job did not end; it wrote {error.stdout!r} and {error.stderr!r}")
    return Ended(done.returncode, done.stdout, done.stderr)
