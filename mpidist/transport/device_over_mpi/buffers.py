"""How pieces of device arrays come to MPI: copied to slots in host memory, or by their own addresses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias, final

from mpidist.transport.communicator import Array, shard_bounds
from mpidist.transport.device_over_mpi.staging import Copy, Staging, aligned
from mpidist.transport.mpi import load_mpi

__all__ = [
    "DirectBuffers",
    "Buffers",
    "Piece",
    "Pieces",
    "SlotBuffers",
    "cut_evenly",
    "cut_shards",
    "room_of",
]

Piece: TypeAlias = tuple[int, int]  # of a flat array: from one element to before another


@final
@dataclass(frozen=True)
class Pieces:
    """Pieces of one device array, as MPI takes them.

    Attributes:
        parts: What goes to MPI, for each piece.
        copies: What passes between the device and the slot, for each piece; nothing where MPI takes device memory.
        whole: All parts as one array of bytes; `None` where MPI takes device memory.
    """

    parts: Sequence[Any]
    copies: Sequence[Sequence[Copy]]
    whole: Any = None

    def all_copies(self, without: int = -1) -> list[Copy]:
        """List the copies of all pieces but piece `without`; copies of adjacent memory are joined."""
        joined: list[Copy] = []
        for number, copies in enumerate(self.copies):
            if number == without:
                continue
            for host, device, nbytes in copies:
                if joined and (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]) == (host, device):
                    host, device, nbytes = joined[-1][0], joined[-1][1], joined.pop()[2] + nbytes
                if nbytes:
                    joined.append((host, device, nbytes))
        return joined


class Buffers(ABC):
    """The memory from which MPI sends the pieces of a chunk, and into which MPI receives them.

    Args:
        staging: Lends the memory.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = staging

    @abstractmethod
    def reserve(self, count: int, nbytes: int) -> None:
        """Have room for chunks of at most `nbytes` bytes."""

    @abstractmethod
    def open(self, slot: int, at: int, array: Array, pieces: Sequence[Piece]) -> Pieces:
        """Lay pieces of an array one after the other into a slot, from byte `at` on."""


@final
class SlotBuffers(Buffers):
    """Slots of pinned host memory, which pieces are copied to and from."""

    def reserve(self, count: int, nbytes: int) -> None:
        self._staging.reserve(count, nbytes)

    def open(self, slot: int, at: int, array: Array, pieces: Sequence[Piece]) -> Pieces:
        room = self._staging.slot(slot)
        host: int = room.__array_interface__["data"][0]
        width, base = array.itemsize, _address(array)
        sizes = [(stop - start) * width for start, stop in pieces]
        offsets = list(accumulate(sizes, initial=at))
        return Pieces(
            [room[start:stop] for start, stop in pairwise(offsets)],
            [
                [(host + offset, base + start * width, nbytes)]
                for offset, nbytes, (start, _) in zip(offsets, sizes, pieces, strict=False)
            ],
            room[at : offsets[-1]],
        )


@final
class DirectBuffers(Buffers):
    """The pieces themselves, in device memory, which MPI must be able to read."""

    def reserve(self, count: int, nbytes: int) -> None:
        pass

    def open(self, slot: int, at: int, array: Array, pieces: Sequence[Piece]) -> Pieces:
        width, base, view = array.itemsize, _address(array), load_mpi().buffer.fromaddress
        parts = [view(base + start * width, (stop - start) * width) for start, stop in pieces]
        return Pieces(parts, [()] * len(parts))


def cut_evenly(count: int, size: int, num_chunks: int) -> list[list[Piece]]:
    """Cut `count` elements into chunks, and each into pieces of almost one length, one for each rank."""
    chunks = pairwise(shard_bounds(count, num_chunks)) if num_chunks else ()
    return [
        [(start + at, start + to) for at, to in pairwise(shard_bounds(stop - start, size))] for start, stop in chunks
    ]


def cut_shards(bounds: Sequence[int], num_chunks: int) -> list[list[Piece]]:
    """Cut every rank's shard into `num_chunks` pieces. A chunk has a piece of each shard: all ranks work on it."""
    cuts = [
        [start + (stop - start) * chunk // num_chunks for chunk in range(num_chunks + 1)]
        for start, stop in pairwise(bounds)
        if num_chunks
    ]
    return [[(bounds[chunk], bounds[chunk + 1]) for bounds in cuts] for chunk in range(num_chunks)]


def room_of(chunks: Sequence[Sequence[Piece]], width: int) -> int:
    """Return the bytes that the largest chunk needs in a slot."""
    return aligned(max((sum(stop - start for start, stop in pieces) for pieces in chunks), default=0) * width)


def _address(array: Array) -> int:
    return int(array.data.ptr)
