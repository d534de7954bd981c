"""Calls on GPUs that run ahead of the host: packs of one call, and calls that were started."""

from __future__ import annotations

import _thread
import gc
import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from host_cuda.emulated import Emulated
from host_cuda.gpus import allocations, anywhere, capturing, down, emulated, gpus, keep_busy, opened, up
from support.contributions import HALVES, contribution, reduction_of
from support.everywhere import raises_everywhere

from mpidist.cross_device_ops import CrossDeviceOps, HierarchicalCopyAllReduce, NcclAllReduce
from mpidist.errors import DeadlineExceededError, PeerFailedError
from mpidist.options import CommunicationOptions
from mpidist.transport import cuda
from mpidist.transport.group import SyncGroup
from mpidist.transport.nccl import DeviceQueue

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["anywhere", "emulated", "gpus"]  # fixtures

F4 = np.dtype(np.float32)
COUNTS = [3, 5000, 1, 20_000, 7]
ARRAYS_OF_A_PACK = 3
PACKS = CommunicationOptions(bytes_per_pack=ARRAYS_OF_A_PACK * 400 - 1)  # of arrays of 100 numbers


@pytest.fixture
def group(emulated: Emulated, comm: Intracomm) -> Iterator[SyncGroup]:
    """Ranks of one node, whose communicators are made."""
    for made in opened(comm):
        NcclAllReduce().bound_to(made).all_reduce("SUM", up(np.ones(1)))
        yield made


def mine(rank: int, count: int, dtype: Any = F4) -> Any:
    return up(contribution("sum", rank, count, dtype))


def is_total(array: Any, size: int, count: int, dtype: Any = F4) -> bool:
    return bool((down(array) == reduction_of("sum", size, count, dtype)).all())


def queue_of(group: SyncGroup) -> DeviceQueue:
    queue = group.levels_of(True).queue
    assert queue is not None
    return queue


def arrays_of_packs(rank: int, num_packs: int) -> list[Any]:
    return [mine(rank, 100) for _ in range(ARRAYS_OF_A_PACK * num_packs)]


def all_ops() -> list[CrossDeviceOps]:
    return [NcclAllReduce(), NcclAllReduce(3), HierarchicalCopyAllReduce()]


# Packs of one call.


@pytest.mark.parametrize("dtype", [F4, *HALVES, np.dtype(np.int16)], ids=str)
def test_many_packs_have_the_right_numbers(anywhere: SyncGroup, comm: Intracomm, dtype: Any) -> None:
    """Those that NCCL adds, and those that are joined by kernels between two launches."""
    for ops in [its.bound_to(anywhere) for its in all_ops()]:
        for options in (PACKS, CommunicationOptions(bytes_per_pack=1), CommunicationOptions()):
            arrays = [mine(comm.rank, count, dtype) for count in (100, 7, 0, 1, 3000, 100, 100)]
            outs = [up(np.zeros(array.shape, dtype)) for array in arrays]
            for out in (None, outs, arrays):
                results = ops.all_reduce("SUM", arrays, options, out=out)
                for result in results:
                    assert is_total(result, comm.size, result.size, dtype)


@pytest.mark.ranks(min=2)
def test_all_packs_are_launched_and_the_host_waits_once(
    emulated: Emulated, group: SyncGroup, comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, in_flight, kernels = DeviceQueue.wait, [], []
    arrays = arrays_of_packs(comm.rank, 6)
    down(arrays[-1])
    emulated.hold()

    def look(*arguments: Any) -> None:
        until = time.monotonic() + 20
        while emulated.count("kernels") < before + 2 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.1)
        in_flight.append(emulated.count("launches of NCCL under way"))
        kernels.append(emulated.count("kernels"))
        emulated.hold(False)
        wait(*arguments)

    monkeypatch.setattr(DeviceQueue, "wait", look)
    before = emulated.count("kernels")
    results = NcclAllReduce().bound_to(group).all_reduce("SUM", arrays, PACKS)
    assert in_flight == [6], "the host waits once"
    assert kernels == [before + 2], "the second pack was packed, and no third: memory is bounded"
    assert all(is_total(result, comm.size, 100) for result in results)


