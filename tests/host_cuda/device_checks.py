"""What every communicator of device memory must do, whoever carries it."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from support.contributions import DTYPES, HALVES, UFUNCS, contribution, in_rank_order, reduction_of

from host_cuda.gpus import down, up
from mpidist.transport import cuda
from mpidist.transport.communicator import Communicator, shard_bounds
from mpidist.transport.reduction import Reduction

__all__ = ["CHECKS", "CHUNK"]

CHUNK = 192  # bytes, of those whose messages are cut; the parts of 1 to 4 ranks are whole numbers
LENGTH = 600  # of several chunks
ON_DEVICE = [dtype for dtype in DTYPES if dtype.char not in "gG"]
NARROW_AND_WIDE = [np.dtype("i1"), np.dtype("f8")]
A_FEW = [*NARROW_AND_WIDE, np.dtype("i2"), np.dtype("i4"), *HALVES]


def lengths_of(its: Communicator, dtype: Any, op: str = "sum") -> Sequence[int]:
    """Numbers of elements: of the least and greatest width, those round the limits of chunks, and fewer than ranks."""
    size, chunk = its.size, CHUNK // dtype.itemsize
    if op != "sum":
        return (5 * chunk + 1,)
    if dtype not in NARROW_AND_WIDE:
        return 3 * size + 1, 5 * chunk + 1
    return 0, 1, size + 1, chunk - 1, chunk, chunk + 1, 4 * chunk + 3


def check_reductions(op: str, its: Communicator) -> None:
    """All-reduce, reduce and reduce-scatter numbers whose results are exact, in any order and in that of ranks."""
    for dtype in ON_DEVICE if op == "sum" else A_FEW:
        for count in lengths_of(its, dtype, op):
            numbers, expected = contribution(op, its.rank, count, dtype), reduction_of(op, its.size, count, dtype)
            start, stop = shard_bounds(count, its.size)[its.rank :][:2]
            for reduction in (Reduction(op), Reduction(op, in_rank_order=True)):
                buffer = up(numbers)
                its.all_reduce(buffer, reduction)
                assert (down(buffer) == expected).all(), (dtype, count)
            for root in range(its.size) if (op, dtype) == ("sum", np.float64) else [its.size - 1]:
                buffer = up(numbers)
                its.reduce(buffer, Reduction(op), root)
                assert its.rank != root or (down(buffer) == expected).all(), (dtype, count, root)
            buffer = up(numbers)
            shard = its.reduce_scatter(buffer, Reduction(op))
            assert (down(shard) == expected[start:stop]).all(), (dtype, count)
            assert (down(buffer)[start:stop] == expected[start:stop]).all(), (dtype, count)


def check_uneven_shards(in_order: bool, its: Communicator) -> None:
    """Of any lengths, some of them 0; into another array, and in place."""
    lengths = [(2 * at + 1) % 4 * 3 for at in range(its.size)]
    for dtype, factor in itertools.product(A_FEW, (0, 1, 40)):
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


def check_gathers(its: Communicator) -> None:
    """All-gather, broadcast and gather, from every root."""
    for dtype in A_FEW:
        for count in lengths_of(its, dtype):
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


def check_streams(its: Communicator) -> None:
    """Work follows the current stream, after a kernel and after a copy: nothing of the caller's waits but events."""
    cupy, size = cuda.current().cupy, 4 * CHUNK
    runtime, memory = cupy.cuda.runtime, cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(4 * size), 0)
    pinned = np.ndarray(size, np.float32, buffer=memory)
    pinned[:] = contribution("sum", its.rank, size, pinned.dtype)
    expected = reduction_of("sum", its.size, size, pinned.dtype)
    for stream in [cupy.cuda.Stream(non_blocking=True), cupy.cuda.get_current_stream()] * 3:
        with stream:
            buffer = cupy.empty(size, np.float32)
            buffer[...] = 1
            its.all_reduce(buffer, Reduction())
            buffer /= 2
            assert (down(buffer) == its.size / 2).all()
            address = int(buffer.data.ptr)
            runtime.memcpyAsync(address, pinned.ctypes.data, pinned.nbytes, runtime.memcpyHostToDevice, stream.ptr)
            its.all_reduce(buffer, Reduction())
            assert (down(buffer) == expected).all()
            del buffer


CHECKS: dict[str, Callable[[Communicator], None]] = {
    **{op: partial(check_reductions, op) for op in UFUNCS},
    "uneven shards": partial(check_uneven_shards, False),
    "uneven shards in rank order": partial(check_uneven_shards, True),
    "gathers": check_gathers,
    "exchange": check_exchange,
    "halves": check_halves,
    "neighbours": check_neighbours,
    "streams": check_streams,
}
