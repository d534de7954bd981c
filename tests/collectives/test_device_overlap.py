"""Calls on GPUs that run ahead of the host: packs of one call, and calls that were started."""

from __future__ import annotations

import gc
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from host_cuda.device_sums import is_total, mine
from host_cuda.emulated import Emulated
from host_cuda.gpus import allocations, anywhere, connected, down, emulated, gpus, keep_busy, opened, up
from support.contributions import HALVES, contribution

from mpidist.cross_device_ops import CrossDeviceOps, HierarchicalCopyAllReduce, NcclAllReduce
from mpidist.options import CommunicationOptions
from mpidist.transport import cuda
from mpidist.transport.group import SyncGroup
from mpidist.transport.nccl import DeviceQueue

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["anywhere", "connected", "emulated", "gpus"]  # fixtures

F4 = np.dtype(np.float32)
COUNTS = [3, 5000, 1, 20_000, 7]
ARRAYS_OF_A_PACK = 3
UNDER_WAY = "launches of NCCL under way"
PACKS = CommunicationOptions(bytes_per_pack=ARRAYS_OF_A_PACK * 400 - 1)  # of arrays of 100 numbers


def queue_of(group: SyncGroup) -> DeviceQueue:
    queue = group.levels_of(True).queue
    assert queue is not None
    return queue


def arrays_of_packs(rank: int, num_packs: int) -> list[Any]:
    return [mine(rank, 100) for _ in range(ARRAYS_OF_A_PACK * num_packs)]


def all_ops() -> list[CrossDeviceOps]:
    return [NcclAllReduce(), NcclAllReduce(3), HierarchicalCopyAllReduce()]


# Packs of one call.


