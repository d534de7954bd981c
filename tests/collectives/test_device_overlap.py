"""Calls on GPUs that run ahead of the host: packs of one call, and calls that were started."""

import gc
import os
import random
import threading
import time

import numpy as np
import pytest
from host_cuda.emulated import UNDER_WAY
from host_cuda.gpus import (
    allocations,
    busy,
    connected,
    down,
    emulated,
    gpus,
    group,
    is_total,
    mine,
    opened,
    require_gpus,
    up,
)
from support.contributions import reduction_of

from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.cross_device_ops.hierarchical_copy_all_reduce import HierarchicalCopyAllReduce
from mpidist.cross_device_ops.nccl_all_reduce import NcclAllReduce
from mpidist.options import CommunicationOptions
from mpidist.transport.group import levels
from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.nccl.launch_queue import DeviceQueue

__all__ = ["connected", "emulated", "gpus", "group"]  # fixtures

F4 = np.dtype(np.float32)
COUNTS = [3, 5000, 1, 20_000, 7]
ARRAYS_OF_A_PACK = 3
PACKS = CommunicationOptions(bytes_per_pack=ARRAYS_OF_A_PACK * 400 - 1)  # of arrays of 100 numbers


def arrays_of_packs(rank, num_packs):
    return [mine(rank, 100) for _ in range(ARRAYS_OF_A_PACK * num_packs)]


def all_ops():
    return [NcclAllReduce(), NcclAllReduce(3), HierarchicalCopyAllReduce()]


# Packs of one call.


@pytest.mark.ranks(3)
def test_all_packs_are_launched_and_the_host_waits_once(emulated, connected, comm, monkeypatch):
    wait, in_flight, kernels = DeviceQueue.wait, [], []
    arrays = arrays_of_packs(comm.rank, 6)
    down(arrays[-1])
    emulated.hold()

    def look(*arguments):
        emulated.comes_to("kernels", before + 2)
        time.sleep(0.1)
        in_flight.append(emulated.count(UNDER_WAY))
        kernels.append(emulated.count("kernels"))
        emulated.hold(False)
        wait(*arguments)

    monkeypatch.setattr(DeviceQueue, "wait", look)
    before = emulated.count("kernels")
    results = BoundOps(NcclAllReduce(), connected).all_reduce("SUM", arrays, PACKS)
    assert in_flight == [6], "the host waits once"
    assert kernels == [before + 2], "the second pack was packed, and no third: memory is bounded"
    assert all(is_total(result, comm.size, 100) for result in results)


HALF = CommunicationOptions(compression="fp16", compress_everywhere=True)
LARGE, SMALL = (5000, 7, 6000, 1024, 8), range(10, 171)
LAUNCHES = {  # of several ranks; one alone copies at most
    "a pack is filled and emptied": (SMALL, "SUM", "new", CommunicationOptions(), 2),
    "and divided as it is emptied": (SMALL, "MEAN", "new", CommunicationOptions(), 2),
    "large arrays are copied, and divided": (LARGE, "MEAN", "new", CommunicationOptions(), 1 + 2 + 1),
    "large arrays are copied": (LARGE, "SUM", "out", CommunicationOptions(), 1 + 2),
    "large arrays stay": (LARGE, "SUM", "in place", CommunicationOptions(), 2),
    "a pack is cast as it is filled": (LARGE, "SUM", "out", HALF, 2),
    "and cast and divided as it is emptied": (SMALL, "MEAN", "out", HALF, 2),
}


@pytest.mark.ranks(1, 3)
def test_calls_that_come_again_launch_few_kernels_and_allocate_results_alone(emulated, group, comm, monkeypatch):
    """One more where NCCL brings halves of all ranks, which are joined by a kernel."""
    monkeypatch.setattr(levels, "_DIRECT_BYTES_OF_DEVICE", 1 << 12)
    ops, is_nccl = BoundOps(HierarchicalCopyAllReduce(), group), group.levels_of(True).queue is not None
    for what, (sizes, op, into, options, num_launches) in LAUNCHES.items():
        values = [mine(comm.rank, size) for size in sizes]
        out = {"out": [up(np.zeros(size, F4)) for size in sizes], "in place": values}.get(into)
        for _ in range(3):
            ops.all_reduce(op, values, options, out=out)
        emulated.forget()
        with allocations() as made:
            results = ops.all_reduce(op, values, options, out=out)
        expected = num_launches + (options is HALF and is_nccl) if comm.size > 1 else int(into != "in place")
        assert len(emulated.calls("a kernel")) == expected, what
        assert made == [] or into == "new" or not is_nccl, what  # calls through the host do allocate
        factor = np.float32(comm.size if op == "MEAN" else 1)
        if options is not HALF and into != "in place":  # whose totals are added again
            totals = [reduction_of("sum", comm.size, size, F4) for size in sizes]
            assert all((down(its) == total / factor).all() for its, total in zip(results, totals, strict=True)), what


