"""Started calls on GPUs go on while their ranks do something else: compute, or wait for each other in their own way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from host_cuda.emulated import problems

from mpidist.cross_device_ops import CrossDeviceOps, HierarchicalCopyAllReduce
from mpidist.options import CommunicationOptions
from mpidist.transport import cuda
from mpidist.transport.group import SyncGroup

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(min=2)]

SECONDS = 20.0
COUNT = 300_000
HOLD = """
extern "C" __global__ void hold(long long nanoseconds) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
}
"""


@pytest.fixture
def cupy(comm: Intracomm) -> Iterator[Any]:
    found = cuda.current().support
    reasons = [reason for reason in comm.allgather(found.reason) if reason]
    if reasons:
        pytest.skip(f"needs a GPU: {reasons[0]}")
    module = cuda.current().cupy
    module.cuda.Device(comm.rank % found.num_devices).use()
    yield module
    assert comm.allgather(problems()) == [""] * comm.size


def started_before(comm: Intracomm, ops: CrossDeviceOps, values: Any, options: Any = None) -> Any:
    """Start a reduction, on rank 0 last."""
    if comm.rank == 0:
        comm.Barrier()
    handle = ops.start_all_reduce("SUM", values, options)
    if comm.rank:
        comm.Barrier()
    return handle


def are_sums(results: Any, comm: Intracomm) -> bool:
    return all((its.get() == comm.size).all() for its in results)


def is_reached(comm: Intracomm) -> bool:
    """Wait for the other ranks without a call of the library; give up in the end."""
    request, until = comm.Ibarrier(), time.monotonic() + SECONDS
    while not request.Test():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


@pytest.mark.parametrize("implementation", ["AUTO", "RING"])
def test_a_barrier_of_the_users_own_may_come_before_wait(cupy: Any, comm: Intracomm, implementation: str) -> None:
    """Also while a rank waits for its whole GPU, which waits for what the ranks in the barrier have yet to launch."""
    group, options = SyncGroup.from_mpi(comm), CommunicationOptions(implementation=implementation)
    ops = HierarchicalCopyAllReduce().bound_to(group)
    values = [cupy.ones(COUNT, np.float32), cupy.ones(7, np.float32)]
    assert are_sums(ops.all_reduce("SUM", values, options), comm)
    handle = started_before(comm, ops, values, options)
    if comm.rank == 0:
        cupy.cuda.Device().synchronize()
    came = is_reached(comm)
    assert are_sums(handle.wait(), comm)
    group.close()
    assert came


@pytest.mark.parametrize("way", ["through the host", "RING", "NCCL"])
def test_a_started_call_is_done_while_the_gpu_computes(
    cupy: Any, comm: Intracomm, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Its stream is busy with later work all the time."""
    monkeypatch.setenv("MPIDIST_NCCL", "1" if way == "NCCL" else "0")
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", ",".join(map(str, range(comm.size))))
    group = SyncGroup.from_mpi(comm)
    ops, hold = HierarchicalCopyAllReduce().bound_to(group), cupy.RawKernel(HOLD, "hold")
    options = CommunicationOptions(implementation="AUTO" if way == "through the host" else way)
    values = [cupy.ones(COUNT, np.float32), cupy.ones(7, np.float32)]
    for _ in range(2):
        assert are_sums(started_before(comm, ops, values, options).wait(), comm)
    hold((1,), (1,), (1,))
    busy = cupy.cuda.Event(disable_timing=True)
    handle = ops.start_all_reduce("SUM", values, options)
    hold((1,), (1,), (int(SECONDS / 4 * 1e9),))
    busy.record()
    while not (handle.is_done() or busy.done):
        time.sleep(0.01)
    was_busy = not busy.done
    results = handle.wait()
    assert was_busy
    assert are_sums(results, comm)
    group.close()
