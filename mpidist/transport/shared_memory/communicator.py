"""The communicator of ranks of one node, for NumPy arrays, through shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, final

import numpy as np

from mpidist.transport.communicator import Array, Communicator, shard_bounds
from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory.fused_reducer import FusedReducer

__all__ = ["SharedMemoryCommunicator"]

_FAR_BYTES: Final = 16 << 20  # so large arrays lie in no cache when they are written


@final
class SharedMemoryCommunicator(Communicator):
    """Ranks of one node that move and add arrays through shared memory, in chunks that fit into the cache.

    Every reduction adds in rank order. `send_receive` uses MPI.

    Attributes:
        mpi: The communicator of the same ranks over MPI, which this object owns and frees.
        comm: That of `mpi`.
        fused: The reducer of all-reduces, which this object does not free.
    """

    def __init__(self, mpi: MpiCommunicator, fused: FusedReducer) -> None:
        super().__init__(mpi.name, mpi.rank, mpi.size)
        self.mpi, self.comm = mpi, mpi.comm
        self.fused = fused
        self.traffic = mpi.traffic
        self._slots = fused.slots
        counted = "all_gather", "broadcast", "reduce_scatter"
        self._gathers, self._broadcasts, self._scatters = map(self.traffic.sums_of, counted)

    def set_wait_hook(self, check_peers: Callable[[], None]) -> None:
        self.mpi.set_wait_hook(check_peers)
        self.fused.check_peers = check_peers

    def pack_buffer(self, count: int, dtype: np.dtype[Any]) -> Array:
        return self.mpi.pack_buffer(count, dtype)

    def all_reduce(self, buffer: Array, reduction: Reduction) -> None:
        self.traffic.add("all_reduce", 2 * buffer.nbytes * (self.size - 1) // self.size)
        if buffer.size:
            self.fused.all_reduce(buffer, reduction)

    def reduce(self, buffer: Array, reduction: Reduction, root: int) -> None:
        self.traffic.add("reduce", buffer.nbytes)
        if buffer.size:  # all ranks add, so that the root has its result no sooner than they could
            self.fused.all_reduce(buffer, reduction)

    def _scatter(self, buffer: Array, reduction: Reduction, bounds: Sequence[int], own: Array, shard: Array) -> None:
        shards = [buffer[start:stop] for start, stop in pairwise(bounds)]
        shards[self.rank] = own
        self._scatters[0] += 1
        self._scatters[1] += buffer.nbytes - own.nbytes
        step = self._chunk_count(buffer.dtype)
        pieces, places = [buffer], bounds  # one copy, if all fits into a slot
        if buffer.size > step:
            step = max(1, step // self.size)
            pieces, places = shards, range(0, self.size * step, step)
        for start in range(0, max(map(len, pieces)), step):
            views = self._slots.next_views(buffer.dtype)
            for piece, at in zip(pieces, places, strict=False):
                if piece is not own:
                    chunk = piece[start : start + step]
                    self._slots.write(views[self.rank][at : at + chunk.size], chunk)
            self._slots.pass_barrier(self.fused.check_peers)
            chunk, at = shard[start : start + step], places[self.rank]
            parts = [view[at : at + chunk.size] for view in views]
            if pieces is shards:
                parts[self.rank] = own[start : start + step]
            if chunk.size:
                self.traffic.overflowed += reduction.combine(parts, chunk)

    def all_gather(self, buffer: Array, bounds: Sequence[int] | None = None) -> None:
        bounds = shard_bounds(buffer.size, self.size) if bounds is None else bounds
        shards = [buffer[start:stop] for start, stop in pairwise(bounds)]
        self._gathers[0] += 1
        self._gathers[1] += buffer.nbytes - shards[self.rank].nbytes
        self._spread(shards, shards, range(self.size))

    def broadcast(self, buffer: Array, root: int, into: Array | None = None) -> None:
        self._broadcasts[0] += 1
        self._broadcasts[1] += buffer.nbytes
        self._spread([buffer], [buffer if into is None else into], [root])

    def send_receive(self, outgoing: Array, to: int, incoming: Array, source: int) -> None:
        self.mpi.send_receive(outgoing, to, incoming, source)

    def free(self) -> None:
        self.mpi.free()

    def _chunk_count(self, dtype: np.dtype[Any]) -> int:
        return max(1, self._slots.slot_bytes // dtype.itemsize)

    def _spread(self, sources: Sequence[Array], targets: Sequence[Array], owners: Sequence[int]) -> None:
        """Copy the source of each owner to its target on all ranks, chunk by chunk; the two may be the same array."""
        step = max(1, self._chunk_count(sources[0].dtype) // len(owners))  # so that all chunks fit into the cache
        for start in range(0, max(map(len, sources)), step):
            views = self._slots.next_views(sources[0].dtype)
            for owner, source in zip(owners, sources, strict=True):
                if owner == self.rank:
                    chunk = source[start : start + step]
                    self._slots.write(views[owner][: chunk.size], chunk)
            self._slots.pass_barrier(self.fused.check_peers)
            for owner, source, target in zip(owners, sources, targets, strict=True):
                if owner != self.rank or target is not source:
                    chunk = target[start : start + step]
                    self._slots.write(chunk, views[owner][: chunk.size], target.nbytes >= _FAR_BYTES)
