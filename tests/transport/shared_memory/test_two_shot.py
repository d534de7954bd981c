"""Fused arrays through shared memory and across nodes: any arrays, any dtype, many chunks, at any pace.

Chunks have 128 bytes, so that a few hundred numbers take all slots in turn, several times.
"""

import gc
import random
import time
import weakref
from itertools import product

import numpy as np
import pytest
from support.contributions import (
    REALS,
    bits,
    contribution,
    flat_trees,
    in_tree_order,
    reduction_of,
    rows_of_this_rank,
    unlike_numbers,
)
from support.transports import set_sizes

from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.transport.mpi.communicator import MAX_CHUNK_BYTES, MpiCommunicator
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory.in_place import InPlace
from mpidist.transport.shared_memory.inter_node import ShardExchange
from mpidist.transport.shared_memory.two_shot import FusedArrays
from mpidist.transport.waiting import complete

pytestmark = [pytest.mark.core, pytest.mark.ranks(min=2)]

CHUNK_BYTES = 128
FINE_COUNT = 20  # smaller pieces, on average, are copied before they are added


@pytest.mark.ranks(3)
def test_small_and_large_lists_take_turns(comm, monkeypatch):
    """Those of one round share the slots with the others."""
    set_sizes(monkeypatch, chunk_bytes=CHUNK_BYTES, one_shot_bytes=CHUNK_BYTES, fine_count=FINE_COUNT)
    mine = random.Random(comm.rank)
    with Strategy(comm=comm) as strategy:
        reducer = parts_of(strategy).group.levels.fused
        assert reducer is not None
        for count in [1, 16, 17, 100, 3, 3, 3, 200, 16, 5] * 5:
            time.sleep(mine.choice([0, 0.0001, 0.001]) * (mine.random() < 0.1))
            buffer = contribution("sum", comm.rank, count, REALS[1])
            assert reducer.is_small(buffer.nbytes) == (count <= 16)
            reducer.all_reduce(buffer, Reduction("sum"))
            assert (buffer == reduction_of("sum", comm.size, count, REALS[1])).all()


@pytest.mark.parametrize("one_shot_bytes", [0, CHUNK_BYTES], ids=["two-shot", "one-shot"])
def test_symmetric_arrays_follow_the_tree(comm, placement, monkeypatch, one_shot_bytes):
    """From and to shared memory, and in place; divided by those who add."""
    sizes = {"chunk_bytes": CHUNK_BYTES, "one_shot_bytes": one_shot_bytes, "fine_count": FINE_COUNT}
    set_sizes(monkeypatch, **sizes, least_bytes=1, depth=2)
    with Strategy(comm=comm) as strategy:
        topology = strategy.topology
        for tree, lengths in product(flat_trees(topology), ([300], [7] * 40, [3, 0, 200, 3])):
            numbers = unlike_numbers(tree.total, sum(lengths), np.float32)
            right = bits(in_tree_order(np.add, numbers) / np.float32(tree.total))
            for outs_are_new in (True, False):
                mine = strategy.symmetric_empty_like([np.zeros(length, np.float32) for length in lengths])
                outs = strategy.symmetric_empty_like(mine) if outs_are_new else mine
                for reduce in [add_in_slots, add_where_they_lie] if topology.num_nodes == 1 else [add_in_slots]:
                    fill(outs, np.zeros(sum(lengths), np.float32))
                    fill(mine, rows_of_this_rank(tree, np.add, numbers)[0])
                    comm.Barrier()
                    reduce(strategy, tree, mine, outs)
                    assert bits(np.concatenate(outs)) == right, (tree, outs_are_new)
                    comm.Barrier()


def add_in_slots(strategy, tree, sources, outs):
    group = parts_of(strategy).group
    everyones = [
        [list(row) for row in zip(*(place.arrays for place in group.shared.places(arrays)), strict=True)]
        for arrays in (sources, outs)
    ]
    arrays = FusedArrays(np.dtype(np.float32), sources, peers=everyones[0])
    arrays.shared = everyones[1]
    reduction = Reduction(fold=tree.within_node, fold_across=tree.across_nodes)
    group.levels.fused.run(group.levels.fused.two_shot(arrays, reduction, tree.total))


def add_where_they_lie(strategy, tree, sources, outs):
    shared, reducer = parts_of(strategy).group.shared, parts_of(strategy).group.levels.fused
    runs = shared.runs(shared.places(sources), shared.places(outs), np.dtype(np.float32))
    transfer = InPlace(runs, reducer.slots, Reduction(fold=tree.within_node), tree.total)
    complete(transfer.steps(has_passed_barrier=False), reducer.check_peers)


def fill(arrays, numbers):
    for array, part in zip(arrays, np.split(numbers, np.cumsum([array.size for array in arrays])[:-1]), strict=True):
        array[...] = part


# Across nodes


@pytest.mark.ranks(2, 3)
def test_shards_are_added_in_messages_of_any_length(comm):
    for way, message_bytes in product(("float32", "float16", "chain"), (64, 1000, MAX_CHUNK_BYTES)):
        across = MpiCommunicator(comm.Dup(), "across_nodes", message_bytes=message_bytes)
        exchange = ShardExchange(across)
        inputs = [
            np.random.default_rng(count).integers(-99, 99, (comm.size, count)) for count in (1, 15, 16, 1000, 4099)
        ]
        buffers = [numbers[comm.rank].astype(np.float32) for numbers in inputs]
        shards = [_started(exchange, buffer, way) for buffer in buffers]
        while not all(shard.is_done for shard in shards):
            exchange.progress()
        for buffer, numbers in zip(buffers, inputs, strict=True):
            np.testing.assert_array_equal(buffer, numbers.sum(0), strict=False)
        across.free()


def test_shard_keeps_its_memory_after_an_interrupt_of_its_start(comm, monkeypatch):
    """MPI may still write to it."""
    across, memory = MpiCommunicator(comm.Dup(), "across_nodes"), []

    def interrupt(buffer, bounds, rows, tag):
        memory.append(weakref.ref(rows))
        raise KeyboardInterrupt

    monkeypatch.setattr(across, "start_parts", interrupt)
    exchange = ShardExchange(across)
    with pytest.raises(KeyboardInterrupt):
        exchange.start(np.ones(8), Reduction())
    exchange.abandon()
    del exchange
    gc.collect()
    assert memory[0]() is not None
    across.free()


def _started(exchange, buffer, way):
    if way != "chain":
        return exchange.start(buffer, Reduction(), np.dtype(np.float16) if way == "float16" else None)
    own = buffer.copy()

    def fold(before):
        buffer[...] = own if before is None else before + own

    return exchange.start_chain(buffer, fold)
