"""The communicator of ranks of one node, for NumPy arrays, through shared memory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, final

import numpy as np

from mpidist.transport.communicator import Array, Communicator, shard_bounds
from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory.fused_arrays import FusedArrays
from mpidist.transport.shared_memory.fused_reducer import FusedReducer
from mpidist.transport.shared_memory.schedule import Schedule, fused_schedule, scatter_schedule
from mpidist.transport.shared_memory.two_shot import TwoShot
from mpidist.transport.waiting import complete

__all__ = ["SharedMemoryCommunicator"]

_SCHEDULES: Final = 64  # cached


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
        self._scatter = lru_cache(_SCHEDULES)(scatter_schedule)
        self._whole = lru_cache(_SCHEDULES)(fused_schedule)

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
        schedule = self._whole((buffer.size,), self.size, self._chunk_count(buffer.dtype))
        self._run(schedule, FusedArrays(buffer.dtype, [buffer], [buffer] if self.rank == root else []), reduction)

    def reduce_scatter(
        self, buffer: Array, reduction: Reduction, bounds: Sequence[int] | None = None, into: Array | None = None
    ) -> Array:
        if bounds is None:
            bounds = shard_bounds(buffer.size, self.size)
        shards = _shards(buffer, bounds)
        targets = list(shards)
        if into is not None:
            targets[self.rank] = into
        self.traffic.add("reduce_scatter", buffer.nbytes - shards[self.rank].nbytes)
        if self.fused.is_small(buffer.nbytes):
            parts = self.fused.one_shot(buffer.size, buffer.dtype).stage([buffer])
            self.fused.synchronize()
            start, stop = bounds[self.rank], bounds[self.rank + 1]
            if stop > start:
                reduction.combine([part[start:stop] for part in parts], targets[self.rank])
            return targets[self.rank]
        schedule = self._scatter(tuple(bounds), self._chunk_count(buffer.dtype))
        self._run(schedule, FusedArrays(buffer.dtype, shards, shared=[targets]), reduction)
        return targets[self.rank]

    def all_gather(self, buffer: Array, bounds: Sequence[int] | None = None) -> None:
        bounds = tuple(self._start_all_gather(buffer, bounds))
        schedule = self._scatter(bounds, self._chunk_count(buffer.dtype))
        complete(self._spread(schedule, _shards(buffer, bounds), range(self.size)), self.fused.check_peers)

    def broadcast(self, buffer: Array, root: int, into: Array | None = None) -> None:
        self.traffic.add("broadcast", buffer.nbytes)
        schedule = self._whole((buffer.size,), 1, self._chunk_count(buffer.dtype))
        complete(self._spread(schedule, [buffer], [root], into), self.fused.check_peers)

    def send_receive(self, outgoing: Array, to: int, incoming: Array, source: int) -> None:
        self.mpi.send_receive(outgoing, to, incoming, source)

    def free(self) -> None:
        self.mpi.free()

    def _chunk_count(self, dtype: np.dtype[Any]) -> int:
        return max(1, self._slots.slot_bytes // dtype.itemsize)

    def _run(self, schedule: Schedule, arrays: FusedArrays, reduction: Reduction) -> None:
        if schedule.count:
            self.fused.run(TwoShot(self._slots, None, 0, schedule, arrays, reduction))

    def _spread(
        self, schedule: Schedule, pieces: Sequence[Array], owners: Sequence[int], into: Array | None = None
    ) -> Generator[int, None, None]:
        """Copy the shards of each chunk from their owners to all ranks: into `pieces`, or into the one array `into`."""
        targets = pieces if into is None else [into]
        for chunk in schedule.chunks:
            views = self._slots.next_views(targets[0].dtype)
            for owner, moves in zip(owners, chunk.shards, strict=True):
                if owner == self.rank:
                    for piece, _, start, stop, at, end in moves:
                        self._slots.write(views[owner][at:end], pieces[piece][start:stop])
            yield from self._slots.synchronize()
            for owner, moves in zip(owners, chunk.shards, strict=True):
                if owner != self.rank or into is not None:
                    for piece, _, start, stop, at, end in moves:
                        targets[piece][start:stop] = views[owner][at:end]


def _shards(buffer: Array, bounds: Sequence[int]) -> list[Array]:
    return [buffer[start:stop] for start, stop in pairwise(bounds)]
