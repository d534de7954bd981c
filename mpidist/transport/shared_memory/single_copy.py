"""Single-copy all-reduce within a node: ranks copy out of each other's arrays, not through memory that they share.

Of every chunk, each rank owns a shard. After a barrier, a rank copies its shard out of the other ranks' arrays, into
memory that stays in the cache, and adds the shard in rank order into its result. After a second barrier it copies the
shards of the others out of their results. The second barrier of a chunk is the first barrier of the next chunk.

With P ranks and S bytes, a rank copies S (P - 1) / P twice and adds S / P from P places: each number that a rank needs
of another one is copied once, by the system, where `TwoShot` copies it to shared memory and out of it. The system has
work with every page, so this is faster for arrays of some MiB alone.

Source: Chakraborty, Subramoni and Panda, Contention-aware kernel-assisted MPI collectives, CLUSTER 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import pairwise
from typing import Final, final

import numpy as np

from mpidist.transport.communicator import Array
from mpidist.transport.node_memory import PeerMemory, Slots
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory.schedule import Chunk, Schedule, pieces_of
from mpidist.transport.shared_memory.transfer import FusedArrays, Transfer

__all__ = ["SingleCopy"]

_ADDRESS: Final = np.dtype(np.uint64)

Steps = Generator[int, None, None]


@final
class SingleCopy(Transfer):
    """All-reduces of private arrays within a node.

    Args:
        slots: The node's staging memory: ranks write there where their arrays lie.
        memory: The memory of the ranks.
        schedule: The chunks, with a shard for each rank.
        arrays: The arrays.
        reduction: The elementwise operation.
        divide_by: The divisor of the results.
        otherwise: Makes what reduces the same arrays where those of some rank cannot be copied as they lie.
    """

    def __init__(
        self,
        slots: Slots,
        memory: PeerMemory,
        schedule: Schedule,
        arrays: FusedArrays,
        reduction: Reduction,
        divide_by: int,
        otherwise: Callable[[], Transfer],
    ) -> None:
        self._slots, self._memory, self._chunks = slots, memory, schedule.chunks
        self.arrays, self._reduction, self._divide_by = arrays, reduction, divide_by
        self._make_other = otherwise
        self._other: Transfer | None = None
        self.overflowed = 0
        self._longest = max(stop - start for chunk in self._chunks for start, stop in pairwise(chunk.bounds))

    @classmethod
    def has_room(cls, slots: Slots, schedule: Schedule) -> bool:
        """Whether a slot has room for where the arrays of a rank lie."""
        return 2 * len(schedule.lengths) * _ADDRESS.itemsize <= slots.slot_bytes

    def begin(self) -> None:
        """See `Transfer.begin`. Nothing: until the ranks know that their calls are alike, none looks at arrays."""

    def steps(self, has_passed_barrier: bool) -> Steps:
        sources, results = self.arrays.sources, self.arrays.results
        is_wanted = bool(results)
        if not is_wanted:  # the sums of this rank's shards have to lie somewhere
            results = [np.empty(source.size, source.dtype) for source in sources]
        addresses = self._slots.next_views(_ADDRESS)
        own = addresses[self._slots.rank][: 2 * len(sources)]
        own[:] = [self._address_of(array) for array in (*sources, *results)]
        yield from self._slots.synchronize()
        places = [of_rank[: own.size].tolist() for of_rank in addresses]
        if not all(map(all, places)):
            if self._other is None:
                self._other = self._make_other()
            yield from self._other.steps(has_passed_barrier=False)
            self.overflowed = self._other.overflowed
            return
        for at in range(len(self._chunks) + 1):
            if at < len(self._chunks):
                yield from self._add(self._chunks[at], results, places)
            if at > 0 and is_wanted:
                yield from self._copy(self._chunks[at - 1], results, places)
            yield from self._slots.synchronize()

    def forget(self) -> None:
        super().forget()
        if self._other is not None:
            self._other.forget()

    def _address_of(self, array: Array) -> int:
        """Return where an array begins, for the other ranks; 0 if what lies there is not the numbers that are added.

        On one rank alone an array may have another layout, or numbers that are converted on the way.
        """
        is_plain = type(array) is np.ndarray and array.flags.c_contiguous and array.dtype == self.arrays.dtype
        return self._memory.own_address(array) if is_plain else 0

    def _add(self, chunk: Chunk, results: Sequence[Array], places: Sequence[Sequence[int]]) -> Steps:
        """Add this rank's shard of a chunk into the results."""
        rank, itemsize = self._slots.rank, self.arrays.dtype.itemsize
        copies = self._memory.scratch(self._slots.size, self._longest, self.arrays.dtype)
        for move in chunk.shards[rank]:
            for piece, first, last, _ in pieces_of(move, results):
                parts = [part[: last - first] for part in copies]
                parts[rank] = self.arrays.sources[piece].reshape(-1)[first:last]
                for peer, of_peer in enumerate(places):
                    if peer != rank:
                        yield from self._read(peer, of_peer[piece] + first * itemsize, parts[peer])
                total = results[piece].reshape(-1)[first:last]
                self.overflowed += self._reduction.combine_and_divide(parts, total, self._divide_by)

    def _copy(self, chunk: Chunk, results: Sequence[Array], places: Sequence[Sequence[int]]) -> Steps:
        """Copy the other ranks' shards of a chunk out of their results."""
        itemsize = self.arrays.dtype.itemsize
        for peer, moves in enumerate(chunk.shards):
            for move in moves if peer != self._slots.rank else ():
                for piece, first, last, _ in pieces_of(move, results):
                    address = places[peer][len(results) + piece] + first * itemsize
                    yield from self._read(peer, address, results[piece].reshape(-1)[first:last])

    def _read(self, peer: int, address: int, into: Array) -> Steps:
        while not self._memory.copy(peer, address, into):  # a rank that is gone: whoever waits is told
            yield self._slots.barrier.count
