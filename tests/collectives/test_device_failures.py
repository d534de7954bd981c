"""What goes wrong with calls that were started on GPUs: a rank that is missing, NCCL, an interrupt, a reset."""

import threading
import time
from contextlib import nullcontext, suppress

import numpy as np
import pytest
from host_cuda.emulated import UNDER_WAY
from host_cuda.gpus import busy, connected, emulated, gpus, group, is_total, mine, opened, up

from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.cross_device_ops.hierarchical_copy_all_reduce import HierarchicalCopyAllReduce
from mpidist.cross_device_ops.nccl_all_reduce import NcclAllReduce
from mpidist.errors import DeadlineExceededError, PeerFailedError
from mpidist.options import CommunicationOptions
from mpidist.transport.nccl.launch_queue import DeviceQueue

__all__ = ["connected", "emulated", "gpus", "group"]  # fixtures

pytestmark = pytest.mark.ranks(3)

GIVEN_UP = (DeadlineExceededError, PeerFailedError)
SOON = CommunicationOptions(timeout_seconds=0.5)
LATER = CommunicationOptions(timeout_seconds=2)  # within which all but one rank come to a call
PATIENT = CommunicationOptions(timeout_seconds=600)
HAVE_GIVEN_UP = 22  # a tag
NOT_JOINED, NOT_LAUNCHED = r"rank 1 of \d ranks did not join", r"all \d ranks joined it|given up waiting"
MISSES = {  # what rank 1 misses, and the error
    "the start of a call": NOT_JOINED,
    "the launch of a started call": r"rank 1 of \d ranks|given up waiting",
    "a call": NOT_JOINED,
    "the launch of a call": NOT_LAUNCHED,
    "the launch of a call that connects": NOT_LAUNCHED,
}


@pytest.fixture
def start(emulated, connected, comm):
    """Starts a call, whatever becomes of it; in the end the ranks begin anew."""
    ops = BoundOps(NcclAllReduce(), connected)
    yield lambda options=None: ops.start_all_reduce("SUM", mine(comm.rank, 9), options)
    start_anew(emulated, connected, comm)


def start_anew(emulated, group, comm):
    emulated.be_normal()
    comm.Barrier()
    group.reset()
    assert_right(group, comm)


def assert_right(group, comm):
    ops = BoundOps(NcclAllReduce(), group)
    assert all(is_total(ops.start_all_reduce("SUM", mine(comm.rank, 9)).wait(), comm.size, 9) for _ in range(2))
    assert is_total(ops.all_reduce("SUM", mine(comm.rank, 9)), comm.size, 9)


def issuing_last(comm):
    """Stands in the place of `DeviceQueue.issue` on a rank that comes to it when the others have given up."""
    issue, others = DeviceQueue.issue, [rank for rank in range(comm.size) if rank != comm.rank]

    def issue_last(*args):
        while others:
            comm.recv(None, others.pop(), HAVE_GIVEN_UP)
        issue(*args)

    return issue_last


@pytest.mark.parametrize("misses", MISSES)
def test_late_rank_ends_the_communicators_of_all_groups(emulated, connected, comm, monkeypatch, misses):
    """One that agreed on the call makes GPUs wait: the others give up, and later so does it.

    Also where NCCL first has to connect the ranks, for which it waits before its call returns. NCCL wants the
    communicators of a process aborted together, and each group is reset.
    """
    ops, value = BoundOps(NcclAllReduce(), connected), mine(comm.rank, 9, "f2" if "connects" in misses else "f4")
    for other in opened(comm):
        assert_right(other, comm)
        with monkeypatch.context() as patch:
            if comm.rank == 1:
                patch.setattr(DeviceQueue, "issue", issuing_last(comm))
            if comm.rank != 1 or "launch" in misses:
                fails = [lambda: ops.all_reduce("SUM", value, LATER)] * 2
                if "start" in misses:
                    fails = [ops.start_all_reduce("SUM", value, LATER).wait for _ in range(2)]
                with pytest.raises(GIVEN_UP, match=MISSES[misses]):
                    fails[0]()
                if comm.rank != 1 and "launch" in misses:
                    comm.send(None, 1, HAVE_GIVEN_UP)
                with pytest.raises(GIVEN_UP, match=r"earlier call failed|given up waiting"):
                    fails[1]()
        comm.Barrier()
        connected.reset()
        with pytest.raises((RuntimeError, PeerFailedError), match=r"call strategy.reset\(\) on all ranks"):
            assert_right(other, comm)
        comm.Barrier()
        other.reset()
        assert_right(connected, comm)
        assert_right(other, comm)
        assert emulated.ended() == [("abort", 2)]


