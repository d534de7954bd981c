"""Device memory by messages of MPI, which carries bytes; what there is to add, GPUs add."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from mpidist.transport.communicator import Array
from mpidist.transport.device_over_mpi.buffers import Buffers, Piece, Pieces, cut_evenly, cut_shards, room_of
from mpidist.transport.device_over_mpi.staging import Phase, Staging
from mpidist.transport.mpi import MpiCommunicator
from mpidist.transport.reduction import Reduction

__all__ = ["DeviceMessages"]


@final
class DeviceMessages:
    """The primitives of a communicator, on device memory, in chunks. They count nothing: their callers do.

    A reduction takes two phases a chunk. Every rank sends each other one its part of the chunk, and the GPU joins
    what came in rank order, halves with a float32 accumulator: S (P - 1) / P bytes. Then the joined parts go round:
    as much. While the GPU joins a chunk, the next one is on the network.

    Args:
        mpi: Carries the bytes.
        staging: The streams and memory.
        buffers: How pieces come to MPI.
        check_peers: Asked while a rank waits.
    """

    def __init__(
        self, mpi: MpiCommunicator, staging: Staging, buffers: Buffers, check_peers: Callable[[], None]
    ) -> None:
        self._mpi = mpi
        self._staging = staging
        self._buffers = buffers
        self._check_peers = check_peers
        self._rank, self._size = mpi.rank, mpi.size
        self._others = mpi.others

    def all_reduce(self, buffer: Array, reduction: Reduction) -> None:
        """Leave the reduction of all ranks' buffers in every rank's buffer."""
        chunks = cut_evenly(buffer.size, self._size, self._staging.sizes.num_chunks(buffer.nbytes))
        self._reduce("all_reduce", buffer, chunks, reduction, buffer, self._spread)

    def reduce(self, buffer: Array, reduction: Reduction, root: int) -> None:
        """Leave the reduction in the root's buffer."""
        chunks = cut_evenly(buffer.size, self._size, self._staging.sizes.num_chunks(buffer.nbytes))
        self._reduce("reduce", buffer, chunks, reduction, buffer, lambda pieces: self._collect(pieces, root))

    def reduce_scatter(self, buffer: Array, reduction: Reduction, bounds: Sequence[int], shard: Array) -> None:
        """Leave the reduction of each rank's shard in its `shard`, which may be a view of `buffer`."""
        chunks = cut_shards(bounds, self._staging.sizes.num_chunks(buffer.nbytes))
        own = buffer[bounds[self._rank] : bounds[self._rank + 1]]
        is_in_place = shard.size == 0 or shard.data.ptr == own.data.ptr
        self._reduce("reduce_scatter", buffer, chunks, reduction, buffer if is_in_place else shard, None, bounds)

    def all_gather(self, buffer: Array, bounds: Sequence[int]) -> None:
        """Give every rank the shard of every other, in place."""
        chunks = cut_shards(bounds, self._staging.sizes.num_chunks(buffer.nbytes))
        self._run("all_gather", buffer, chunks, self._spread)

    def broadcast(self, buffer: Array, root: int) -> None:
        """Copy the root's buffer into every rank's: along a binomial tree, ceil(log2 P) messages deep."""
        place = (self._rank - root) % self._size
        bit = place & -place if place else 1 << (self._size - 1).bit_length()
        children = [(place + step + root) % self._size for step in _steps_below(bit) if place + step < self._size]
        sources = [(place - bit + root) % self._size] if place else []

        def phase(pieces: Pieces) -> Phase:
            part = pieces.parts[0]

            def move() -> None:
                self._mpi.transfer([], [(part, source) for source in sources])
                self._mpi.transfer([(part, child) for child in children], [])

            copies = pieces.all_copies()
            return Phase(move, () if sources else copies, copies if sources else ())

        chunks = cut_evenly(buffer.size, 1, self._staging.sizes.num_chunks(buffer.nbytes))
        self._run("broadcast", buffer, chunks, phase)

    def gather(self, buffer: Array, root: int, rows: Array | None) -> None:
        """Bring all ranks' buffers to the root's `rows` [P, n], which holds its own already."""
        count = buffer.size
        chunks = cut_evenly(count, 1, self._staging.sizes.num_chunks(buffer.nbytes * (self._size - 1)))
        if rows is None:
            self._run("gather", buffer, chunks, lambda at: Phase(self._sending(at.parts, [root]), at.all_copies()))
            return
        flat = rows.reshape(-1)
        at_root = [[(row * count + start, row * count + stop) for row in self._others] for [(start, stop)] in chunks]
        self._run(
            "gather", flat, at_root, lambda at: Phase(self._receiving(at.parts, self._others), (), at.all_copies())
        )

    def send_receive(self, outgoing: Array, to: int, incoming: Array, source: int) -> None:
        """Send one flat array and receive another, at once."""
        num_chunks = self._staging.sizes.num_chunks
        sent = cut_evenly(outgoing.size, 1, num_chunks(outgoing.nbytes))
        received = cut_evenly(incoming.size, 1, num_chunks(incoming.nbytes))
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

    def _run(
        self, what: str, array: Array, chunks: Sequence[Sequence[Piece]], phase: Callable[[Pieces], Phase]
    ) -> None:
        """Pass chunks of one array through one phase."""
        self._buffers.reserve(len(chunks), room_of(chunks, array.itemsize))

        def phases_of(chunk: int, slot: int) -> Sequence[Phase]:
            return [phase(self._buffers.open(slot, 0, array, chunks[chunk]))]

        self._staging.run(what, len(chunks), phases_of, self._check_peers, array)

    def _reduce(
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
        rank, width = self._rank, buffer.itemsize
        shift = 0 if into is buffer or bounds is None else bounds[rank]
        room = room_of(chunks, width)
        most = max((pieces[rank][1] - pieces[rank][0] for pieces in chunks), default=0) * width
        rows_nbytes = (self._size - 1) * most
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
        count, down = own.size, whole.all_copies(without=self._rank)
        sends = [(whole.parts[peer], peer) for peer in self._others]
        if not count:
            return Phase(lambda: self._mpi.transfer(sends, []), down)
        flat = scratch[: (self._size - 1) * count * own.itemsize].view(own.dtype)
        rows = self._buffers.open(*place, flat, [(at * count, (at + 1) * count) for at in range(self._size - 1)])
        peers = [peer for peer in range(self._size) if peer != self._rank]
        receives = list(zip(rows.parts, peers, strict=True))

        def join() -> None:
            parts = [flat[at * count : (at + 1) * count] for at in range(self._size - 1)]
            parts.insert(self._rank, own)
            kernels = self._staging.kernels
            overflow = kernels.overflow_of(target.dtype) if reduction.counts_overflow else None
            kernels.combine(parts, reduction, target, overflow)

        return Phase(lambda: self._mpi.transfer(sends, receives), down, rows.all_copies(), join)

    def _spread(self, pieces: Pieces) -> Phase:
        """Give every rank this rank's piece, and get theirs."""
        own = pieces.parts[self._rank]
        sends = [(own, peer) for peer in self._others]
        receives = [(pieces.parts[peer], peer) for peer in self._others]
        down = [copy for copies in pieces.copies[self._rank : self._rank + 1] for copy in copies if copy[2]]
        return Phase(lambda: self._mpi.transfer(sends, receives), down, pieces.all_copies(without=self._rank))

    def _collect(self, pieces: Pieces, root: int) -> Phase:
        """Give the root this rank's piece; at the root, get theirs."""
        if self._rank == root:
            parts = [pieces.parts[peer] for peer in self._others]
            return Phase(self._receiving(parts, self._others), (), pieces.all_copies(without=root))
        down = [copy for copy in pieces.copies[self._rank] if copy[2]]
        return Phase(self._sending([pieces.parts[self._rank]], [root]), down)

    def _sending(self, parts: Sequence[Any], peers: Sequence[int]) -> Callable[[], None]:
        return lambda: self._mpi.transfer(list(zip(parts, peers, strict=True)), [])

    def _receiving(self, parts: Sequence[Any], peers: Sequence[int]) -> Callable[[], None]:
        return lambda: self._mpi.transfer([], list(zip(parts, peers, strict=True)))


def _steps_below(bit: int) -> list[int]:
    """List the powers of two below one, the largest first."""
    return [1 << power for power in reversed(range(bit.bit_length() - 1))]
