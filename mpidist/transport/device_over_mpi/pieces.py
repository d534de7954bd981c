"""Pieces of device arrays: how messages are cut into chunks, and chunks into pieces, and where their bytes are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias, final

from mpidist.transport.communicator import shard_bounds

__all__ = ["Copy", "Piece", "Pieces", "aligned", "cut_evenly", "cut_shards", "room_of"]

_LINE: Final = 512  # bytes; what is handed to GPU and network begins at multiples of it

Copy: TypeAlias = tuple[int, int, int]  # address on the host, address on the device, bytes
Piece: TypeAlias = tuple[int, int]  # of a flat array: from one element to before another


@final
class Pieces(NamedTuple):
    """Pieces of one device array, as MPI takes them. Where MPI takes device memory, there are only parts."""

    parts: Sequence[Any]  # what goes to MPI, for each piece
    copies: Sequence[Copy] = ()  # what passes between the device and the slot, for each piece
    whole: Any = None  # all parts as one array of bytes

    def copies_of(self, numbers: Iterable[int]) -> list[Copy]:
        """List the copies of some pieces; copies of adjacent memory are joined."""
        joined: list[Copy] = []
        for host, device, nbytes in (self.copies[number] for number in sorted(numbers) if self.copies):
            if joined and (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]) == (host, device):
                host, device, nbytes = joined[-1][0], joined[-1][1], joined.pop()[2] + nbytes
            if nbytes:
                joined.append((host, device, nbytes))
        return joined

    @property
    def all_copies(self) -> list[Copy]:
        """The copies of all pieces."""
        return self.copies_of(range(len(self.parts)))


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


def aligned(nbytes: int) -> int:
    """Round a size up to a multiple of 512 bytes."""
    return -(-nbytes // _LINE) * _LINE