@pytest.mark.ranks(min=2)
def test_all_packs_are_launched_and_the_host_waits_once(
    emulated: Emulated, connected: SyncGroup, comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, in_flight, kernels = DeviceQueue.wait, [], []
    arrays = arrays_of_packs(comm.rank, 6)
    down(arrays[-1])
    emulated.hold()

    def look(*arguments: Any) -> None:
        emulated.comes_to("kernels", before + 2)
        time.sleep(0.1)
        in_flight.append(emulated.count(UNDER_WAY))
        kernels.append(emulated.count("kernels"))
        emulated.hold(False)
        wait(*arguments)

    monkeypatch.setattr(DeviceQueue, "wait", look)
    before = emulated.count("kernels")
    results = NcclAllReduce().bound_to(connected).all_reduce("SUM", arrays, PACKS)
    assert in_flight == [6], "the host waits once"
    assert kernels == [before + 2], "the second pack was packed, and no third: memory is bounded"
    assert all(is_total(result, comm.size, 100) for result in results)


@pytest.mark.ranks(min=2)
def test_steady_calls_allocate_nothing_but_results(emulated: Emulated, connected: SyncGroup, comm: Intracomm) -> None:
    ops, arrays = NcclAllReduce().bound_to(connected), arrays_of_packs(comm.rank, 4)
    ops.all_reduce("SUM", arrays, PACKS, out=arrays)
    with allocations() as made:
        grown = emulated.grown_by(lambda: ops.all_reduce("SUM", arrays, PACKS, out=arrays), 1, 5)
    assert made == []
    assert max(grown) <= 0


def test_a_stream_made_current_by_use_stays_current(gpus: cuda.Cuda, connected: SyncGroup, comm: Intracomm) -> None:
    """CuPy's `with stream` would put the one before it back."""
    mine_own, before = gpus.cupy.cuda.Stream(non_blocking=True), gpus.cupy.cuda.get_current_stream()
    mine_own.use()
    arrays = arrays_of_packs(comm.rank, 3)
    results = NcclAllReduce().bound_to(connected).all_reduce("SUM", arrays, PACKS)
    handle = NcclAllReduce().bound_to(connected).start_all_reduce("SUM", arrays, PACKS)
    assert gpus.cupy.cuda.get_current_stream() == mine_own
    assert all(is_total(result, comm.size, 100) for result in [*results, *handle.wait()])
    before.use()


# Calls that were started.


@pytest.mark.parametrize("dtype", [F4, *HALVES, np.dtype(np.int16), np.dtype(np.float64)], ids=str)
def test_started_and_blocking_calls_are_waited_for_in_any_order(
    anywhere: SyncGroup, comm: Intracomm, dtype: Any
) -> None:
    """On GPUs and on the host; every rank has a speed and an order of its own."""
    chance = random.Random(comm.rank)
    for step, ops in enumerate(2 * [its.bound_to(anywhere) for its in all_ops()]):
        handles = []
        for at, count in enumerate(COUNTS):
            handles.append(ops.start_all_reduce("SUM", mine(comm.rank, count, dtype), PACKS))
            handles.append(ops.start_all_reduce("SUM", contribution("sum", comm.rank, count, dtype)))
            time.sleep(chance.random() * 0.002)
            if at == step % 5:
                assert is_total(ops.all_reduce("SUM", mine(comm.rank, 11, dtype)), comm.size, 11, dtype)
                assert all(handle.is_done() for handle in handles)
        order = list(range(len(handles)))[:: -1 if step == 1 else 1]
        if step > 1:
            chance.shuffle(order)
        for at in order:
            result = handles[at].wait()
            assert handles[at].is_done()
            assert isinstance(result, np.ndarray) == at % 2
            assert is_total(result if at % 2 == 0 else up(result), comm.size, COUNTS[at // 2], dtype)


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
    emulated: Emulated, connected: SyncGroup, comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, before anybody waits, and asking never blocks: not even while NCCL is held back."""
    ops, waits = NcclAllReduce().bound_to(connected), []
    monkeypatch.setattr(DeviceQueue, "wait", lambda queue, launched, *_: waits.append(launched))
    emulated.hold()
    comm.Barrier()
    handles = [ops.start_all_reduce("SUM", arrays_of_packs(comm.rank, 3), PACKS) for _ in range(3)]
    asked: list[bool] = []
    assert emulated.comes_to(UNDER_WAY, 9, lambda: asked.extend(handle.is_done() for handle in handles))
    assert not any(asked)
    comm.Barrier()
    emulated.hold(False)
    until = time.monotonic() + 20
    while not all(handle.is_done() for handle in handles):
        assert time.monotonic() < until
    for handle in handles:
        assert all(is_total(result, comm.size, 100) for result in handle.wait())
    assert not waits


@pytest.mark.ranks(min=2)
def test_the_next_call_is_packed_while_nccl_reduces_the_last_one(
    emulated: Emulated, connected: SyncGroup, comm: Intracomm
) -> None:
    ops, arrays = NcclAllReduce().bound_to(connected), arrays_of_packs(comm.rank, 1)
    down(arrays[-1])
    emulated.hold()
    before = emulated.count("kernels")
    handles = [ops.start_all_reduce("SUM", arrays, PACKS) for _ in range(3)]
    assert emulated.comes_to(UNDER_WAY, 3, handles[0].is_done)
    emulated.comes_to("kernels", before + 2)
    time.sleep(0.1)
    assert emulated.count("kernels") == before + 2, "the pack of the second call, and not that of the third one"
    comm.Barrier()
    emulated.hold(False)
    assert all(is_total(result, comm.size, 100) for handle in handles for result in handle.wait())


@pytest.mark.ranks(min=2)
def test_memory_is_lent_to_the_stream_that_it_was_allocated_on(emulated: Emulated, connected: SyncGroup) -> None:
    """What a call outside of launches was lent belongs to the caller's stream, which may have it back at any time."""
    queue = queue_of(connected)

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
    emulated: Emulated, connected: SyncGroup, comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a rank waits for the first of several, it looks after the others, and does not wait for them."""
    wait, depths, in_flight = DeviceQueue.wait, [0], []

    def look(*arguments: Any) -> None:
        depths.append(depths[-1] + 1)
        in_flight.append(emulated.count(UNDER_WAY))
        emulated.hold(False)
        wait(*arguments)
        depths.append(depths[-1] - 1)

    monkeypatch.setattr(DeviceQueue, "wait", look)
    ops = NcclAllReduce().bound_to(connected)
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
def test_later_work_of_the_caller_does_not_delay_a_call(connected: SyncGroup, comm: Intracomm) -> None:
    """It comes after what the stream held when it was started, not when it was launched."""
    ops = NcclAllReduce().bound_to(connected)
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
def test_calls_that_nobody_waits_for(emulated: Emulated, connected: SyncGroup, comm: Intracomm) -> None:
    """Their handles may be collected; the next call, or the end, sees to them."""
    ops = NcclAllReduce().bound_to(connected)
    values = [mine(comm.rank, 500) for _ in range(4)]
    for value in values:
        ops.start_all_reduce("SUM", value, out=value)
        gc.collect()
    assert is_total(ops.all_reduce("SUM", mine(comm.rank, 5)), comm.size, 5)
    assert all(is_total(value, comm.size, 500) for value in values)
    ops.start_all_reduce("SUM", mine(comm.rank, 500))
    gc.collect()  # and the fixture closes the group


@pytest.mark.ranks(2)
def test_many_started_calls_leave_nothing_behind(emulated: Emulated, connected: SyncGroup, comm: Intracomm) -> None:
    ops, value, others = NcclAllReduce().bound_to(connected), mine(comm.rank, 60), arrays_of_packs(comm.rank, 2)

    def call() -> None:
        handles = [ops.start_all_reduce("MAX", its, PACKS, out=its) for its in (value, others)]
        handles[-1].wait()

    memory, events, streams = emulated.grown_by(call, 20, 150)
    assert (memory <= 0, streams) == (True, 0)
    assert events <= 3, "as many as were ever under way at once"
    assert not queue_of(connected)._flying
    assert not connected.calls