@pytest.mark.ranks(min=2)
def test_steady_calls_allocate_nothing_but_results(emulated: Emulated, group: SyncGroup, comm: Intracomm) -> None:
    ops, arrays = NcclAllReduce().bound_to(group), arrays_of_packs(comm.rank, 4)
    ops.all_reduce("SUM", arrays, PACKS, out=arrays)
    events = emulated.count("events")
    with allocations() as made:
        for _ in range(5):
            ops.all_reduce("SUM", arrays, PACKS, out=arrays)
    assert made == []
    assert emulated.count("events") <= events


def test_a_stream_made_current_by_use_stays_current(gpus: cuda.Cuda, group: SyncGroup, comm: Intracomm) -> None:
    """CuPy's `with stream` would put the one before it back."""
    mine_own, before = gpus.cupy.cuda.Stream(non_blocking=True), gpus.cupy.cuda.get_current_stream()
    mine_own.use()
    arrays = arrays_of_packs(comm.rank, 3)
    results = NcclAllReduce().bound_to(group).all_reduce("SUM", arrays, PACKS)
    handle = NcclAllReduce().bound_to(group).start_all_reduce("SUM", arrays, PACKS)
    assert gpus.cupy.cuda.get_current_stream() == mine_own
    assert all(is_total(result, comm.size, 100) for result in [*results, *handle.wait()])
    before.use()


# Calls that were started.


@pytest.mark.parametrize("order", ["in order", "last first", "at random"])
def test_waiting_in_any_order(anywhere: SyncGroup, comm: Intracomm, order: str) -> None:
    for ops in [its.bound_to(anywhere) for its in all_ops()]:
        for step in range(3):
            handles = [ops.start_all_reduce("SUM", mine(comm.rank, count)) for count in COUNTS]
            indices = list(range(len(COUNTS)))
            if order == "last first":
                indices.reverse()
            elif order == "at random":
                random.Random(comm.rank + 10 * step).shuffle(indices)
            for at in indices:
                assert is_total(handles[at].wait(), comm.size, COUNTS[at])
                assert handles[at].is_done()


