"""Nodes of many ranks: what a wait and a failure cost there."""

import re

import pytest

pytestmark = pytest.mark.no_mpi

COUNTS_READS = """
import sys, time
import mpidist
from mpi4py import MPI
reads = []
sys.addaudithook(lambda event, args: event == "open" and str(args[0]).startswith("/proc/") and reads.append(args[0]))
for size in (4, 12):
    part = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank < size else 1)
    if MPI.COMM_WORLD.rank < size:
        with mpidist.MultiWorkerMirroredStrategy(comm=part) as strategy:
            strategy.barrier()
            part.Barrier()
            reads.clear()
            begun = time.monotonic()
            if part.rank == 0:
                time.sleep(0.5)
            strategy.barrier()
            seconds = time.monotonic() - begun
            sys.stdout.write(f"size {size}: {len(reads)} in {seconds} s\\n")
            sys.stdout.flush()
    MPI.COMM_WORLD.Barrier()
"""


def test_wait_on_many_ranks_reads_one_process_in_five_milliseconds(job):
    """Also where the node has more ranks; and none in the first 100 ms."""
    ended = job(COUNTS_READS, ranks=12, head="")
    assert ended.status == 0, ended.err
    found = re.findall(r"size (\d+): (\d+) in ([\d.]+) s", ended.out)
    assert [size for size, _, _ in found] == ["4"] * 4 + ["12"] * 12
    for _, reads, seconds in found:
        assert int(reads) <= max(0, (float(seconds) - 0.1) / 0.005 + 1)
