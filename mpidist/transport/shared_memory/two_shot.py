"""Streams of arrays through shared memory: copied in, added and copied out chunk by chunk, while they are cached.

Of every chunk, each lane (a rank that adds) owns a shard. A rank copies the other lanes' shards of its own arrays
into its slot, and its own shard never; a barrier; it adds its shard from all ranks' slots, in rank order; on several
nodes the lanes of all nodes reduce the shard further; a barrier; everybody copies the sums out. The second barrier
of a chunk is the first of the next one, so there is one for each chunk and one more.

With P ranks on the node and S bytes, a rank copies S (P - 1) / P in, adds S / P from P places, and copies S out.

Arrays that lie in memory which all ranks reach are neither copied in nor out: they are added where they are.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import numpy as np

from mpidist.transport.communicator import Array
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory.inter_node import Flight, LaneExchange
from mpidist.transport.shared_memory.schedule import Chunk, Move, Schedule
from mpidist.transport.shared_memory.staging_slots import Slots

__all__ = ["Stream", "Transfer"]

_BLOCK_BYTES: Final = 128 << 10  # of a shard that is added in place and written to several arrays


@final
@dataclass
class Stream:
    """The arrays of one all-reduce. Flat and contiguous, but for the small pieces of a fine schedule.

    Attributes:
        dtype: In which the numbers travel.
        sources: [pieces], what this rank contributes.
        results: [pieces], where the results go: of `result` dtype, also the sources themselves. Empty on a rank
            that wants none.
        peers: [ranks][pieces], what every rank of the node contributes, if it can be read from here.
        shared: [places][pieces], where whoever added writes the results, if that is memory that all reach: the
            results of every rank of the node, or the one that the node has.
        result: The dtype of the results, if it is another.
    """

    dtype: np.dtype[Any]
    sources: Sequence[Array]
    results: Sequence[Array] = ()
    peers: Sequence[Sequence[Array]] | None = None
    shared: Sequence[Sequence[Array]] | None = None
    result: np.dtype[Any] | None = None


@final
class Transfer:
    """One all-reduce of a stream, in steps: `begin`, then all of `steps`.

    Args:
        slots: The node's staging memory.
        exchange: The lane's way across nodes; `None` on one node.
        depth: How many shards are under way between nodes at once.
        schedule: The chunks, with as many shards as there are lanes.
        stream: The arrays.
        reduction: The elementwise operation.
        divide_by: What the results are divided by.

    Attributes:
        overflowed: As `Reduction.combine` counts.
    """

    def __init__(
        self,
        slots: Slots,
        exchange: LaneExchange | None,
        depth: int,
        schedule: Schedule,
        stream: Stream,
        reduction: Reduction,
        divide_by: int = 1,
    ) -> None:
        self._slots, self._exchange, self._depth = slots, exchange, depth
        self._chunks = self._results_chunks = schedule.chunks
        self._stages_own = schedule.is_fine
        self.stream, self._reduction, self._divide_by = stream, reduction, divide_by
        lanes = len(schedule.chunks[0].shards) if schedule.chunks else 1
        self._lane = slots.rank if slots.rank < lanes else None
        self._is_direct = stream.shared is not None and exchange is None
        self._views: list[list[Array]] = []
        self.overflowed = 0

    def begin(self) -> None:
        """Copy the first chunk in. Local: call it before the barrier that starts the transfer."""
        self._stage(self._chunks[0])

    def cut_results(self, schedule: Schedule) -> None:
        """Say how the results are cut, where they are other pieces than the sources."""
        self._results_chunks = schedule.chunks

    def steps(self, has_begun: bool) -> Generator[int, None, None]:
        """Do the work. Yields, while it waits for other ranks, the number of the barrier it waits at.

        Args:
            has_begun: Whether the ranks of the node passed a barrier since `begin`.
        """
        if not has_begun:
            yield from self._synchronize()
        chunks = self._chunks
        num_chunks, depth = len(chunks), self._depth
        flights: list[Flight | None] = [None] * num_chunks
        for at in range(num_chunks + depth):
            if at + 1 < num_chunks:
                self._stage(chunks[at + 1])
            if at < num_chunks:
                flights[at] = self._add(at)
            done = at - depth
            if done >= 0:
                yield from self._land(flights[done])
                self._settle(done)
            yield from self._synchronize()
            if done >= 0:
                self._deliver(done)

    @property
    def _keeps_dtype(self) -> bool:
        return self.stream.result is None or self.stream.result == self.stream.dtype

    def _stage(self, chunk: Chunk) -> None:
        views = self._slots.next(self.stream.dtype)
        self._views.append(views)
        if self.stream.peers is not None:
            return
        own = views[self._slots.rank]
        for lane, moves in enumerate(chunk.shards):
            if lane != self._lane or self._stages_own:
                self._copy_in(moves, own)

    def _copy_in(self, moves: Sequence[Move], slot: Array) -> None:
        sources = self.stream.sources
        for first, last, start, stop, at, end in moves:
            if last == first + 1:
                slot[at:end] = sources[first].reshape(-1)[start:stop]
            else:
                np.concatenate(sources[first:last], axis=None, out=slot[at:end])

    def _add(self, index: int) -> Flight | None:
        """Add this rank's shard of a chunk, and send it on its way across nodes."""
        if self._lane is None:
            return None
        chunk, views = self._chunks[index], self._views[index]
        if self._is_direct:
            self._add_in_place(chunk, views)
            return None
        if self._exchange is None:
            self._fold(chunk, views, None)
            return None
        shard = views[self._slots.rank][chunk.bounds[self._lane] : chunk.bounds[self._lane + 1]]
        if self._reduction.in_rank_order:
            return self._exchange.start_chain(shard, partial(self._fold, chunk, views))
        self._fold(chunk, views, None)
        return self._exchange.start(shard, self._reduction.rest)

    def _fold(self, chunk: Chunk, views: Sequence[Array], before: Array | None) -> None:
        """Add all parts of this rank's shard to what comes before them, into this rank's slot."""
        assert self._lane is not None
        own = views[self._slots.rank]
        start, stop = chunk.bounds[self._lane], chunk.bounds[self._lane + 1]
        if self._stages_own and self.stream.peers is None:
            if stop > start:
                first = [] if before is None else [before]
                self._combine(first + [view[start:stop] for view in views], own[start:stop])
            return
        for move in chunk.shards[self._lane]:
            for piece, first_element, last, at in _pieces(move, self.stream.sources):
                end = at + last - first_element
                parts = self._parts(piece, first_element, last, at, views)
                if before is not None:
                    parts.insert(0, before[at - start : end - start])
                self._combine(parts, own[at:end])

    def _parts(self, piece: int, first: int, last: int, at: int, views: Sequence[Array]) -> list[Array]:
        """Every rank's elements `first` to `last` of a piece, in rank order."""
        if self.stream.peers is not None:
            return [pieces[piece][first:last] for pieces in self.stream.peers]
        parts = [view[at : at + last - first] for view in views]
        parts[self._slots.rank] = self.stream.sources[piece].reshape(-1)[first:last]
        return parts

    def _add_in_place(self, chunk: Chunk, views: Sequence[Array]) -> None:
        assert self.stream.shared is not None
        assert self._lane is not None
        block = _BLOCK_BYTES // self.stream.dtype.itemsize
        places = self.stream.shared
        for move in chunk.shards[self._lane]:
            for piece, first, last, at in _pieces(move, self.stream.sources):
                for start in range(first, last, block):
                    stop = min(last, start + block)
                    total = places[0][piece][start:stop]
                    self._combine(self._parts(piece, start, stop, at + start - first, views), total)
                    if self._divide_by != 1:
                        total /= self._divide_by
                    for place in places[1:]:
                        place[piece][start:stop] = total

    def _combine(self, parts: Sequence[Array], out: Array) -> None:
        self.overflowed += self._reduction.combine(parts, out)

    def _land(self, flight: Flight | None) -> Generator[int, None, None]:
        if flight is None or self._exchange is None:
            return
        while not flight.has_landed:
            self._exchange.progress()
            if not flight.has_landed:
                yield self._slots.barrier.count

    def _settle(self, index: int) -> None:
        """Finish this rank's shard, which has been added: divide it, and write it where all can read it."""
        if self._lane is None or self._is_direct:
            return
        chunk, slot = self._chunks[index], self._views[index][self._slots.rank]
        if self._divide_by != 1 and self._keeps_dtype:
            total = slot[chunk.bounds[self._lane] : chunk.bounds[self._lane + 1]]
            total /= self._divide_by
        for place in self.stream.shared or ():
            for move in chunk.shards[self._lane]:
                for piece, first, last, at in _pieces(move, place):
                    place[piece][first:last] = slot[at : at + last - first]

    def _deliver(self, index: int) -> None:
        """Copy the sums of a chunk out."""
        if self.stream.shared is not None or not self.stream.results:
            return
        for moves, view in zip(self._results_chunks[index].shards, self._views[index], strict=False):
            self._copy_out(moves, view)

    def _copy_out(self, moves: Sequence[Move], slot: Array) -> None:
        results, divide_by = self.stream.results, self._divide_by
        converts = divide_by != 1 and not self._keeps_dtype
        for move in moves:
            for piece, first, last, at in _pieces(move, results):
                part = slot[at : at + last - first]
                results[piece].reshape(-1)[first:last] = part / divide_by if converts else part

    def _synchronize(self) -> Generator[int, None, None]:
        if self._exchange is None:
            return self._slots.synchronize()
        return self._synchronize_in_flight()

    def _synchronize_in_flight(self) -> Generator[int, None, None]:
        """Pass a barrier, with shards under way: another node may wait for what this rank has to send on."""
        assert self._exchange is not None
        for count in self._slots.synchronize():
            self._exchange.progress()
            yield count


def _pieces(move: Move, arrays: Sequence[Array]) -> Iterator[tuple[int, int, int, int]]:
    """Open a move: piece, first and last element of it, and their place in the chunk."""
    if move.last == move.first + 1:
        yield move.first, move.start, move.stop, move.at
        return
    at = move.at
    for piece in range(move.first, move.last):
        count = arrays[piece].size
        if count:
            yield piece, 0, count, at
            at += count
