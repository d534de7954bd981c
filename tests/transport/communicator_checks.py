"""What every communicator must do, whoever carries it and wherever its arrays lie."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from support.contributions import HALVES, UFUNCS, contribution, in_rank_order, reduction_of

from mpidist.transport.communicator import shard_bounds
from mpidist.transport.reduction import Reduction

__all__ = ["A_FEW", "CheckedMemory", "checks_of"]

LENGTH = 600  # of several chunks
NARROW_AND_WIDE = [np.dtype("i1"), np.dtype("f8")]
A_FEW = [*NARROW_AND_WIDE, np.dtype("i2"), np.dtype("i4"), *HALVES]


class CheckedMemory(NamedTuple):
    """Memory where arrays lie, and what is checked there."""

    up: Callable[[Any], Any]  # copies numbers there
    down: Callable[[Any], Any]  # returns numbers that are there
    dtypes: Sequence[Any]  # of sums
    others: Sequence[Any]  # of other operations, and of what only moves
    chunk_bytes: int  # of messages that are cut


def lengths_of(its, memory, dtype, op="sum"):
    """Numbers of elements: of the least and greatest width, those round the limits of chunks, and fewer than ranks."""
    size, chunk = its.size, memory.chunk_bytes // dtype.itemsize
    if op != "sum":
        return 2 * size + 1, 5 * chunk + 1
    if dtype not in NARROW_AND_WIDE:
        return 3 * size + 1, 5 * chunk + 1
    return 0, 1, size - 1, size, size + 1, chunk - 1, chunk, chunk + 1, 4 * chunk + 3


def check_reductions(op, memory, its):
    """All-reduce, reduce and reduce-scatter numbers whose results are exact, in any order and in that of ranks."""
    up, down = memory.up, memory.down
    for number, dtype in enumerate(memory.dtypes if op == "sum" else memory.others):
        if dtype.kind == "c" and op in ("min", "max"):
            continue
        cases = [*itertools.product(lengths_of(its, memory, dtype, op), (False, True))]
        # Of two lengths, each has one order with every second dtype, and the other order with the others.
        for count, in_order in cases if len(cases) > 4 else (cases[1:3] if number % 2 else cases[::3]):
            numbers, expected = contribution(op, its.rank, count, dtype), reduction_of(op, its.size, count, dtype)
            start, stop = shard_bounds(count, its.size)[its.rank :][:2]
            reduction = Reduction(op, in_rank_order=in_order)
            buffer = up(numbers)
            its.all_reduce(buffer, reduction)
            assert (down(buffer) == expected).all(), (dtype, count)
            for root in range(its.size) if (op, dtype) == ("sum", np.float64) else [its.size - 1]:
                buffer = up(numbers)
                its.reduce(buffer, reduction, root)
                assert its.rank != root or (down(buffer) == expected).all(), (dtype, count, root)
            buffer = up(numbers)
            shard = its.reduce_scatter(buffer, reduction)
            assert (down(shard) == expected[start:stop]).all(), (dtype, count)
            assert (down(buffer)[start:stop] == expected[start:stop]).all(), (dtype, count)
            shard[...] = 0
            assert (down(buffer)[start:stop] == 0).all(), "a view, so that a gather can follow"


def check_uneven_shards(in_order, memory, its):
    """Of any lengths, some of them 0; into another array or an empty view, and in place."""
    up, down = memory.up, memory.down
    lengths = [(2 * at + 1) % 3 * 3 for at in range(its.size)]
    for dtype, factor in itertools.product(A_FEW, (0, 1, 40)):
        bounds = [int(bound) for bound in (0, *np.cumsum([factor * length for length in lengths]))]
        start, stop = bounds[its.rank], bounds[its.rank + 1]
        expected = reduction_of("sum", its.size, bounds[-1], dtype)
        reduction = Reduction("sum", in_rank_order=in_order)
        numbers = contribution("sum", its.rank, bounds[-1], dtype)
        buffer = up(numbers)
        into = up(np.zeros(stop - start, dtype)) if stop > start else buffer[:0]
        assert its.reduce_scatter(buffer, reduction, bounds, into) is into
        assert (down(into) == expected[start:stop]).all(), dtype
        assert (down(buffer) == numbers).all(), "only read"
        shard = its.reduce_scatter(buffer, reduction, bounds)
        assert (down(shard) == expected[start:stop]).all(), dtype
        its.all_gather(buffer, bounds)
        assert (down(buffer) == expected).all(), dtype


def check_gathers(memory, its):
    """All-gather, and broadcast from every root."""
    up, down = memory.up, memory.down
    for dtype in memory.others:
        for count in lengths_of(its, memory, dtype):
            everyone = [contribution("sum", at, count, dtype) for at in range(its.size)]
            whole = contribution("sum", 5, count, dtype)
            start, stop = shard_bounds(count, its.size)[its.rank :][:2]
            numbers = np.zeros(count, dtype)
            numbers[start:stop] = whole[start:stop]
            buffer = up(numbers)
            its.all_gather(buffer)
            assert (down(buffer) == whole).all(), (dtype, count)
            for root in range(its.size):
                buffer, into = up(everyone[its.rank]), up(np.zeros(count, dtype))
                its.broadcast(buffer, root, into)
                assert (down(into) == everyone[root]).all(), (dtype, count, root)
                assert (down(buffer) == everyone[its.rank]).all(), "only read"
                its.broadcast(buffer, root)
                assert (down(buffer) == everyone[root]).all(), (dtype, count, root)


def check_exchange(memory, its):
    """Arrays of any length, passed round; and from the first rank to the last, while the others do nothing."""
    up, down = memory.up, memory.down
    to, source, last = (its.rank + 1) % its.size, (its.rank - 1) % its.size, its.size - 1
    for dtype, times in itertools.product(memory.others, (0, 1, 50)):
        numbers = contribution("sum", its.rank, times * (its.rank + 1), dtype)
        outgoing, incoming = up(numbers), up(np.zeros(times * (source + 1), dtype))
        its.send_receive(outgoing, to, incoming, source)
        assert (down(incoming) == contribution("sum", source, incoming.size, dtype)).all(), (dtype, times)
        assert (down(outgoing) == numbers).all(), "only read"
    buffer = up(contribution("sum", its.rank, 20, np.dtype(np.float32)))
    if its.rank in (0, last) and last:
        sent, received = (buffer, buffer[:0]) if its.rank == 0 else (buffer[:0], buffer)
        its.send_receive(sent, last - its.rank, received, last - its.rank)
        assert (down(buffer) == contribution("sum", 0, 20, np.dtype(np.float32))).all()


def check_halves(memory, its):
    """They are joined in float32, in rank order."""
    up, down = memory.up, memory.down
    rows = np.random.default_rng(7).standard_normal((its.size, LENGTH + 5))
    for dtype in HALVES:
        parts = [row.astype(dtype) for row in rows]
        buffer = up(parts[its.rank])
        its.all_reduce(buffer, Reduction("sum", divisor=3))
        assert (down(buffer) == in_rank_order(np.add, parts, dtype, 3)).all(), dtype


def check_neighbours(memory, its):
    """What lies beside a slice stays as it is."""
    up, down, size = memory.up, memory.down, its.size
    for dtype, count in itertools.product(A_FEW, (size + 1, LENGTH + 2)):
        around = up(np.full(count + 10, 99, dtype))
        buffer = around[5:-5]
        for reduction in (Reduction(), Reduction("max"), Reduction(in_rank_order=True)):
            buffer[...] = 1
            its.all_reduce(buffer, reduction)
            its.reduce(buffer, reduction, size - 1)
            its.reduce_scatter(buffer, reduction)
        its.all_gather(buffer)
        its.broadcast(buffer, size - 1)
        its.send_receive(buffer.copy(), (its.rank + 1) % size, buffer, (its.rank - 1) % size)
        assert (down(around)[:5] == 99).all(), (dtype, count)
        assert (down(around)[-5:] == 99).all(), (dtype, count)


def checks_of(memory):
    """Return the checks by name."""
    return {
        **{op: partial(check_reductions, op, memory) for op in UFUNCS},
        "uneven shards": partial(check_uneven_shards, False, memory),
        "uneven shards in rank order": partial(check_uneven_shards, True, memory),
        "gathers": partial(check_gathers, memory),
        "exchange": partial(check_exchange, memory),
        "halves": partial(check_halves, memory),
        "neighbours": partial(check_neighbours, memory),
    }
