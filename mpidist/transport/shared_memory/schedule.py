"""Map of chunks to slices of the arrays: computed when the chunk is first moved, and used for later calls.

A list is treated as one flat array, the concatenation of its pieces. That array is cut into chunks that fit into the
cache, without regard to the ends of pieces, and each chunk into one shard for each lane. A lane is the number of a rank
among those ranks of its node that add; on several nodes, the ranks of one lane, one on each node, have the same shard.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Final, NamedTuple, final

from mpidist.transport.communicator import Array, shard_bounds

__all__ = [
    "Chunk",
    "Chunks",
    "Move",
    "Schedule",
    "chunk_bounds",
    "fused_schedule",
    "pieces_of",
]

_ROUND: Final = 16  # elements: shards begin at whole cache lines where the arrays do
_KEPT_CHUNKS: Final = 4096  # of a list: to copy a chunk takes far longer than to compute it


@final
class Move(NamedTuple):
    """Elements to copy that are contiguous both in the arrays and in a chunk.

    Attributes:
        first: The index of the piece, or of the first of several whole pieces; `last` is one after the last.
        start: The first element in the piece, 0 if there are several; `stop` is one after the last element.
        at: The first element in the chunk; `end` is one after the last.
    """

    first: int
    last: int
    start: int
    stop: int
    at: int
    end: int


@final
@dataclass(frozen=True)
class Chunk:
    """One chunk.

    Attributes:
        bounds: [lanes + 1], the bounds of the shards in the chunk.
        shards: [lanes], the moves of each shard.
    """

    count: int
    bounds: tuple[int, ...]
    shards: tuple[tuple[Move, ...], ...]


@final
class Chunks:
    """The chunks of a list, in order, each computed at its first use: a plan may never be executed."""

    def __init__(self, count: int, make: Callable[[int], Chunk]) -> None:
        self._count = count
        self._chunk = lru_cache(_KEPT_CHUNKS)(make)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Chunk:
        if index >= self._count:
            raise IndexError(f"chunk {index} of {self._count}")
        return self._chunk(index)


@final
@dataclass(frozen=True)
class Schedule:
    """The chunks of a list of pieces.

    Attributes:
        lengths: [pieces], number of elements of each piece.
        chunks: The chunks, in order.
        is_fine: Whether the pieces are so small that copying them into the slot and adding them there is faster than
            adding piece by piece.
        chunk_count: Number of elements of a chunk; the last may be shorter.
    """

    count: int
    lengths: tuple[int, ...]
    chunks: Chunks
    is_fine: bool
    chunk_count: int

    def for_lanes(self, lanes: int) -> Schedule:
        """Return a schedule of the same pieces and chunks for another number of lanes."""
        return _schedule_for(self.lengths, lanes, self.chunk_count)


FINE_COUNT: Final = 4096  # elements of an average piece: adding them takes as long as calling a ufunc


def chunk_bounds(count: int, lanes: int) -> tuple[int, ...]:
    """Cut a chunk into shards, which begin at whole cache lines if the chunk is long enough."""
    if count < lanes * _ROUND * 4:
        return tuple(shard_bounds(count, lanes))
    return tuple(min(count, bound * _ROUND) for bound in shard_bounds(-(-count // _ROUND), lanes))


def fused_schedule(lengths: Sequence[int], lanes: int, chunk_count: int) -> Schedule:
    """Cut a list of pieces of these lengths into chunks of `chunk_count` elements; the last may be shorter."""
    ends = list(accumulate(lengths))
    total = ends[-1] if ends else 0

    def chunk(index: int) -> Chunk:
        begin = index * chunk_count
        bounds = chunk_bounds(min(chunk_count, total - begin), lanes)
        shards = (_moves(lengths, ends, begin, begin + start, begin + stop) for start, stop in pairwise(bounds))
        return Chunk(bounds[-1], bounds, tuple(shards))

    chunks = Chunks(-(-total // chunk_count), chunk)
    return Schedule(total, tuple(lengths), chunks, total < FINE_COUNT * len(lengths), chunk_count)


_schedule_for: Final = lru_cache(256)(fused_schedule)


def _moves(lengths: Sequence[int], ends: Sequence[int], begin: int, start: int, stop: int) -> tuple[Move, ...]:
    """List the moves of elements `start` to `stop` of the whole list."""
    moves: list[Move] = []
    at, piece = start, bisect_right(ends, start)
    while at < stop:
        while ends[piece] <= at:
            piece += 1
        origin = ends[piece] - lengths[piece]
        end = min(ends[piece], stop)
        whole = end - at == lengths[piece]
        before = moves[-1] if moves else None
        if whole and before is not None and before.stop - before.start == lengths[before.first]:
            moves[-1] = Move(before.first, piece + 1, 0, before.stop, before.at, end - begin)
        else:
            moves.append(Move(piece, piece + 1, at - origin, end - origin, at - begin, end - begin))
        at = end
    return tuple(moves)


def pieces_of(move: Move, arrays: Sequence[Array]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the pieces of a move: index, `start` and `stop` of the elements in the piece, their place in the chunk."""
    if move.last == move.first + 1:
        yield move.first, move.start, move.stop, move.at
        return
    at = move.at
    for piece in range(move.first, move.last):
        count = arrays[piece].size
        if count:
            yield piece, 0, count, at
            at += count
