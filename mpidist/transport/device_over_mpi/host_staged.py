"""Device memory by way of the host: pinned slots, chunk by chunk, copies and messages at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from mpidist.transport.communicator import Array, shard_bounds
from mpidist.transport.device_over_mpi.buffers import Piece, Pieces, SlotBuffers, cut_shards, room_of
from mpidist.transport.device_over_mpi.messages import MessagedCommunicator
from mpidist.transport.device_over_mpi.staging import Phase, Staging
from mpidist.transport.mpi import MpiCommunicator
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory import SharedMemoryCommunicator

__all__ = ["HostStagedCommunicator"]

Work = Callable[[Array, list[int]], object]  # on a chunk in host memory, and the bounds of the ranks' pieces in it


@final
class HostStagedCommunicator(MessagedCommunicator):
    """A communicator of host memory, for device arrays.

    Ranks send each other as much as those of the host communicator do. The buffer (or the shard) passes once each way
    between device and host, in chunks: while a chunk is on the network, the next one is copied down and the one before
    up. Between
    nodes MPI only carries, and GPUs add: what came goes up once more, and the result down, S / P
    bytes each. MPI adds messages below `StagingSizes.join_bytes`, and those of very many ranks; within a node shared
    memory adds.

    Work comes after what the caller's current stream holds, and a call returns when its work is done.

    Args:
        host: The communicator of host memory, whose owner frees it. It counts traffic: one call for each call that
            messages serve, and one for each chunk where the host communicator does the work.
        staging: The slots, which communicators that are used in turn can share. Their owner frees them.
    """

    def __init__(self, host: MpiCommunicator | SharedMemoryCommunicator, staging: Staging) -> None:
        mpi = host if isinstance(host, MpiCommunicator) else host.mpi
        super().__init__(f"{host.name} through the host", mpi, staging, SlotBuffers(staging), host.traffic)
        self._host = host
        self._adds_by_messages = isinstance(host, MpiCommunicator)

    def all_reduce(self, buffer: Array, reduction: Reduction) -> None:
        if self._joins(buffer):
            super().all_reduce(buffer, reduction)
            return
        self._through("all_reduce", buffer, lambda staged, _: self._host.all_reduce(staged, reduction))

    def reduce(self, buffer: Array, reduction: Reduction, root: int) -> None:
        if self._joins(buffer):
            super().reduce(buffer, reduction, root)
            return
        is_root = self.rank == root
        self._through("reduce", buffer, lambda staged, _: self._host.reduce(staged, reduction, root), up=is_root)

    def reduce_scatter(
        self, buffer: Array, reduction: Reduction, bounds: Sequence[int] | None = None, into: Array | None = None
    ) -> Array:
        if self._joins(buffer):
            return super().reduce_scatter(buffer, reduction, bounds, into)
        if bounds is None:
            bounds = shard_bounds(buffer.size, self.size)
        start, stop = bounds[self.rank], bounds[self.rank + 1]
        shard: Array = buffer[start:stop] if into is None else into
        chunks = cut_shards(bounds, self._staging.sizes.num_chunks(buffer.nbytes))
        self._buffers.reserve(len(chunks), room_of(chunks, buffer.itemsize))

        def phases_of(chunk: int, slot: int) -> Sequence[Phase]:
            whole = self._buffers.open(slot, 0, buffer, chunks[chunk])
            first, last = chunks[chunk][self.rank]
            own = sum(to - at for at, to in chunks[chunk][: self.rank]) * buffer.itemsize
            up = self._buffers.open(slot, own, shard, [(first - start, last - start)])
            move = self._on(
                whole, buffer, chunks[chunk], lambda host, at: self._host.reduce_scatter(host, reduction, at)
            )
            return [Phase(move, whole.all_copies(), up.all_copies())]

        self._staging.run("reduce_scatter", len(chunks), phases_of, self._check_peers, (buffer, shard))
        return shard

    def all_gather(self, buffer: Array, bounds: Sequence[int] | None = None) -> None:
        if self._adds_by_messages:
            super().all_gather(buffer, bounds)
            return
        bounds = shard_bounds(buffer.size, self.size) if bounds is None else bounds
        chunks = cut_shards(bounds, self._staging.sizes.num_chunks(buffer.nbytes))
        self._buffers.reserve(len(chunks), room_of(chunks, buffer.itemsize))

        def phases_of(chunk: int, slot: int) -> Sequence[Phase]:
            whole = self._buffers.open(slot, 0, buffer, chunks[chunk])
            move = self._on(whole, buffer, chunks[chunk], self._host.all_gather)
            down = [copy for copy in whole.copies[self.rank] if copy[2]]
            return [Phase(move, down, whole.all_copies(without=self.rank))]

        self._staging.run("all_gather", len(chunks), phases_of, self._check_peers, buffer)

    def broadcast(self, buffer: Array, root: int, into: Array | None = None) -> None:
        if self._adds_by_messages:
            super().broadcast(buffer, root, into)
            return
        is_root = self.rank == root
        if into is not None and is_root:
            into[...] = buffer
        target = buffer if into is None else into
        self._through("broadcast", target, lambda staged, _: self._host.broadcast(staged, root), is_root, not is_root)

    def _joins(self, buffer: Array) -> bool:
        """Whether GPUs add, and MPI only carries."""
        sizes = self._staging.sizes
        return self._adds_by_messages and buffer.nbytes >= sizes.join_bytes and self.size <= sizes.join_ranks

    def _through(self, what: str, buffer: Array, work: Work, down: bool = True, up: bool = True) -> None:
        """Let the host communicator work on every chunk, with copies of all of it down before and up after."""
        chunks = self._chunks(buffer, 1)
        self._buffers.reserve(len(chunks), room_of(chunks, buffer.itemsize))

        def phases_of(chunk: int, slot: int) -> Sequence[Phase]:
            whole = self._buffers.open(slot, 0, buffer, chunks[chunk])
            copies = whole.all_copies()
            move = self._on(whole, buffer, chunks[chunk], work)
            return [Phase(move, copies if down else (), copies if up else ())]

        self._staging.run(what, len(chunks), phases_of, self._check_peers, buffer)

    def _on(self, whole: Pieces, buffer: Array, pieces: Sequence[Piece], work: Work) -> Callable[[], object]:
        staged = whole.whole.view(buffer.dtype)
        bounds = [0]
        for start, stop in pieces:
            bounds.append(bounds[-1] + stop - start)
        return lambda: work(staged, bounds)
