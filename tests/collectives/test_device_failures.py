"""What goes wrong with calls that were started on GPUs: a rank that is missing, NCCL, an interrupt, a reset."""

from __future__ import annotations

import _thread
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from host_cuda.device_sums import is_total, mine
from host_cuda.emulated import Emulated
from host_cuda.gpus import connected, emulated, gpus, opened

from mpidist.cross_device_ops import HierarchicalCopyAllReduce, NcclAllReduce
from mpidist.errors import DeadlineExceededError, PeerFailedError
from mpidist.options import CommunicationOptions
from mpidist.transport.group import SyncGroup
from mpidist.transport.nccl import DeviceQueue

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["connected", "emulated", "gpus"]  # fixtures

UNDER_WAY = "launches of NCCL under way"
GIVEN_UP = (DeadlineExceededError, PeerFailedError)
SOON = CommunicationOptions(timeout_seconds=0.5)


@pytest.mark.ranks(min=2)
def test_a_rank_that_never_starts_is_named(emulated: Emulated, connected: SyncGroup, comm: Intracomm) -> None:
    ops = NcclAllReduce().bound_to(connected)
    if comm.rank != 1:
        handles = [ops.start_all_reduce("SUM", mine(comm.rank, 9), SOON) for _ in range(2)]
        start = time.monotonic()
        with pytest.raises(GIVEN_UP, match=r"rank 1 of \d ranks did not join"):
            handles[0].wait()
        assert 0.4 < time.monotonic() - start < 10
        with pytest.raises(GIVEN_UP, match="an earlier call failed"):
            handles[1].wait()
    start_anew(emulated, connected, comm)


@pytest.mark.ranks(min=2)
def test_a_rank_that_never_launches(
    emulated: Emulated, connected: SyncGroup, comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have agreed on the call, and the GPUs of the others wait for it: they give up, and later so does it."""
    ops = NcclAllReduce().bound_to(connected)
    with monkeypatch.context() as patch:
        if comm.rank == 1:
            launch = DeviceQueue.launch
            patch.setattr(DeviceQueue, "launch", lambda *args: (time.sleep(1.5), launch(*args))[1])
        handles = [ops.start_all_reduce("SUM", mine(comm.rank, 9), SOON) for _ in range(2)]
        start = time.monotonic()
        with pytest.raises(GIVEN_UP, match=r"rank 1 of \d ranks|given up waiting"):
            handles[0].wait()
        assert comm.rank == 1 or 0.4 < time.monotonic() - start < 10
        assert emulated.ended() == [("abort", 1)]
        with pytest.raises(GIVEN_UP, match=r"earlier call failed|given up waiting"):
            handles[1].wait()
    start_anew(emulated, connected, comm)


@pytest.mark.ranks(min=2)
def test_each_call_has_its_own_deadline(emulated: Emulated, connected: SyncGroup, comm: Intracomm) -> None:
    """That of a call which is waited for, not of one that was started after it."""
    ops = NcclAllReduce().bound_to(connected)
    emulated.hold(comm.rank == 0)
    limits = [CommunicationOptions(timeout_seconds=seconds) for seconds in (0.6, 30.0)]
    if comm.rank:  # so that rank 0 comes to the second call while it waits for the first one
        comm.Barrier()
    handles = [ops.start_all_reduce("SUM", mine(comm.rank, 9), options) for options in limits]
    if comm.rank == 0:
        comm.Barrier()
    start = time.monotonic()
    while comm.rank and time.monotonic() < start + 1.4:  # has no deadline before rank 0
        handles[0].is_done()
    with pytest.raises(GIVEN_UP):
        handles[0].wait()
    assert comm.rank or 0.5 < time.monotonic() - start < 10
    start_anew(emulated, connected, comm)


@pytest.mark.ranks(min=3)
@pytest.mark.parametrize("count", [40, 20_000], ids=["by a leader", "in shards"])
def test_the_host_never_waits_for_a_gpu_without_a_deadline(
    emulated: Emulated, comm: Intracomm, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """NCCL within nodes is held back, before the host can carry its results between them."""
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", ",".join(str(2 * rank // comm.size) for rank in range(comm.size)))
    for group in opened(comm):
        ops = HierarchicalCopyAllReduce().bound_to(group)
        assert is_total(ops.all_reduce("SUM", mine(comm.rank, count)), comm.size, count)
        emulated.hold()
        start = time.monotonic()
        with pytest.raises(GIVEN_UP):
            ops.all_reduce("SUM", mine(comm.rank, count), SOON)
        assert time.monotonic() - start < 10
        start_anew(emulated, group, comm)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("waits", [True, False])
def test_an_error_of_nccl_in_work_that_was_launched(
    emulated: Emulated, connected: SyncGroup, comm: Intracomm, waits: bool
) -> None:
    ops = NcclAllReduce().bound_to(connected)
    emulated.hold()
    handles = [ops.start_all_reduce("SUM", mine(comm.rank, 9)) for _ in range(2)]
    assert emulated.comes_to(UNDER_WAY, 2, handles[0].is_done)
    comm.Barrier()
    if comm.rank == 0:
        emulated.wish("an error of NCCL", 6)
        time.sleep(0.02)
        until = time.monotonic() + 20
        while not waits and not handles[0].is_done() and time.monotonic() < until:
            pass
        with pytest.raises(PeerFailedError, match=r"start_all_reduce with NCCL on rank 0 of \d .* failed: NCCL_ERROR"):
            handles[0].wait()
    else:
        with pytest.raises(PeerFailedError, match="rank 0"):
            handles[0].wait()
    assert emulated.ended() == [("abort", 1)]
    with pytest.raises(PeerFailedError):
        handles[1].wait()
    start_anew(emulated, connected, comm)


@pytest.mark.ranks(min=2)
def test_an_interrupt_while_waiting(emulated: Emulated, connected: SyncGroup, comm: Intracomm) -> None:
    ops = NcclAllReduce().bound_to(connected)
    emulated.hold()
    handles = [ops.start_all_reduce("SUM", mine(comm.rank, 9)) for _ in range(2)]
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
    start_anew(emulated, connected, comm)


@pytest.mark.ranks(min=2)
def test_reset_gives_up_what_is_launched(emulated: Emulated, connected: SyncGroup, comm: Intracomm) -> None:
    ops = NcclAllReduce().bound_to(connected)
    emulated.hold()
    handle = ops.start_all_reduce("SUM", mine(comm.rank, 9))
    comm.Barrier()
    handle.is_done()
    start = time.monotonic()
    start_anew(emulated, connected, comm)
    assert time.monotonic() - start < 30
    with suppress(RuntimeError):  # it was given up by reset(), unless its thread has come to its end before
        assert is_total(handle.wait(), comm.size, 9)


def start_anew(emulated: Emulated, group: SyncGroup, comm: Intracomm) -> None:
    emulated.be_normal()
    comm.Barrier()
    group.reset()
    ops = NcclAllReduce().bound_to(group)
    for _ in range(2):
        assert is_total(ops.start_all_reduce("SUM", mine(comm.rank, 9)).wait(), comm.size, 9)
    assert is_total(ops.all_reduce("SUM", mine(comm.rank, 9)), comm.size, 9)
