"""Two-shot all-reduce through shared memory: each rank adds a shard, then all ranks copy the sums, chunk by chunk.

Of every chunk, each lane (a rank that adds) owns a shard. A rank copies the shards of the other lanes from its arrays
into its slot, but not its own shard. After a barrier, each lane adds its shard from all ranks' slots, in rank order.
The sums go to where the next rank has staged the shard: to lines of the cache that the lane has just read. On several
nodes, the lanes of all nodes then all-reduce the shard. After a second barrier, all ranks copy the sums out.
The second barrier of a chunk is the first barrier of the next chunk: there is one barrier more than there are chunks.

With P ranks on the node and S bytes, a rank copies S (P - 1) / P in, adds S / P from P places, and copies S out.

Arrays in shared memory are neither copied in nor out, but added in place.

Where the ranks of a node share G last-level caches, each group of ranks with one cache adds for itself. Then the ranks
of a lane, one of each group, each add a part of the groups' sums, in the order of the groups. At last each copies the
other parts into the memory of its group. So 2 S (G - 1) / G bytes enter a group, not that many for each of its ranks.

Sums of private arrays on one node are made by compiled code, where there is some, in the same memory and order. If the
results of all ranks lie in shared memory, each lane writes its sums to the results of all ranks, and nothing is copied
out. Up to 16 MiB, compiled code then copies in to where the results will lie, not to slots.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Any, Final, final

import numpy as np

from mpidist.transport.communicator import Array
from mpidist.transport.native.loading import native
from mpidist.transport.node_memory.staging_slots import BLOCK_BYTES, Slots
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory.inter_node import ShardAllReduce, ShardExchange
from mpidist.transport.shared_memory.schedule import Chunk, Schedule, chunk_bounds, pieces_of

__all__ = ["GROUPS_DEPTH", "FusedArrays", "TwoShot"]

GROUPS_DEPTH: Final = 2  # chunks between groups at once: in one the groups' sums are added, in one copied


@final
@dataclass
class FusedArrays:
    """The arrays of one all-reduce, flat and contiguous; the small pieces of a fine schedule may have any layout.

    Attributes:
        dtype: The dtype in which numbers are sent.
        sources: [pieces], this rank's contribution.
        results: [pieces], the arrays that take the results, of dtype `result_dtype`; may be the sources.
        peers: [ranks][pieces], the contributions of all ranks of the node, if all lie in shared memory.
        shared: [places][pieces], the arrays in shared memory to which the rank that adds writes the results: those of
            each rank of the node, or the node's one array.
        result_dtype: The dtype of the results; `None` if it is `dtype`.
        place: Where the results lie in this rank's part of the shared memory of results, in bytes; 0 in other memory.
    """

    dtype: np.dtype[Any]
    sources: Sequence[Array]
    results: Sequence[Array] = ()
    peers: Sequence[Sequence[Array]] | None = None
    shared: Sequence[Sequence[Array]] | None = None
    result_dtype: np.dtype[Any] | None = None
    place: int = 0


@final
class TwoShot:
    """All-reduces of arrays, in steps: of one list, or of one after the other with the same schedule.

    Args:
        exchange: All-reduces shards across nodes; `None` on one node, and on ranks that do not add.
        depth: How many chunks may be between nodes at once; 0 on one node.
        schedule: The chunks, with as many shards as there are lanes.
        half: The half precision that float32 numbers are sent in between nodes; `None` for none.
        regions: [ranks], each rank's part of the shared memory of results; `None` if there is none.
        groups: The ranks of the node by the cache that they share, of private arrays on one node; `()` for one group.

    Attributes:
        entered: Bytes that NumPy has read from the memory of other groups.
        arrays: The arrays. Results may be set until `steps` begins, and others once `steps` has ended.
        compiled: The compiled code that does all, if the arrays are contiguous; `None` if there is none.
        overflowed: The sum of what `Reduction.combine` returned.
        was_restaged: Whether, in the last call, some ranks had results in shared memory, and others not, so that all
            staged once more. Equal on all ranks.
    """

    def __init__(
        self,
        slots: Slots,
        exchange: ShardExchange | None,
        depth: int,
        schedule: Schedule,
        arrays: FusedArrays,
        reduction: Reduction,
        divide_by: int = 1,
        half: np.dtype[Any] | None = None,
        regions: list[Array] | None = None,
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        self._slots, self._exchange, self._depth = slots, exchange, GROUPS_DEPTH if groups else depth
        self._groups = groups
        self._members = next((group for group in groups if slots.rank in group), range(slots.size))
        self._group = groups.index(self._members) if groups else 0
        schedule = self._schedule_of_groups(schedule)
        self._chunks = self._results_chunks = schedule.chunks
        self._is_fine = self._stages_own = schedule.is_fine
        self.arrays, self._reduction, self._divide_by, self._half = arrays, reduction, divide_by, half
        lanes = len(schedule.chunks[0].shards) if len(schedule.chunks) else 1
        self._place = self._members.index(slots.rank)
        self._lane = self._place if self._place < lanes else -1
        self._views: list[list[Array]] = []
        self.compiled: Any = None if native is None else self._make_compiled(lanes, regions)
        self._places_barrier = 0  # the number of the barrier with which ranks publish where their results lie
        self._begun: Sequence[Array] | None = None  # the sources of which compiled code has copied the first chunk in
        self.overflowed = self.entered = 0
        self.was_restaged = False

    def begin(self) -> None:
        """Copy the first chunk in. Local. A barrier of the node and `steps` follow, or nothing."""
        arrays, compiled, barrier = self.arrays, self.compiled, self._slots.barrier
        self._begun = arrays.sources if compiled is not None and compiled.set_sources(arrays.sources) else None
        can_be_direct = arrays.place and self._begun is not None and not self._groups
        is_direct = bool(can_be_direct and compiled.set_results(arrays.results))
        self._places_barrier = barrier.count + 1
        barrier.publish(arrays.place if is_direct else 0)
        if self._begun is None:
            self._views, self._stages_own = [], self._is_fine
            self._stage(self._chunks[0])
        else:  # if NumPy goes on: what compiled code has copied lacks this rank's own shard
            self._views, self._stages_own = [self._slots.next_views(self.arrays.dtype)], False
            compiled.begin(is_direct)

    def resume(self, knows_places: bool) -> Generator[int, None, None]:
        """Take over `arrays` from compiled code, which has begun, and has published the places of the results. Local.

        `knows_places`: compiled code has the places of other ranks' results. Returns the steps left, after a barrier.
        """
        self._begun, self._places_barrier = self.arrays.sources, self.compiled.places_barrier
        self.was_restaged = False
        return self._rest() if knows_places else self.steps(has_passed_barrier=True)

    def set_results_schedule(self, schedule: Schedule) -> None:
        """Set the schedule of results whose pieces differ from those of the sources."""
        self._results_chunks = self._schedule_of_groups(schedule).chunks

    def steps(self, has_passed_barrier: bool) -> Generator[int, None, None]:
        """All-reduce. Yields the number of a barrier while this rank waits there for other ranks.

        `has_passed_barrier`: this rank has called `begin`, and the node has passed a barrier since then.
        """
        if not has_passed_barrier:
            self.begin()
            yield from self._pass_barrier()
        places = self._slots.barrier.published(self._places_barrier)
        self.was_restaged = any(places) and not all(places)
        if self.was_restaged:
            self.arrays.place = 0
            self.begin()
            yield from self._pass_barrier()
        elif places[0]:
            self.compiled.take_places()
        if self._begun is not None and self._can_run_compiled(self.compiled, self._begun):
            yield from self._rest()
            return
        exchange, chunks = self._exchange, self._chunks
        exchanges: list[ShardAllReduce | None] = []
        for at in range(len(chunks) + self._depth):
            done = at - self._depth
            if at + 1 < len(chunks):
                self._stage(chunks[at + 1])
            if at < len(chunks):
                exchanges.append(self._add(at) if self._lane >= 0 else None)
            if self._groups and self._lane >= 0:
                self._add_groups(at - 1)
                self._copy_groups(at - 2)
            shard = exchanges[done] if done >= 0 else None
            while shard is not None and exchange is not None and not shard.is_done:
                exchange.progress()
                if not shard.is_done:
                    yield self._slots.barrier.count
            if done >= 0:
                self._finish(done)
            yield from self._pass_barrier()
            if done >= 0 and self.arrays.shared is None and self.arrays.results:
                self._copy_out(done)

    def forget(self) -> None:
        """Drop references to the arrays, after `steps`. Local; others are set before `begin`."""
        self.arrays.sources = self.arrays.results = ()
        if self.arrays.shared is not None:
            self.arrays.shared = [()] * len(self.arrays.shared)
        self._begun = None
        if self.compiled is not None:
            self.compiled.forget()

    def _rest(self) -> Generator[int, None, None]:
        while not self.compiled.advance():
            yield self._slots.barrier.count

    def _pass_barrier(self) -> Generator[int, None, None]:
        barrier, exchange = self._slots.barrier, self._exchange
        barrier.post()
        while not barrier.has_passed():
            if exchange is not None:  # another node may wait for messages of this rank
                exchange.progress()
            yield barrier.count

    def _make_compiled(self, lanes: int, regions: list[Array] | None) -> Any:
        """Make what sums private arrays on one node; `None` for other reductions."""
        arrays, slots = self.arrays, self._slots
        is_one_place = arrays.shared is not None and len(arrays.shared) == 1
        is_private = arrays.peers is None and (arrays.shared is None or is_one_place) and self._keeps_dtype
        on_one_node = self._exchange is None and not self._depth and lanes == slots.size > 1
        if not (is_private and (on_one_node or self._groups) and self._reduction.is_compiled(arrays.dtype)):
            return None
        where = slots.barrier, slots.slot_bytes, slots.num_slots
        divide_by = self._divide_by * self._reduction.divisor
        what = self._reduction.op, arrays.dtype, divide_by, is_one_place
        nexts = tuple(group[(self._lane + 1) % len(group)] for group in self._groups)
        return native.TwoShot(*where, *what, regions, tuple(self._members), lanes, nexts, self._group)

    def _can_run_compiled(self, compiled: Any, begun: Sequence[Array]) -> bool:
        """Set the arrays of compiled code, which takes no others than contiguous ones."""
        arrays = self.arrays
        results = arrays.results if arrays.shared is None else arrays.shared[0]
        has_sources = arrays.sources is begun or compiled.set_sources(arrays.sources)
        return bool(has_sources and compiled.set_results(results))

    @property
    def _keeps_dtype(self) -> bool:
        return self.arrays.result_dtype is None or self.arrays.result_dtype == self.arrays.dtype

    @property
    def _adds_in_place(self) -> bool:
        """Whether sums are made in shared memory of the results; those of many small pieces are made in the slot."""
        is_fine = self._stages_own and self.arrays.peers is None
        return self.arrays.shared is not None and self._exchange is None and not is_fine

    def _stage(self, chunk: Chunk) -> None:
        """Copy this rank's contribution to a chunk into its slot: all shards but the rank's own."""
        views = self._slots.next_views(self.arrays.dtype)
        self._views.append(views)
        if self.arrays.peers is not None:
            return
        sources, slot = self.arrays.sources, views[self._slots.rank]
        for lane, moves in enumerate(chunk.shards):
            if lane == self._lane and not self._stages_own:
                continue
            for first, last, start, stop, at, end in moves:
                if last == first + 1:
                    self._slots.write(slot[at:end], sources[first].reshape(-1)[start:stop])
                else:
                    np.concatenate(sources[first:last], axis=None, out=slot[at:end])

    def _add(self, at: int) -> ShardAllReduce | None:
        """Add this rank's shard of a chunk; return what then all-reduces the shard across nodes."""
        chunk, views = self._chunks[at], self._views[at]
        if self._exchange is not None:
            return self._start_exchange(self._exchange, chunk, views)
        if self._adds_in_place:
            self._add_in_place(chunk, views)
        else:
            self._fold(chunk, views, None)
        return None

    def _start_exchange(self, exchange: ShardExchange, chunk: Chunk, views: Sequence[Array]) -> ShardAllReduce:
        """Add this rank's shard of a chunk, and start to all-reduce the shard across nodes."""
        shard = self._sums(views, self._lane)[chunk.bounds[self._lane] : chunk.bounds[self._lane + 1]]
        if self._reduction.in_rank_order and self._reduction.fold is None:  # a fold has its order in any algorithm
            return exchange.start_chain(shard, partial(self._fold, chunk, views))
        self._fold(chunk, views, None)
        return exchange.start(shard, self._reduction.rest, self._half)

    def _fold(self, chunk: Chunk, views: Sequence[Array], before: Array | None) -> None:
        """Add all ranks' parts of this rank's shard into a slot, after the sum `before`, if there is one."""
        sums = self._sums(views, self._lane)
        start, stop = chunk.bounds[self._lane], chunk.bounds[self._lane + 1]
        if self._stages_own and self.arrays.peers is None:
            if stop > start:
                first = [] if before is None else [before]
                self._combine(first + [view[start:stop] for view in self._own(views)], sums[start:stop])
            return
        for move in chunk.shards[self._lane]:
            for piece, first_element, last, at in pieces_of(move, self.arrays.sources):
                end = at + last - first_element
                parts = self._parts(piece, first_element, last, at, views)
                if before is not None:
                    parts.insert(0, before[at - start : end - start])
                self._combine(parts, sums[at:end])

    def _own(self, views: Sequence[Array]) -> list[Array]:
        """Return the slots of the ranks of this rank's group."""
        return [views[member] for member in self._members]

    def _sums(self, views: Sequence[Array], lane: int, group: Sequence[int] = ()) -> Array:
        """Return which slot of a chunk takes a lane's sums, of this rank's group or another: that of the next rank."""
        members = group or self._members
        return views[members[(lane + 1) % len(members)]]

    def _parts_of_groups(self, index: int) -> tuple[list[Array], list[slice]]:
        """Return the sums of this rank's shard of a chunk, of each group, and the part of the shard for each group."""
        chunk, views = self._chunks[index], self._views[index]
        start, stop = chunk.bounds[self._lane], chunk.bounds[self._lane + 1]
        parts = [self._sums(views, self._lane, group)[start:stop] for group in self._groups]
        return parts, [slice(*pair) for pair in pairwise(chunk_bounds(stop - start, len(parts)))]

    def _add_groups(self, index: int) -> None:
        """Add the groups' sums of this group's part of the rank's shard of a chunk, if there is such a chunk."""
        if not 0 <= index < len(self._chunks):
            return
        sums, parts = self._parts_of_groups(index)
        part = parts[self._group]
        own = sums[self._group][part]
        if own.size:
            self._combine([one[part] for one in sums], own)
            if self._divide_by != 1 and self._keeps_dtype:
                own /= self._divide_by
        self.entered += own.nbytes * (len(sums) - 1)

    def _copy_groups(self, index: int) -> None:
        """Copy what the other groups have added of the rank's shard of a chunk into this group's memory."""
        if not 0 <= index < len(self._chunks):
            return
        sums, parts = self._parts_of_groups(index)
        into = sums[self._group]
        for source, part in zip(sums, parts, strict=True):
            if source is not into:
                self._slots.write(into[part], source[part])
                self.entered += into[part].nbytes

    def _schedule_of_groups(self, schedule: Schedule) -> Schedule:
        """Return a schedule with the lanes that every group has."""
        return schedule.for_lanes(min(map(len, self._groups))) if self._groups else schedule

    def _combine(self, parts: Sequence[Array], out: Array) -> None:
        """Reduce ranks' parts [m] into `out` [m], which other ranks read: by blocks, where those are written faster."""
        if not self._slots.streams:
            self.overflowed += self._reduction.combine(list(parts), out)
            return
        block = self._slots.block(out.dtype)
        for start in range(0, len(out), len(block)):
            stop = min(len(out), start + len(block))
            total = block[: stop - start]
            self.overflowed += self._reduction.combine([part[start:stop] for part in parts], total)
            self._slots.write(out[start:stop], total)

    def _parts(self, piece: int, first: int, last: int, at: int, views: Sequence[Array]) -> list[Array]:
        """Return every rank's elements `first` to `last` of a piece, in rank order."""
        if self.arrays.peers is not None:
            return [pieces[piece][first:last] for pieces in self.arrays.peers]
        parts = list(map(itemgetter(slice(at, at + last - first)), self._own(views)))
        parts[self._place] = self.arrays.sources[piece].reshape(-1)[first:last]
        return parts

    def _add_in_place(self, chunk: Chunk, views: Sequence[Array]) -> None:
        """Add this rank's shard, and write it to the results of all ranks in shared memory."""
        places = self.arrays.shared or ()
        block = BLOCK_BYTES // self.arrays.dtype.itemsize
        for move in chunk.shards[self._lane]:
            for piece, first, last, at in pieces_of(move, self.arrays.sources):
                for start in range(first, last, block):
                    stop = min(last, start + block)
                    total = places[0][piece][start:stop]
                    parts = self._parts(piece, start, stop, at + start - first, views)
                    self.overflowed += self._reduction.combine_and_divide(parts, total, self._divide_by)
                    for place in places[1:]:
                        self._slots.write(place[piece][start:stop], total)

    def _finish(self, index: int) -> None:
        """Divide this rank's shard, which has been added, and write it to results in shared memory."""
        if self._lane < 0 or self._groups or self._adds_in_place:
            return
        chunk, slot = self._chunks[index], self._sums(self._views[index], self._lane)
        if self._divide_by != 1 and self._keeps_dtype:
            total = slot[chunk.bounds[self._lane] : chunk.bounds[self._lane + 1]]
            total /= self._divide_by
        for place in self.arrays.shared or ():
            for move in chunk.shards[self._lane]:
                for piece, first, last, at in pieces_of(move, place):
                    self._slots.write(place[piece][first:last], slot[at : at + last - first])

    def _copy_out(self, index: int) -> None:
        """Copy the sums of a chunk out."""
        results, divide_by = self.arrays.results, self._divide_by
        converts = divide_by != 1 and not self._keeps_dtype
        for lane, moves in enumerate(self._results_chunks[index].shards):
            slot = self._sums(self._views[index], lane)
            for move in moves:
                for piece, first, last, at in pieces_of(move, results):
                    part = slot[at : at + last - first]
                    results[piece].reshape(-1)[first:last] = part / divide_by if converts else part