def test_deadline_of_a_started_call_is_its_own(emulated, comm, start):
    """That of a call which is waited for, not of one that was started after it."""
    emulated.hold(comm.rank == 0)
    if comm.rank:  # so that rank 0 comes to the second call while it waits for the first one
        comm.Barrier()
    handles = [start(options) for options in (SOON, PATIENT)]
    if comm.rank == 0:
        comm.Barrier()
    has_given_up = comm.Ibarrier() if comm.rank else None
    while has_given_up is not None and not has_given_up.Test():  # has no deadline before rank 0
        handles[0].is_done()
    with pytest.raises(GIVEN_UP, match=None if comm.rank else "waited 0.5 s"):
        handles[0].wait()
    if comm.rank == 0:
        comm.Ibarrier().Wait()


@pytest.mark.parametrize("is_started", [False, True])
def test_kernel_past_the_deadline_ends(emulated, group, comm, is_started):
    """Of the program, on one rank: what it is to add is not there yet. All ranks give up, and begin anew meanwhile.

    What the GPU does later of the call that was given up comes before what the program does next with its arrays.
    """
    ops, value, out = BoundOps(NcclAllReduce(), group), mine(comm.rank, 40), up(np.zeros(40, np.float32))
    assert is_total(ops.all_reduce("SUM", value), comm.size, 40)

    def reduce(value, out):
        if is_started:
            return ops.start_all_reduce("SUM", value, SOON, out=out).wait()
        return ops.all_reduce("SUM", value, SOON, out=out)

    with busy() if comm.rank == 1 else nullcontext():
        with pytest.raises(GIVEN_UP):
            reduce(value, out)
        comm.Barrier()
        group.reset()
    assert is_total(ops.all_reduce("SUM", value, out=out), comm.size, 40)
    start_anew(emulated, group, comm)
    assert is_total(value, 1, 40) or comm.rank, "only read"


@pytest.mark.parametrize("count", [40, 20_000], ids=["by a leader", "in shards"])
@pytest.mark.parametrize("ends", ["a deadline", "an error of NCCL"])
def test_host_waits_for_a_gpu_with_deadline_and_error_checks(emulated, comm, monkeypatch, count, ends):
    """NCCL within nodes is held back, before the host can carry its results between them."""
    options = SOON if ends == "a deadline" else PATIENT
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", ",".join(str(2 * rank // comm.size) for rank in range(comm.size)))
    for made in opened(comm):
        ops = BoundOps(HierarchicalCopyAllReduce(), made)
        assert is_total(ops.all_reduce("SUM", mine(comm.rank, count)), comm.size, count)
        emulated.hold()
        emulated.wish("an error of NCCL", 6 * (options is not SOON and comm.rank == 0))
        with pytest.raises(GIVEN_UP):
            ops.all_reduce("SUM", mine(comm.rank, count), options)
        start_anew(emulated, made, comm)


@pytest.mark.parametrize("what", ["an error, while it waits", "an error, while it asks", "an interrupt"])
def test_error_of_a_rank_ends_all_launched_work(emulated, comm, clock, start, what):
    def interrupt():
        if threading.current_thread() is threading.main_thread():
            clock.in_wait = lambda: None
            raise KeyboardInterrupt

    emulated.hold()
    handles = [start() for _ in range(2)]
    assert emulated.comes_to(UNDER_WAY, 2, handles[0].is_done)
    comm.Barrier()
    if comm.rank == 0 and what == "an interrupt":
        clock.in_wait = interrupt
    elif comm.rank == 0:
        emulated.wish("an error of NCCL", 6)
        time.sleep(0.02)
        while what == "an error, while it asks" and not handles[0].is_done():
            pass
    errors = (PeerFailedError, PeerFailedError, "rank 0")
    if comm.rank == 0:
        errors = *errors[:2], r"start_all_reduce with NCCL on rank 0 of \d .* failed: NCCL_ERROR"
    if what == "an interrupt":
        errors = (KeyboardInterrupt, RuntimeError, "^$") if comm.rank == 0 else (*errors[:2], "rank 0 broke off")
    with pytest.raises(errors[0], match=errors[2]):
        handles[0].wait()
    assert emulated.ended() == [("abort", 1)]
    with pytest.raises(errors[1]):
        handles[1].wait()


def test_reset_gives_up_launched_calls(emulated, connected, comm, start):
    emulated.hold()
    handle = start()
    comm.Barrier()
    handle.is_done()
    start_anew(emulated, connected, comm)
    with suppress(RuntimeError):  # it was given up by reset(), unless its thread has come to its end before
        assert is_total(handle.wait(), comm.size, 9)
