"""Started calls on GPUs go on while their ranks do something else: compute, or wait for each other in their own way."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from host_cuda.gpus import down, gpus, keep_busy, opened, up

from mpidist.cross_device_ops import CrossDeviceOps, HierarchicalCopyAllReduce
from mpidist.options import CommunicationOptions
from mpidist.transport import cuda

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["gpus"]

pytestmark = [pytest.mark.usefixtures("gpus"), pytest.mark.ranks(min=2)]

SECONDS = 20.0
COUNT = 300_000


def started_before(comm: Intracomm, ops: CrossDeviceOps, values: Any, options: Any = None) -> Any:
    """Start a reduction, on rank 0 last."""
    if comm.rank == 0:
        comm.Barrier()
    handle = ops.start_all_reduce("SUM", values, options)
    if comm.rank:
        comm.Barrier()
    return handle


def ones() -> list[Any]:
    return [up(np.ones(count, np.float32)) for count in (COUNT, 7)]


def are_sums(results: Any, comm: Intracomm) -> bool:
    return all((down(its) == comm.size).all() for its in results)


def is_reached(comm: Intracomm) -> bool:
    """Wait for the other ranks without a call of the library; give up in the end."""
    request, until = comm.Ibarrier(), time.monotonic() + SECONDS
    while not request.Test():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


@pytest.mark.parametrize("implementation", ["AUTO", "RING"])
def test_a_barrier_of_the_users_own_may_come_before_wait(comm: Intracomm, implementation: str) -> None:
    """Also while a rank waits for its whole GPU, which waits for what the ranks in the barrier have yet to launch."""
    options, values = CommunicationOptions(implementation=implementation), ones()
    for group in opened(comm):
        ops = HierarchicalCopyAllReduce().bound_to(group)
        assert are_sums(ops.all_reduce("SUM", values, options), comm)
        handle = started_before(comm, ops, values, options)
        if comm.rank == 0:
            cuda.current().cupy.cuda.Device().synchronize()
        came = is_reached(comm)
        assert are_sums(handle.wait(), comm)
    assert came


@pytest.mark.parametrize("way", ["through the host", "RING", "NCCL"])
def test_a_started_call_is_done_while_the_gpu_computes(
    comm: Intracomm, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Its stream is busy with later work all the time."""
    monkeypatch.setenv("MPIDIST_NCCL", "1" if way == "NCCL" else "0")
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", ",".join(map(str, range(comm.size))))
    options, values = CommunicationOptions(implementation="AUTO" if way == "through the host" else way), ones()
    for group in opened(comm):
        ops = HierarchicalCopyAllReduce().bound_to(group)
        for _ in range(2):
            assert are_sums(started_before(comm, ops, values, options).wait(), comm)
        keep_busy(0).synchronize()  # compiled
        handle = ops.start_all_reduce("SUM", values, options)
        busy = keep_busy(SECONDS / 4)
        while not (handle.is_done() or busy.done):
            time.sleep(0.01)
        was_busy = not busy.done
        assert are_sums(handle.wait(), comm)
    assert was_busy