@pytest.mark.ranks(3)
def test_packs_of_gpu_arrays_are_padded(emulated, connected, comm):
    """So that each array begins at a multiple of 16 bytes: less than 16 bytes for each array."""
    BoundOps(NcclAllReduce(), connected).all_reduce("SUM", [mine(comm.rank, size) for size in (3, 8, 1)])
    assert emulated.calls("allReduce")[-1] == ("allReduce", 16 + 32 + 16)


@pytest.mark.ranks(3)
def test_stream_made_current_by_use_stays_current(gpus, connected, comm):
    """CuPy's `with stream` would put the one before it back."""
    mine_own, before = gpus.cupy.cuda.Stream(non_blocking=True), gpus.cupy.cuda.get_current_stream()
    mine_own.use()
    arrays = arrays_of_packs(comm.rank, 3)
    results = BoundOps(NcclAllReduce(), connected).all_reduce("SUM", arrays, PACKS)
    handle = BoundOps(NcclAllReduce(), connected).start_all_reduce("SUM", arrays, PACKS)
    assert gpus.cupy.cuda.get_current_stream() == mine_own
    assert all(is_total(result, comm.size, 100) for result in [*results, *handle.wait()])
    before.use()


# Calls that were started.


KINDS = [
    CommunicationOptions(),
    CommunicationOptions(implementation="NCCL"),
    CommunicationOptions(implementation="RING"),
    CommunicationOptions(compression="bf16", compress_everywhere=True),
    CommunicationOptions(compression="fp16", implementation="NCCL"),
    CommunicationOptions(reproducible=True, bytes_per_pack=900),
]


@pytest.mark.ranks(1, 4)
def test_started_and_blocking_calls_of_all_kinds_are_waited_for_in_any_order(emulated, comm, placement):
    """Launched, staged, round the ring; of GPU and host arrays, into outs; each rank has a speed of its own."""

    def is_right(array):
        return bool(((array if isinstance(array, np.ndarray) else down(array)) == 2 * comm.size).all())

    chance, own = np.random.default_rng(placement), random.Random(comm.rank)
    emulated.wish("NCCL's delay", 300)
    for its in opened(comm):
        for _ in range(3):
            handles = []
            for _ in range(8):
                ops, options = BoundOps(all_ops()[chance.integers(3)], its), KINDS[chance.integers(len(KINDS))]
                on_gpu, on_host = sorted(chance.choice(4, 2)), chance.random() < 0.5
                values = [up(np.full(COUNTS[at], 2, ("f4", "i2", "f2", "f8")[at])) for at in on_gpu]
                values += [np.full(COUNTS[at], 2.0) for at in range(on_host)]
                out = values if chance.random() < 0.5 else None
                if chance.random() < 0.2:
                    assert all(map(is_right, ops.all_reduce("SUM", values, options, out=out)))
                    assert all(handle.is_done() for handle in handles)
                else:
                    handles.append(ops.start_all_reduce("SUM", values, options, out=out))
                time.sleep(own.random() * 0.002)
            time.sleep(own.random() * 0.03)  # in which the thread sees to them
            own.shuffle(handles)
            for handle in handles:
                assert all(map(is_right, handle.wait()))
                assert handle.is_done()
        assert comm.size == 1 or any(thread.name == "mpidist.pending" for thread in threading.enumerate())


@pytest.mark.ranks(3)
def test_calls_are_launched_when_all_have_come_and_the_next_one_is_packed(emulated, connected, comm, monkeypatch):
    """All packs, before anybody waits, and asking never blocks: not even while NCCL is held back."""
    ops, waits = BoundOps(NcclAllReduce(), connected), []
    monkeypatch.setattr(DeviceQueue, "wait", lambda queue, launched, *_: waits.append(launched))
    arrays = [arrays_of_packs(comm.rank, num_packs) for num_packs in (1, 3, 3)]
    down(arrays[-1][-1])
    emulated.hold()
    comm.Barrier()
    before = emulated.count("kernels")
    handles = [ops.start_all_reduce("SUM", its, PACKS) for its in arrays]
    asked = []
    assert emulated.comes_to(UNDER_WAY, 7, lambda: asked.extend(handle.is_done() for handle in handles))
    assert not any(asked)
    emulated.comes_to("kernels", before + 2)
    time.sleep(0.1)
    assert emulated.count("kernels") == before + 2, "the first two packs, of two calls, and no third: memory is bounded"
    comm.Barrier()
    emulated.hold(False)
    while not all(handle.is_done() for handle in handles):
        pass
    assert all(is_total(result, comm.size, 100) for handle in handles for result in handle.wait())
    assert not waits