@pytest.mark.parametrize("dtype", [F4, HALVES[0]], ids=str)
def test_started_and_blocking_calls_mixed(anywhere: SyncGroup, comm: Intracomm, dtype: Any) -> None:
    """On GPUs and on the host; every rank has a speed of its own."""
    ops, chance = NcclAllReduce().bound_to(anywhere), random.Random(comm.rank)
    for step in range(6):
        handles = []
        for at, count in enumerate(COUNTS):
            handles.append(ops.start_all_reduce("SUM", mine(comm.rank, count, dtype), PACKS))
            handles.append(ops.start_all_reduce("SUM", contribution("sum", comm.rank, count, dtype)))
            time.sleep(chance.random() * 0.002)
            if at == step % 5:
                result = ops.all_reduce("SUM", mine(comm.rank, 11, dtype))
                assert is_total(result, comm.size, 11, dtype)
                assert all(handle.is_done() for handle in handles)
        for at, handle in enumerate(handles):
            result, count = handle.wait(), COUNTS[at // 2]
            assert isinstance(result, np.ndarray) == at % 2
            assert is_total(result if at % 2 == 0 else up(result), comm.size, count, dtype)


def test_results_into_arrays_and_arguments_overwritten_afterwards(anywhere: SyncGroup, comm: Intracomm) -> None:
    """New ones, arguments themselves, arrays that are not contiguous, and means of integers."""
    ops = NcclAllReduce().bound_to(anywhere)
    for _ in range(2):
        numbers = contribution("sum", comm.rank, 40, F4)
        values, outs = [up(numbers) for _ in range(3)], [up(np.zeros(40, F4)), None, up(np.zeros(80, F4))[::2]]
        outs[1] = values[1]
        handles = [ops.start_all_reduce("SUM", value, out=out) for value, out in zip(values, outs, strict=True)]
        mean = ops.start_all_reduce("MEAN", up(np.full(5, comm.rank)))
        for handle, value, out in zip(handles, values, outs, strict=True):
            assert handle.wait() is out
            if out is not value:
                value[...] = 77
            assert is_total(out, comm.size, 40)
        assert (down(mean.wait()) == (comm.size - 1) / 2).all()


@pytest.mark.ranks(min=2)
def test_a_call_is_launched_when_all_have_come(
    emulated: Emulated, group: SyncGroup, comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, before anybody waits, and asking never blocks: not even while NCCL is held back."""
    ops, waits = NcclAllReduce().bound_to(group), []
    monkeypatch.setattr(DeviceQueue, "wait", lambda queue, launched, *_: waits.append(launched))
    emulated.hold()
    comm.Barrier()
    handles = [ops.start_all_reduce("SUM", arrays_of_packs(comm.rank, 3), PACKS) for _ in range(3)]
    until = time.monotonic() + 20
    while emulated.count("launches of NCCL under way") < 9 and time.monotonic() < until:
        assert not any(handle.is_done() for handle in handles)
    assert emulated.count("launches of NCCL under way") == 9
    comm.Barrier()
    emulated.hold(False)
    while not all(handle.is_done() for handle in handles):
        assert time.monotonic() < until
    for handle in handles:
        assert all(is_total(result, comm.size, 100) for result in handle.wait())
    assert not waits


@pytest.mark.ranks(min=2)
def test_the_next_call_is_packed_while_nccl_reduces_the_last_one(
    emulated: Emulated, group: SyncGroup, comm: Intracomm
) -> None:
    ops, arrays = NcclAllReduce().bound_to(group), arrays_of_packs(comm.rank, 1)
    down(arrays[-1])
    emulated.hold()
    before, until = emulated.count("kernels"), time.monotonic() + 20
    handles = [ops.start_all_reduce("SUM", arrays, PACKS) for _ in range(3)]
    while emulated.count("launches of NCCL under way") < 3 and time.monotonic() < until:
        handles[0].is_done()
    while emulated.count("kernels") < before + 2 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)
    assert emulated.count("kernels") == before + 2, "the pack of the second call, and not that of the third one"
    comm.Barrier()
    emulated.hold(False)
    assert all(is_total(result, comm.size, 100) for handle in handles for result in handle.wait())


@pytest.mark.ranks(min=2)
def test_memory_is_lent_to_the_stream_that_it_was_allocated_on(emulated: Emulated, group: SyncGroup) -> None:
    """What a call outside of launches was lent belongs to the caller's stream, which may have it back at any time."""
    queue = queue_of(group)

    def of_a_pack() -> Any:
        with queue.packing():
            return queue.buffer("lent", 64)

    outside = [queue.buffer("lent", 64) for _ in range(2)]
    between = [queue.launch("work", lambda: queue.buffer("lent", 64)).result for _ in range(2)]
    packs = [queue.launch("work", of_a_pack).result for _ in range(4)]
    addresses = [memory.data.ptr for memory in (*outside, *between, *packs)]
    assert [addresses.index(one) for one in addresses] == [0, 0, 2, 2, 4, 5, 4, 5]


@pytest.mark.ranks(min=2)
def test_one_call_at_a_time_is_waited_for(
    emulated: Emulated, group: SyncGroup, comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a rank waits for the first of several, it looks after the others, and does not wait for them."""
    wait, depths, in_flight = DeviceQueue.wait, [0], []

    def look(*arguments: Any) -> None:
        depths.append(depths[-1] + 1)
        in_flight.append(emulated.count("launches of NCCL under way"))
        emulated.hold(False)
        wait(*arguments)
        depths.append(depths[-1] - 1)

    monkeypatch.setattr(DeviceQueue, "wait", look)
    ops = NcclAllReduce().bound_to(group)
    for waited in (3, 0):
        emulated.hold(comm.rank == 0)
        if comm.rank:  # so that rank 0 launches in `wait`
            comm.Barrier()
        handles = [ops.start_all_reduce("SUM", mine(comm.rank, count)) for count in COUNTS]
        if comm.rank == 0:
            comm.Barrier()
            in_flight.clear()
        assert is_total(handles[waited].wait(), comm.size, COUNTS[waited])
        assert comm.rank or in_flight[0] > waited, "what is waited for was launched, with all before it"
        for handle, count in zip(handles, COUNTS, strict=True):
            assert is_total(handle.wait(), comm.size, count)
    # On a rank whose GPU is held back by nobody, all calls may have ended before it waits for any.
    assert max(depths) == 1 or (comm.rank > 0 and max(depths) == 0)


@pytest.mark.ranks(min=2)
def test_later_work_of_the_caller_does_not_delay_a_call(group: SyncGroup, comm: Intracomm) -> None:
    """It comes after what the stream held when it was started, not when it was launched."""
    ops = NcclAllReduce().bound_to(group)
    value = mine(comm.rank, 1000)
    keep_busy(0).synchronize()  # compiled
    handles = []
    if comm.rank == 0:  # which launches it in `wait`
        handles = [ops.start_all_reduce("SUM", value) for _ in range(2)]
    comm.Barrier()
    handles = handles or [ops.start_all_reduce("SUM", value) for _ in range(2)]
    backward = keep_busy(3.0)
    results = [handle.wait() for handle in handles]
    assert not backward.done, "the backward pass goes on"
    assert all(is_total(result, comm.size, 1000) for result in results)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("implementation", ["AUTO", "NCCL"])
def test_the_thread_sees_to_hosts_and_gpus(
    emulated: Emulated, comm: Intracomm, monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    """In the order of their start; the fixture looks at whose kernels they are."""
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", ",".join(str(rank % 2) for rank in range(comm.size)))
    options = CommunicationOptions(implementation=implementation)
    for group in opened(comm):
        ops = HierarchicalCopyAllReduce().bound_to(group)
        assert is_total(ops.all_reduce("SUM", mine(comm.rank, 9), options), comm.size, 9)
        for _ in range(3):
            values = [contribution("sum", comm.rank, 50_000, F4) for _ in range(6)]
            handles = [
                ops.start_all_reduce("SUM", up(its) if at % 2 else its, options) for at, its in enumerate(values)
            ]
            time.sleep(0.03)
            for at in (1, 0, 5, 4, 3, 2):
                result = handles[at].wait()
                assert is_total(result if at % 2 else up(result), comm.size, 50_000)
        assert any(thread.name == "mpidist.pending" for thread in threading.enumerate())


@pytest.mark.ranks(min=2)
def test_calls_that_nobody_waits_for(emulated: Emulated, group: SyncGroup, comm: Intracomm) -> None:
    """Their handles may be collected; the next call, or the end, sees to them."""
    ops = NcclAllReduce().bound_to(group)
    values = [mine(comm.rank, 500) for _ in range(4)]
    for value in values:
        ops.start_all_reduce("SUM", value, out=value)
        gc.collect()
    assert is_total(ops.all_reduce("SUM", mine(comm.rank, 5)), comm.size, 5)
    assert all(is_total(value, comm.size, 500) for value in values)
    ops.start_all_reduce("SUM", mine(comm.rank, 500))
    gc.collect()  # and the fixture closes the group


@pytest.mark.ranks(2)
def test_many_started_calls_leave_nothing_behind(emulated: Emulated, group: SyncGroup, comm: Intracomm) -> None:
    ops, value, others = NcclAllReduce().bound_to(group), mine(comm.rank, 60), arrays_of_packs(comm.rank, 2)

    def call() -> None:
        handles = [ops.start_all_reduce("MAX", its, PACKS, out=its) for its in (value, others)]
        handles[-1].wait()

    for _ in range(20):
        call()
    gc.collect()
    memory, events, streams = emulated.held()
    for _ in range(150):
        call()
    gc.collect()
    held = emulated.held()
    assert (held[0] <= memory, held[2]) == (True, streams)
    assert held[1] <= events + 3  # as many as were ever under way at once
    assert not queue_of(group)._flying
    assert not group.calls


# What goes wrong.


@pytest.mark.ranks(min=2)
def test_a_rank_that_never_starts_is_named(emulated: Emulated, group: SyncGroup, comm: Intracomm) -> None:
    ops, options = NcclAllReduce().bound_to(group), CommunicationOptions(timeout_seconds=0.5)
    if comm.rank != 1:
        handles = [ops.start_all_reduce("SUM", mine(comm.rank, 9), options) for _ in range(2)]
        start = time.monotonic()
        with pytest.raises((DeadlineExceededError, PeerFailedError), match=r"rank 1 of \d ranks did not join"):
            handles[0].wait()
        assert 0.4 < time.monotonic() - start < 10
        with pytest.raises((DeadlineExceededError, PeerFailedError), match="an earlier call failed"):
            handles[1].wait()
    comm.Barrier()
    start_anew(group, comm)


@pytest.mark.ranks(min=2)
def test_a_rank_that_never_launches(
    emulated: Emulated, group: SyncGroup, comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have agreed on the call, and the GPUs of the others wait for it: they give up, and later so does it."""
    ops, options = NcclAllReduce().bound_to(group), CommunicationOptions(timeout_seconds=0.5)
    with monkeypatch.context() as patch:
        if comm.rank == 1:
            launch = DeviceQueue.launch
            patch.setattr(DeviceQueue, "launch", lambda *args: (time.sleep(1.5), launch(*args))[1])
        handles = [ops.start_all_reduce("SUM", mine(comm.rank, 9), options) for _ in range(2)]
        start = time.monotonic()
        with pytest.raises((DeadlineExceededError, PeerFailedError), match=r"rank 1 of \d ranks|given up waiting"):
            handles[0].wait()
        assert comm.rank == 1 or 0.4 < time.monotonic() - start < 10
        assert emulated.ended() == [("abort", 1)]
        with pytest.raises((DeadlineExceededError, PeerFailedError), match=r"earlier call failed|given up waiting"):
            handles[1].wait()
    comm.Barrier()
    start_anew(group, comm)


@pytest.mark.ranks(min=2)
def test_each_call_has_its_own_deadline(emulated: Emulated, group: SyncGroup, comm: Intracomm) -> None:
    """That of a call which is waited for, not of one that was started after it."""
    ops = NcclAllReduce().bound_to(group)
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
    with pytest.raises((DeadlineExceededError, PeerFailedError)):
        handles[0].wait()
    assert comm.rank or 0.5 < time.monotonic() - start < 10
    emulated.hold(False)
    comm.Barrier()
    start_anew(group, comm)


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
        with pytest.raises((DeadlineExceededError, PeerFailedError)):
            ops.all_reduce("SUM", mine(comm.rank, count), CommunicationOptions(timeout_seconds=0.5))
        assert time.monotonic() - start < 10
        emulated.hold(False)
        comm.Barrier()
        start_anew(group, comm)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("waits", [True, False])
def test_an_error_of_nccl_in_work_that_was_launched(
    emulated: Emulated, group: SyncGroup, comm: Intracomm, waits: bool
) -> None:
    ops = NcclAllReduce().bound_to(group)
    emulated.hold()
    handles = [ops.start_all_reduce("SUM", mine(comm.rank, 9)) for _ in range(2)]
    until = time.monotonic() + 20
    while emulated.count("launches of NCCL under way") < 2 and time.monotonic() < until:
        handles[0].is_done()
    comm.Barrier()
    if comm.rank == 0:
        emulated.wish("an error of NCCL", 6)
        time.sleep(0.02)
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
    emulated.wish("an error of NCCL", 0)
    emulated.hold(False)
    comm.Barrier()
    start_anew(group, comm)


@pytest.mark.ranks(min=2)
def test_an_interrupt_while_waiting(emulated: Emulated, group: SyncGroup, comm: Intracomm) -> None:
    ops = NcclAllReduce().bound_to(group)
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
    emulated.hold(False)
    comm.Barrier()
    start_anew(group, comm)


@pytest.mark.ranks(min=2)
def test_reset_gives_up_what_is_launched(emulated: Emulated, group: SyncGroup, comm: Intracomm) -> None:
    ops = NcclAllReduce().bound_to(group)
    emulated.hold()
    handle = ops.start_all_reduce("SUM", mine(comm.rank, 9))
    comm.Barrier()
    handle.is_done()
    emulated.hold(False)
    start = time.monotonic()
    start_anew(group, comm)
    assert time.monotonic() - start < 30
    with suppress(RuntimeError):  # it was given up by reset(), unless its thread has come to its end before
        assert is_total(handle.wait(), comm.size, 9)


def start_anew(group: SyncGroup, comm: Intracomm) -> None:
    group.reset()
    ops = NcclAllReduce().bound_to(group)
    for _ in range(2):
        assert is_total(ops.start_all_reduce("SUM", mine(comm.rank, 9)).wait(), comm.size, 9)
    assert is_total(ops.all_reduce("SUM", mine(comm.rank, 9)), comm.size, 9)


# CUDA graphs.


def test_calls_that_agree_are_refused_while_a_graph_is_captured(group: SyncGroup, comm: Intracomm) -> None:
    ops, value = NcclAllReduce().bound_to(group), mine(comm.rank, 9)
    pattern = "cannot be captured in a CUDA graph"
    with capturing():
        with raises_everywhere(comm, RuntimeError, f"^all_reduce {pattern}"):
            ops.all_reduce("SUM", value)
        handle = ops.start_all_reduce("SUM", value)
        with raises_everywhere(comm, RuntimeError, f"^start_all_reduce {pattern}"):
            handle.wait()
    assert is_total(ops.all_reduce("SUM", value), comm.size, 9)
