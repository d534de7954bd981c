"""What goes wrong with calls that were started on GPUs: a rank that is missing, NCCL, an interrupt, a reset."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from host_cuda.emulated import Emulated
from host_cuda.gpus import busy, connected, emulated, gpus, group, is_total, mine, opened, up

from mpidist.cross_device_ops import HierarchicalCopyAllReduce, NcclAllReduce
from mpidist.errors import DeadlineExceededError, PeerFailedError
from mpidist.options import CommunicationOptions
from mpidist.transport.group import SyncGroup
from mpidist.transport.nccl import DeviceQueue

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["connected", "emulated", "gpus", "group"]  # fixtures

UNDER_WAY = "launches of NCCL under way"
GIVEN_UP = (DeadlineExceededError, PeerFailedError)
SOON = CommunicationOptions(timeout_seconds=0.5)
LATE = 60  # seconds; a machine that is busy takes less, and a deadline that is not kept takes longer
HAVE_GIVEN_UP = 22  # a tag


@pytest.fixture
def start(emulated: Emulated, connected: SyncGroup, comm: Intracomm) -> Iterator[Callable[..., Any]]:
    """Starts a call, whatever becomes of it; in the end the ranks begin anew."""
    ops = NcclAllReduce().bound_to(connected)
    yield lambda options=None: ops.start_all_reduce("SUM", mine(comm.rank, 9), options)
    start_anew(emulated, connected, comm)


def start_anew(emulated: Emulated, group: SyncGroup, comm: Intracomm) -> None:
    emulated.be_normal()
    comm.Barrier()
    group.reset()
    ops = NcclAllReduce().bound_to(group)
    assert all(is_total(ops.start_all_reduce("SUM", mine(comm.rank, 9)).wait(), comm.size, 9) for _ in range(2))
    assert is_total(ops.all_reduce("SUM", mine(comm.rank, 9)), comm.size, 9)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("misses", ["the start", "the launch"])
def test_a_rank_that_is_late_is_named(
    emulated: Emulated, comm: Intracomm, start: Any, monkeypatch: pytest.MonkeyPatch, misses: str
) -> None:
    """One that agreed on the call makes GPUs wait: the others give up, and later so does it."""
    if (comm.rank, misses) == (1, "the start"):
        return
    launch, others = DeviceQueue.launch, [rank for rank in range(comm.size) if rank != 1]

    def launch_last(*args: Any) -> Any:
        while others:
            comm.recv(None, others.pop(), HAVE_GIVEN_UP)
        return launch(*args)

    with monkeypatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(DeviceQueue, "launch", launch_last)
        handles, begun = [start(SOON) for _ in range(2)], time.monotonic()
        pattern = r"rank 1 of \d ranks did not join"
        with pytest.raises(
            GIVEN_UP, match=pattern if misses == "the start" else r"rank 1 of \d ranks|given up waiting"
        ):
            handles[0].wait()
        if comm.rank != 1:
            assert 0.4 < time.monotonic() - begun < LATE
            if misses == "the launch":
                comm.send(None, 1, HAVE_GIVEN_UP)
        assert misses == "the start" or emulated.ended() == [("abort", 1)]
        with pytest.raises(GIVEN_UP, match=r"earlier call failed|given up waiting"):
            handles[1].wait()


@pytest.mark.ranks(min=2)
def test_each_call_has_its_own_deadline(emulated: Emulated, comm: Intracomm, start: Any) -> None:
    """That of a call which is waited for, not of one that was started after it."""
    emulated.hold(comm.rank == 0)
    if comm.rank:  # so that rank 0 comes to the second call while it waits for the first one
        comm.Barrier()
    handles = [start(CommunicationOptions(timeout_seconds=seconds)) for seconds in (0.6, 30.0)]
    if comm.rank == 0:
        comm.Barrier()
    begun = time.monotonic()
    while comm.rank and time.monotonic() < begun + 1.4:  # has no deadline before rank 0
        handles[0].is_done()
    with pytest.raises(GIVEN_UP):
        handles[0].wait()
    assert comm.rank or 0.5 < time.monotonic() - begun < LATE


@pytest.mark.ranks(min=2)
def test_a_kernel_that_runs_past_the_deadline(emulated: Emulated, group: SyncGroup, comm: Intracomm) -> None:
    """Of the program, on one rank: what it is to add is not there yet. All ranks give up, and begin anew meanwhile.

    What the GPU does later of the call that was given up comes before what the program does next with its arrays.
    """
    ops, value, out = NcclAllReduce().bound_to(group), mine(comm.rank, 40), up(np.zeros(40, np.float32))
    assert is_total(ops.all_reduce("SUM", value), comm.size, 40)
    with busy() if comm.rank == 1 else nullcontext():
        with pytest.raises(GIVEN_UP):
            ops.all_reduce("SUM", value, SOON, out=out)
        comm.Barrier()
        group.reset()
    assert is_total(ops.all_reduce("SUM", value, out=out), comm.size, 40)
    start_anew(emulated, group, comm)
    assert is_total(value, 1, 40) or comm.rank, "only read"


@pytest.mark.ranks(min=3)
@pytest.mark.parametrize("count", [40, 20_000], ids=["by a leader", "in shards"])
@pytest.mark.parametrize("ends", ["a deadline", "an error of NCCL"])
def test_the_host_never_waits_for_a_gpu_without_looking(
    emulated: Emulated, comm: Intracomm, monkeypatch: pytest.MonkeyPatch, count: int, ends: str
) -> None:
    """NCCL within nodes is held back, before the host can carry its results between them."""
    options = SOON if ends == "a deadline" else CommunicationOptions(timeout_seconds=1.5 * LATE)
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", ",".join(str(2 * rank // comm.size) for rank in range(comm.size)))
    for made in opened(comm):
        ops = HierarchicalCopyAllReduce().bound_to(made)
        assert is_total(ops.all_reduce("SUM", mine(comm.rank, count)), comm.size, count)
        emulated.hold()
        emulated.wish("an error of NCCL", 6 * (options is not SOON and comm.rank == 0))
        begun = time.monotonic()
        with pytest.raises(GIVEN_UP):
            ops.all_reduce("SUM", mine(comm.rank, count), options)
        assert time.monotonic() - begun < LATE
        start_anew(emulated, made, comm)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("waits", [True, False])
def test_an_error_of_nccl_in_work_that_was_launched(
    emulated: Emulated, comm: Intracomm, start: Any, waits: bool
) -> None:
    emulated.hold()
    handles = [start() for _ in range(2)]
    assert emulated.comes_to(UNDER_WAY, 2, handles[0].is_done)
    comm.Barrier()
    if comm.rank == 0:
        emulated.wish("an error of NCCL", 6)
        time.sleep(0.02)
        until = time.monotonic() + 20
        while not waits and not handles[0].is_done() and time.monotonic() < until:
            pass
    text = r"start_all_reduce with NCCL on rank 0 of \d .* failed: NCCL_ERROR" if comm.rank == 0 else "rank 0"
    with pytest.raises(PeerFailedError, match=text):
        handles[0].wait()
    assert emulated.ended() == [("abort", 1)]
    with pytest.raises(PeerFailedError):
        handles[1].wait()


@pytest.mark.ranks(min=2)
def test_an_interrupt_while_waiting(emulated: Emulated, comm: Intracomm, start: Any) -> None:
    emulated.hold()
    handles = [start() for _ in range(2)]
    comm.Barrier()
    if comm.rank == 0:
        threading.Timer(0.2, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            handles[0].wait()
        with pytest.raises(RuntimeError):
            handles[1].wait()
    else:
        with pytest.raises(PeerFailedError, match="rank 0 broke off"):
            handles[0].wait()
    assert emulated.ended() == [("abort", 1)]


@pytest.mark.ranks(min=2)
def test_reset_gives_up_what_is_launched(emulated: Emulated, connected: SyncGroup, comm: Intracomm, start: Any) -> None:
    emulated.hold()
    handle, begun = start(), time.monotonic()
    comm.Barrier()
    handle.is_done()
    start_anew(emulated, connected, comm)
    assert time.monotonic() - begun < LATE
    with suppress(RuntimeError):  # it was given up by reset(), unless its thread has come to its end before
        assert is_total(handle.wait(), comm.size, 9)
