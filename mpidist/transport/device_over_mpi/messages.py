"""Device memory between ranks by MPI, which carries bytes; GPUs add."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias, final

import numpy as np

from mpidist.transport import arrays
from mpidist.transport.arrays import address_of
from mpidist.transport.communicator import Array, Communicator
from mpidist.transport.device_over_mpi.pieces import Copy, Piece, Pieces, cut_evenly, cut_shards, room_of
from mpidist.transport.device_over_mpi.staging import Phase, Staging
from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory.communicator import SharedMemoryCommunicator

__all__ = ["MessagedCommunicator"]

_Messages: TypeAlias = Sequence[tuple[int, int]]  # the number of a piece, and a rank
_Chunks: TypeAlias = Sequence[Sequence[Piece]]
_PhaseOf: TypeAlias = Callable[[Pieces], Phase]


@final
class MessagedCommunicator(Communicator):
    """Ranks whose device memory MPI carries as bytes, in chunks, and whose GPUs add, in rank order.

    A reduction takes two phases a chunk. Every rank sends each other rank its part of the chunk, S (P - 1) / P bytes,
    and the GPU joins the parts in rank order, halves with a float32 accumulator. Then all ranks get the joined parts:
    as many bytes. While the GPU joins a chunk, the next one is on the network.

    Each chunk passes through slots of pinned host memory, while the next one is copied down and the one before up. The
    host communicator reduces messages below `StagingSizes.join_bytes`, those of very many ranks, and all within a node
    with shared memory. With `Staging.is_direct` MPI has the addresses of device memory, and GPUs alone add: MPI's own
    reductions of device memory go through the host, or crash.

    Work comes after what the caller's current stream holds, and a call returns when its work is done. So NCCL and MPI
    are never both under way, which could end in a deadlock.

    Args:
        host: The communicator of host memory, whose owner frees it. It counts traffic: one call for each call that
            messages serve, and one for each chunk that it reduces itself.
        staging: Streams and memory, which communicators that are used in turn can share. Their owner frees them.
    """

    def __init__(self, host: MpiCommunicator | SharedMemoryCommunicator, staging: Staging) -> None:
        way = "from device memory" if staging.is_direct else "through the host"
        super().__init__(f"{host.name} {way}", host.rank, host.size)
        self.traffic = host.traffic
        self._host = host
        self._mpi = host if isinstance(host, MpiCommunicator) else host.mpi
        self._staging = staging
        self._others = self._mpi.others

    def pack_buffer(self, count: int, dtype: np.dtype[Any]) -> Array:
        return arrays.empty((count,), dtype, device=True)

    def all_reduce(self, buffer: Array, reduction: Reduction) -> None:
        if self._is_added_by_host(buffer):
            phase = self._on_host(buffer, lambda staged, _: self._host.all_reduce(staged, reduction))
            self._run("all_reduce", buffer, self._chunks(buffer, 1), phase)
            return
        self.traffic.add("all_reduce", 2 * buffer.nbytes * (self.size - 1) // self.size)
        self._join("all_reduce", buffer, self._chunks(buffer, self.size), reduction, (buffer, 0), self._spread)

    def reduce(self, buffer: Array, reduction: Reduction, root: int) -> None:
        if self._is_added_by_host(buffer):
            phase = self._on_host(
                buffer,
                lambda staged, _: self._host.reduce(staged, reduction, root),
                lambda pieces: pieces.all_copies if self.rank == root else (),
            )
            self._run("reduce", buffer, self._chunks(buffer, 1), phase)
            return
        self.traffic.add("reduce", buffer.nbytes)
        chunks = self._chunks(buffer, self.size)
        self._join("reduce", buffer, chunks, reduction, (buffer, 0), lambda pieces: self._collect(pieces, root))

    def _scatter(self, buffer: Array, reduction: Reduction, bounds: Sequence[int], own: Array, shard: Array) -> None:
        chunks = cut_shards(bounds, self._staging.sizes.num_chunks(buffer.nbytes))
        if not self._is_added_by_host(buffer):
            self.traffic.add("reduce_scatter", buffer.nbytes - own.nbytes)
            self._join("reduce_scatter", buffer, chunks, reduction, (shard, bounds[self.rank]))
            return
        away = address_of(shard) - address_of(own)

        def raised(pieces: Pieces) -> list[Copy]:
            return [(host, device + away, nbytes) for host, device, nbytes in pieces.copies_of([self.rank])]

        phase = self._on_host(buffer, lambda staged, at: self._host.reduce_scatter(staged, reduction, at), raised)
        self._run("reduce_scatter", buffer, chunks, phase, shard)

    def all_gather(self, buffer: Array, bounds: Sequence[int] | None = None) -> None:
        bounds = self._start_all_gather(buffer, bounds)
        self._run("all_gather", buffer, cut_shards(bounds, self._staging.sizes.num_chunks(buffer.nbytes)), self._spread)

    def broadcast(self, buffer: Array, root: int, into: Array | None = None) -> None:
        """Send along a binomial tree, ceil(log2 P) messages deep."""
        buffer = self._start_broadcast(buffer, root, into)
        place = (self.rank - root) % self.size
        bit = place & -place if place else 1 << (self.size - 1).bit_length()
        steps = [1 << power for power in reversed(range(bit.bit_length() - 1))]  # the powers of two below `bit`
        children = [(place + step + root) % self.size for step in steps if place + step < self.size]
        sources = [(place - bit + root) % self.size] if place else []

        def phase(pieces: Pieces) -> Phase:
            part, copies = pieces.parts[0], pieces.all_copies

            def move() -> None:
                self._mpi.transfer([], [(part, source) for source in sources])
                self._mpi.transfer([(part, child) for child in children], [])

            return Phase(move, () if sources else copies, copies if sources else ())

        self._run("broadcast", buffer, self._chunks(buffer, 1), phase)

    def send_receive(self, outgoing: Array, to: int, incoming: Array, source: int) -> None:
        self.traffic.add("exchange", max(outgoing.nbytes, incoming.nbytes))
        sent, received = self._chunks(outgoing, 1), self._chunks(incoming, 1)
        count = max(len(sent), len(received))
        room = room_of(sent, outgoing.itemsize)
        nbytes = room + room_of(received, incoming.itemsize)

        def phases_of(chunk: int, slot: int) -> Sequence[Phase]:
            out = self._staging.open(slot, 0, outgoing, sent[chunk] if chunk < len(sent) else [])
            into = self._staging.open(slot, room, incoming, received[chunk] if chunk < len(received) else [])
            sends, receives = ([(at, peer) for at in range(len(of.parts))] for of, peer in ((out, to), (into, source)))
            return [self._transfer(out, sends, into, receives)]

        self._staging.run("exchange", count, nbytes, phases_of, self._check_peers, (outgoing, incoming))

    def _chunks(self, array: Array, num_pieces: int) -> list[list[Piece]]:
        """Cut an array into the chunks of a message, and each chunk into pieces."""
        return cut_evenly(array.size, num_pieces, self._staging.sizes.num_chunks(array.nbytes))

    def _is_added_by_host(self, buffer: Array) -> bool:
        """Whether the host communicator adds; else GPUs do, and MPI only carries."""
        if self._staging.is_direct:
            return False
        sizes = self._staging.sizes
        return self._host is not self._mpi or buffer.nbytes < sizes.join_bytes or self.size > sizes.join_ranks

    def _on_host(
        self,
        buffer: Array,
        work: Callable[[Array, list[int]], object],
        raised: Callable[[Pieces], Sequence[Copy]] = lambda pieces: pieces.all_copies,
    ) -> _PhaseOf:
        """Work on a chunk and its bounds on the host. `raised` lists the copies up after that, by default all."""

        def phase(pieces: Pieces) -> Phase:
            staged = pieces.whole.view(buffer.dtype)
            bounds = list(accumulate((part.size // buffer.itemsize for part in pieces.parts), initial=0))
            return Phase(partial(work, staged, bounds), pieces.all_copies, raised(pieces))

        return phase

    def _run(self, what: str, array: Array, chunks: _Chunks, phase: _PhaseOf, keeps: Any = None) -> None:
        """Pass chunks of one array through one phase."""

        def phases_of(chunk: int, slot: int) -> Sequence[Phase]:
            return [phase(self._staging.open(slot, 0, array, chunks[chunk]))]

        nbytes = room_of(chunks, array.itemsize)
        self._staging.run(what, len(chunks), nbytes, phases_of, self._check_peers, (array, keeps))

    def _join(
        self,
        what: str,
        buffer: Array,
        chunks: _Chunks,
        reduction: Reduction,
        into: tuple[Array, int],
        after: _PhaseOf | None = None,
    ) -> None:
        """Join every chunk of a buffer, this rank's piece here; then let the pieces go on, in a phase `after`.

        `into`: the buffer of this rank's pieces, and the element of `buffer` that comes first there.
        """
        rank, width, (target, first) = self.rank, buffer.itemsize, into
        room = room_of(chunks, width)
        most = max((pieces[rank][1] - pieces[rank][0] for pieces in chunks), default=0)
        nbytes = room + len(self._others) * most * width
        slots = range(min(len(chunks), self._staging.sizes.depth))
        received = [arrays.empty((len(self._others) * most,), buffer.dtype, device=True) for _ in slots]

        def phases_of(chunk: int, slot: int) -> Sequence[Phase]:
            pieces = chunks[chunk]
            start, stop = pieces[rank]
            whole = self._staging.open(slot, 0, buffer, pieces)
            own, joined = buffer[start:stop], target[start - first : stop - first]
            joining = self._joining(whole, (slot, room), received[slot], own, joined, reduction)
            return [joining] if after is None else [joining, after(whole)]

        self._staging.run(what, len(chunks), nbytes, phases_of, self._check_peers, (buffer, target, received))

    def _joining(
        self, whole: Pieces, place: tuple[int, int], received: Array, own: Array, target: Array, reduction: Reduction
    ) -> Phase:
        """Send the other ranks' pieces; receive theirs of this rank's, behind in the slot, and let the GPU join."""
        count, peers = own.size, sorted(self._others)
        cuts = [(at * count, (at + 1) * count) for at in range(len(peers))]

        def join() -> None:
            parts = [received[start:stop] for start, stop in cuts]
            parts.insert(self.rank, own)
            if count:
                self._staging.kernels.combine(parts, reduction, target)

        sends = [(peer, peer) for peer in self._others]
        rows = self._staging.open(*place, received, cuts)
        return self._transfer(whole, sends, rows, list(enumerate(peers)), join)

    def _spread(self, pieces: Pieces) -> Phase:
        """Send this rank's piece to all ranks, and receive the pieces of all others."""
        sends = [(self.rank, peer) for peer in self._others]
        return self._transfer(pieces, sends, pieces, [(peer, peer) for peer in self._others])

    def _collect(self, pieces: Pieces, root: int) -> Phase:
        """Send this rank's piece to the root; at the root, receive the pieces of all others."""
        if self.rank != root:
            return self._transfer(pieces, [(self.rank, root)], pieces, [])
        return self._transfer(pieces, [], pieces, [(peer, peer) for peer in self._others])

    def _transfer(
        self, out: Pieces, sends: _Messages, into: Pieces, receives: _Messages, join: Callable[[], None] | None = None
    ) -> Phase:
        """Send pieces of `out` and receive pieces of `into`: each its number, and the rank it goes to or comes from."""
        down, up = (
            [(of.parts[at], peer) for at, peer in messages] for of, messages in ((out, sends), (into, receives))
        )
        lowered, raised = out.copies_of({at for at, _ in sends}), into.copies_of({at for at, _ in receives})
        return Phase(partial(self._mpi.transfer, down, up), lowered, raised, join)
