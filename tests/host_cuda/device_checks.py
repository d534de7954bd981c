"""What every communicator of device memory must do, whoever carries it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from support.contributions import HALVES, contribution, in_rank_order, reduction_of

from host_cuda.gpus import down, up
from mpidist.transport import Communicator, Reduction, shard_bounds

__all__ = ["CHECKS", "check_gathers", "check_reductions", "check_uneven_shards"]

A_FEW = [np.dtype(name) for name in ("int8", "int16", "int32", "float64")] + list(HALVES)
LENGTH = 600  # of several chunks of the tests of staging
Counts = Callable[[Any], Iterable[int]]  # of elements, for a dtype


def check_reductions(its: Communicator, op: str, dtypes: Iterable[Any], counts_of: Counts) -> None:
    """All-reduce, reduce and reduce-scatter numbers whose results are exact."""
    for dtype in dtypes:
        for count in counts_of(dtype):
            expected = reduction_of(op, its.size, count, dtype)
            buffer = up(contribution(op, its.rank, count, dtype))
            its.all_reduce(buffer, Reduction(op))
            assert (down(buffer) == expected).all(), (dtype, count)
            buffer = up(contribution(op, its.rank, count, dtype))
            its.reduce(buffer, Reduction(op), its.size - 1)
            assert its.rank != its.size - 1 or (down(buffer) == expected).all(), (dtype, count)
            start, stop = shard_bounds(count, its.size)[its.rank :][:2]
            buffer = up(contribution(op, its.rank, count, dtype))
            shard = its.reduce_scatter(buffer, Reduction(op))
            assert (down(shard) == expected[start:stop]).all(), (dtype, count)
            assert (down(buffer)[start:stop] == expected[start:stop]).all(), (dtype, count)


def check_uneven_shards(its: Communicator, in_order: bool, dtypes: Iterable[Any], factors: Iterable[int]) -> None:
    """Of any lengths, some of them 0; into another array, and in place."""
    lengths = [(2 * at + 1) % 4 * 3 for at in range(its.size)]
    for dtype, factor in itertools.product(dtypes, factors):
        bounds = [int(bound) for bound in (0, *np.cumsum([factor * length for length in lengths]))]
        start, stop = bounds[its.rank], bounds[its.rank + 1]
        expected = reduction_of("sum", its.size, bounds[-1], dtype)
        reduction = Reduction("sum", in_rank_order=in_order)
        numbers = contribution("sum", its.rank, bounds[-1], dtype)
        buffer, into = up(numbers), up(np.zeros(stop - start, dtype))
        assert its.reduce_scatter(buffer, reduction, bounds, into) is into
        assert (down(into) == expected[start:stop]).all(), dtype
        assert (down(buffer) == numbers).all(), "only read"
        shard = its.reduce_scatter(buffer, reduction, bounds)
        assert (down(shard) == expected[start:stop]).all(), dtype
        its.all_gather(buffer, bounds)
        assert (down(buffer) == expected).all(), dtype


def check_gathers(its: Communicator, dtypes: Iterable[Any], counts_of: Counts) -> None:
    """All-gather, broadcast and gather, from every root."""
    for dtype in dtypes:
        for count in counts_of(dtype):
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
                rows = its.gather(buffer, root)
                assert (rows is None) == (its.rank != root)
                assert rows is None or (down(rows) == np.stack(everyone)).all(), (dtype, count, root)
                its.broadcast(buffer, root)
                assert (down(buffer) == everyone[root]).all(), (dtype, count, root)


def check_exchange(its: Communicator) -> None:
    """Arrays of any length, passed round."""
    to, source = (its.rank + 1) % its.size, (its.rank - 1) % its.size
    for dtype, times in itertools.product(A_FEW, (0, 1, 50)):
        outgoing = up(contribution("sum", its.rank, times * (its.rank + 1), dtype))
        incoming = up(np.zeros(times * (source + 1), dtype))
        its.send_receive(outgoing, to, incoming, source)
        assert (down(incoming) == contribution("sum", source, incoming.size, dtype)).all()


def check_halves(its: Communicator) -> None:
    """They are joined in float32, in rank order."""
    rows = np.random.default_rng(7).standard_normal((its.size, LENGTH + 5))
    for dtype in HALVES:
        parts = [row.astype(dtype) for row in rows]
        buffer = up(parts[its.rank])
        its.all_reduce(buffer, Reduction("sum", divisor=3))
        assert (down(buffer) == in_rank_order(np.add, parts, dtype, 3)).all(), dtype


def check_neighbours(its: Communicator) -> None:
    """What lies beside a slice stays as it is."""
    for dtype in A_FEW:
        around = up(np.full(LENGTH + 12, 99, dtype))
        buffer = around[5:-5]
        for reduction in (Reduction(), Reduction("max"), Reduction(in_rank_order=True)):
            buffer[...] = 1
            its.all_reduce(buffer, reduction)
            its.reduce_scatter(buffer, reduction)
        its.all_gather(buffer)
        its.broadcast(buffer, 0)
        assert (down(around)[:5] == 99).all()
        assert (down(around)[-5:] == 99).all()


CHECKS = [check_exchange, check_halves, check_neighbours]
