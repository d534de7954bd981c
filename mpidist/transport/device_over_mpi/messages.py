"""Communicators of device memory whose primitives are messages of MPI, which carries bytes; GPUs add."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpidist.transport import arrays
from mpidist.transport.communicator import Array, Communicator, Traffic, shard_bounds
from mpidist.transport.device_over_mpi.buffers import Buffers, Piece, Pieces, cut_evenly, cut_shards, room_of
from mpidist.transport.device_over_mpi.staging import Phase, Staging
from mpidist.transport.mpi import MpiCommunicator
from mpidist.transport.reduction import Reduction

__all__ = ["MessagedCommunicator"]


class MessagedCommunicator(Communicator, ABC):
    """Ranks whose device memory MPI carries as bytes, in chunks, and whose GPUs add, in rank order.

    A reduction takes two phases a chunk. Every rank sends each other rank its part of the chunk, S (P - 1) / P bytes,
    and the GPU joins the parts in rank order, halves with a float32 accumulator. Then all ranks get the joined parts:
    as many bytes. While the GPU joins a chunk, the next one is on the network.

    Args:
        name: For logs and errors.
        mpi: Carries the bytes. Its owner frees it.
        staging: Streams and memory. Its owner frees it.
        buffers: How pieces come to MPI.
        traffic: Where the calls of this communicator are counted.
    """

    def __init__(self, name: str, mpi: MpiCommunicator, staging: Staging, buffers: Buffers, traffic: Traffic) -> None:
        super().__init__(name, mpi.rank, mpi.size)
        self.traffic = traffic
        self._mpi = mpi
        self._staging = staging
        self._buffers = buffers
        self._others = mpi.others

    def pack_buffer(self, count: int, dtype: np.dtype[Any]) -> Array:
        return arrays.empty((count,), dtype, device=True)

    def all_reduce(self, buffer: Array, reduction: Reduction) -> None:
        self.traffic.add("all_reduce", 2 * buffer.nbytes * (self.size - 1) // self.size)
        self._join("all_reduce", buffer, self._chunks(buffer, self.size), reduction, buffer, self._spread)

    def reduce(self, buffer: Array, reduction: Reduction, root: int) -> None:
        self.traffic.add("reduce", buffer.nbytes)
        chunks = self._chunks(buffer, self.size)
        self._join("reduce", buffer, chunks, reduction, buffer, lambda pieces: self._collect(pieces, root))

    def reduce_scatter(
        self, buffer: Array, reduction: Reduction, bounds: Sequence[int] | None = None, into: Array | None = None
    ) -> Array:
        bounds = shard_bounds(buffer.size, self.size) if bounds is None else bounds
        own = buffer[bounds[self.rank] : bounds[self.rank + 1]]
        shard: Array = own if into is None else into
        self.traffic.add("reduce_scatter", buffer.nbytes - shard.nbytes)
        chunks = cut_shards(bounds, self._staging.sizes.num_chunks(buffer.nbytes))
        is_in_place = shard.size == 0 or shard.data.ptr == own.data.ptr
        self._join("reduce_scatter", buffer, chunks, reduction, buffer if is_in_place else shard, None, bounds)
        return shard

    def all_gather(self, buffer: Array, bounds: Sequence[int] | None = None) -> None:
        bounds = self._start_all_gather(buffer, bounds)
        self._run("all_gather", buffer, cut_shards(bounds, self._staging.sizes.num_chunks(buffer.nbytes)), self._spread)

    def broadcast(self, buffer: Array, root: int, into: Array | None = None) -> None:
        """Send along a binomial tree, ceil(log2 P) messages deep."""
        buffer = self._start_broadcast(buffer, root, into)
        place = (self.rank - root) % self.size
        bit = place & -place if place else 1 << (self.size - 1).bit_length()
        children = [(place + step + root) % self.size for step in _steps_below(bit) if place + step < self.size]
        sources = [(place - bit + root) % self.size] if place else []

        def phase(pieces: Pieces) -> Phase:
            part = pieces.parts[0]

            def move() -> None:
                self._mpi.transfer([], [(part, source) for source in sources])
                self._mpi.transfer([(part, child) for child in children], [])

            copies = pieces.all_copies()
            return Phase(move, () if sources else copies, copies if sources else ())

        self._run("broadcast", buffer, self._chunks(buffer, 1), phase)

    def gather(self, buffer: Array, root: int) -> Array | None:
        is_root, count = self.rank == root, buffer.size
        self.traffic.add("gather", buffer.nbytes * (self.size - 1 if is_root else 1))
        chunks = cut_evenly(count, 1, self._staging.sizes.num_chunks(buffer.nbytes * (self.size - 1)))
        if not is_root:
            self._run("gather", buffer, chunks, lambda at: Phase(self._sending(at.parts, [root]), at.all_copies()))
            return None
        rows = arrays.empty((self.size, count), buffer.dtype, device=True)
        rows[root] = buffer
        at_root = [[(row * count + start, row * count + stop) for row in self._others] for [(start, stop)] in chunks]

        def phase(pieces: Pieces) -> Phase:
            return Phase(self._receiving(pieces.parts, self._others), (), pieces.all_copies())

        self._run("gather", rows.reshape(-1), at_root, phase)
        return rows

    def send_receive(self, outgoing: Array, to: int, incoming: Array, source: int) -> None:
        self.traffic.add("exchange", max(outgoing.nbytes, incoming.nbytes))
        if to == source == self.rank:
            incoming[...] = outgoing
            return
        sent, received = self._chunks(outgoing, 1), self._chunks(incoming, 1)
        count = max(len(sent), len(received))
        room = room_of(sent, outgoing.itemsize)
        self._buffers.reserve(count, room + room_of(received, incoming.itemsize))

        def phases_of(chunk: int, slot: int) -> Sequence[Phase]:
            out = self._buffers.open(slot, 0, outgoing, sent[chunk] if chunk < len(sent) else [])
            into = self._buffers.open(slot, room, incoming, received[chunk] if chunk < len(received) else [])

            def move() -> None:
                self._mpi.transfer([(part, to) for part in out.parts], [(part, source) for part in into.parts])

            return [Phase(move, out.all_copies(), into.all_copies())]

        self._staging.run("exchange", count, phases_of, self._check_peers, (outgoing, incoming))

    def free(self) -> None:
        """Free nothing: MPI's communicator and the staging memory are their owner's."""

    def _chunks(self, array: Array, num_pieces: int) -> list[list[Piece]]:
        """Cut an array into the chunks of a message, and each chunk into pieces."""
        return cut_evenly(array.size, num_pieces, self._staging.sizes.num_chunks(array.nbytes))

    def _run(
        self, what: str, array: Array, chunks: Sequence[Sequence[Piece]], phase: Callable[[Pieces], Phase]
    ) -> None:
        """Pass chunks of one array through one phase."""
        self._buffers.reserve(len(chunks), room_of(chunks, array.itemsize))

        def phases_of(chunk: int, slot: int) -> Sequence[Phase]:
            return [phase(self._buffers.open(slot, 0, array, chunks[chunk]))]

        self._staging.run(what, len(chunks), phases_of, self._check_peers, array)

    def _join(
        self,
        what: str,
        buffer: Array,
        chunks: Sequence[Sequence[Piece]],
        reduction: Reduction,
        into: Array,
        after: Callable[[Pieces], Phase] | None,
        bounds: Sequence[int] | None = None,
    ) -> None:
        """Join every chunk, this rank's piece here; then let the pieces go on."""
        rank, width = self.rank, buffer.itemsize
        shift = 0 if into is buffer or bounds is None else bounds[rank]
        room = room_of(chunks, width)
        most = max((pieces[rank][1] - pieces[rank][0] for pieces in chunks), default=0) * width
        rows_nbytes = (self.size - 1) * most
        self._buffers.reserve(len(chunks), room + rows_nbytes)
        scratch = self._staging.scratch(len(chunks), rows_nbytes)

        def phases_of(chunk: int, slot: int) -> Sequence[Phase]:
            pieces = chunks[chunk]
            start, stop = pieces[rank]
            whole = self._buffers.open(slot, 0, buffer, pieces)
            target = into[start - shift : stop - shift]
            joining = self._joining(whole, (slot, room), scratch[slot], buffer[start:stop], target, reduction)
            return [joining] if after is None else [joining, after(whole)]

        self._staging.run(what, len(chunks), phases_of, self._check_peers, (buffer, into))

    def _joining(
        self, whole: Pieces, place: tuple[int, int], scratch: Array, own: Array, target: Array, reduction: Reduction
    ) -> Phase:
        count, down = own.size, whole.all_copies(without=self.rank)
        sends = [(whole.parts[peer], peer) for peer in self._others]
        if not count:
            return Phase(lambda: self._mpi.transfer(sends, []), down)
        flat = scratch[: (self.size - 1) * count * own.itemsize].view(own.dtype)
        rows = self._buffers.open(*place, flat, [(at * count, (at + 1) * count) for at in range(self.size - 1)])
        peers = [peer for peer in range(self.size) if peer != self.rank]
        receives = list(zip(rows.parts, peers, strict=True))

        def join() -> None:
            parts = [flat[at * count : (at + 1) * count] for at in range(self.size - 1)]
            parts.insert(self.rank, own)
            self._staging.kernels.combine(parts, reduction, target)

        return Phase(lambda: self._mpi.transfer(sends, receives), down, rows.all_copies(), join)

    def _spread(self, pieces: Pieces) -> Phase:
        """Send this rank's piece to all ranks, and receive the pieces of all others."""
        own = pieces.parts[self.rank]
        sends = [(own, peer) for peer in self._others]
        receives = [(pieces.parts[peer], peer) for peer in self._others]
        down = [copy for copies in pieces.copies[self.rank : self.rank + 1] for copy in copies if copy[2]]
        return Phase(lambda: self._mpi.transfer(sends, receives), down, pieces.all_copies(without=self.rank))

    def _collect(self, pieces: Pieces, root: int) -> Phase:
        """Send this rank's piece to the root; at the root, receive the pieces of all others."""
        if self.rank == root:
            parts = [pieces.parts[peer] for peer in self._others]
            return Phase(self._receiving(parts, self._others), (), pieces.all_copies(without=root))
        down = [copy for copy in pieces.copies[self.rank] if copy[2]]
        return Phase(self._sending([pieces.parts[self.rank]], [root]), down)

    def _sending(self, parts: Sequence[Any], peers: Sequence[int]) -> Callable[[], None]:
        return lambda: self._mpi.transfer(list(zip(parts, peers, strict=True)), [])

    def _receiving(self, parts: Sequence[Any], peers: Sequence[int]) -> Callable[[], None]:
        return lambda: self._mpi.transfer([], list(zip(parts, peers, strict=True)))


def _steps_below(bit: int) -> list[int]:
    """List the powers of two below `bit`, the largest first."""
    return [1 << power for power in reversed(range(bit.bit_length() - 1))]