@pytest.mark.ranks(3)
def test_one_call_at_a_time_is_waited_for(emulated, connected, comm, monkeypatch):
    """While a rank waits for the first of several, it looks after the others, and does not wait for them."""
    wait, depths, in_flight = DeviceQueue.wait, [0], []

    def look(*arguments):
        depths.append(depths[-1] + 1)
        in_flight.append(emulated.count(UNDER_WAY))
        emulated.hold(False)
        wait(*arguments)
        depths.append(depths[-1] - 1)

    monkeypatch.setattr(DeviceQueue, "wait", look)
    ops = BoundOps(NcclAllReduce(), connected)
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


@pytest.mark.ranks(3)
def test_calls_that_nobody_waits_for(emulated, connected, comm):
    """Their handles may be collected; the next call, or the end, sees to them."""
    ops = BoundOps(NcclAllReduce(), connected)
    values = [mine(comm.rank, 500) for _ in range(4)]
    for value in values:
        ops.start_all_reduce("SUM", value, out=value)
        gc.collect()
    assert is_total(ops.all_reduce("SUM", mine(comm.rank, 5)), comm.size, 5)
    assert all(is_total(value, comm.size, 500) for value in values)
    ops.start_all_reduce("SUM", mine(comm.rank, 500))
    gc.collect()  # and the fixture closes the group


@pytest.mark.ranks(3)
def test_mpi_carries_device_memory_when_nccl_is_done(emulated, connected, comm, monkeypatch):
    """Both at once could end in a deadlock, where MPI has work on the GPU."""
    transfer, under_way = MpiCommunicator.transfer, []

    def note(*arguments):
        under_way.append(emulated.count(UNDER_WAY))
        transfer(*arguments)

    monkeypatch.setattr(MpiCommunicator, "transfer", note)
    ops, values = BoundOps(NcclAllReduce(), connected), mine(comm.rank, 300_000)
    emulated.wish("NCCL's delay", 200_000)
    by_nccl, by_mpi = (ops.start_all_reduce("SUM", values, options) for options in (None, KINDS[2]))
    assert is_total(by_mpi.wait(), comm.size, 300_000)
    assert is_total(by_nccl.wait(), comm.size, 300_000)
    assert set(under_way) == {0}


def started_before(comm, ops, values, options=None):
    """Start a reduction, on rank 0 last."""
    if comm.rank == 0:
        comm.Barrier()
    handle = ops.start_all_reduce("SUM", values, options)
    if comm.rank:
        comm.Barrier()
    return handle


def are_sums(results, comm):
    return all(is_total(its, comm.size, its.size) for its in results)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("implementation", ["AUTO", "RING"])
def test_start_all_reduce_completes_beside_a_barrier(gpus, comm, implementation):
    """Also while a rank waits for its whole GPU, which waits for what the ranks in the barrier have yet to launch."""
    options, values = CommunicationOptions(implementation=implementation), [mine(comm.rank, 300_000)]
    for made in opened(comm):
        ops = BoundOps(HierarchicalCopyAllReduce(), made)
        assert are_sums(ops.all_reduce("SUM", values, options), comm)
        handle = started_before(comm, ops, values, options)
        if comm.rank == 0:
            gpus.cupy.cuda.Device().synchronize()
        request = comm.Ibarrier()
        while not request.Test():
            time.sleep(0.001)
        assert are_sums(handle.wait(), comm)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("way", ["through the host", "RING", "NCCL", "NCCL, one node"])
def test_started_calls_are_done_while_the_gpu_computes(gpus, comm, monkeypatch, way):
    """They come after what the stream held when they were started: later work of the caller does not delay them."""
    implementation, _, nodes = way.partition(", ")
    if implementation == "NCCL" and os.environ.get("TEST_HOSTIDS") != "1":
        require_gpus(comm.size)
    monkeypatch.setenv("MPIDIST_NCCL", str(int(implementation == "NCCL")))
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", ",".join(str(0 if nodes else rank) for rank in range(comm.size)))
    options = CommunicationOptions(implementation="AUTO" if way == "through the host" else implementation)
    values = [mine(comm.rank, count) for count in (300_000, 7)]
    for made in opened(comm):
        ops = BoundOps(HierarchicalCopyAllReduce(), made)
        for _ in range(2):
            assert are_sums(started_before(comm, ops, values, options).wait(), comm)
        handles = [started_before(comm, ops, values, options) for _ in range(2)]
        with busy() as backward:
            while comm.rank and not (handles[0].is_done() or backward.done):  # without waiting
                time.sleep(0.001)
            results = [*handles[0].wait(), *handles[1].wait()]
            was_busy = not backward.done
            comm.Barrier()
        assert are_sums(results, comm)
    assert was_busy
