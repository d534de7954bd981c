"""Cuts of messages of device memory into chunks, and of chunks into pieces, and the places of their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias, final

from mpidist.transport.communicator import shard_bounds
from mpidist.transport.settings import LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES

__all__ = ["Copy", "Piece", "Pieces", "StagingSizes", "aligned", "cut_evenly", "cut_shards", "room_of"]

_LINE: Final = 512  # bytes; what is handed to GPU and network begins at multiples of it

_CHUNK_SECONDS: Final = 230e-6  # Python, launches, waits and messages of a chunk's two phases, beside an H200

Copy: TypeAlias = tuple[int, int, int]  # address on the host, address on the device, bytes
Piece: TypeAlias = tuple[int, int]  # of a flat array: from one element to before another


@final
@dataclass(frozen=True)
class StagingSizes:
    """Sizes of staging. They must be the same on all ranks.

    A message of n bytes goes in chunks of c = sqrt(n a B / 2), between 256 KiB and 8 MiB: three stages (down, network,
    up) take (n / c + 2) (a + c / B), which is least there. a is a chunk's own cost, 230 us; B the speed of the slowest
    stage, taken to be the network.
    """

    chunk_bytes: int = 0  # of all chunks, whatever the formula says; 0 for the formula
    bytes_per_second: float = 1.25e9  # B
    join_bytes: int = 256 << 10  # from which on GPUs add what MPI brings; MPI adds what is smaller
    join_ranks: int = 32  # up to which GPUs add: every rank sends a part to each other rank
    depth: int = 3  # chunks under way at once

    def num_chunks(self, nbytes: int) -> int:
        """Return the number of chunks of a message; 0 for an empty one."""
        if self.chunk_bytes:
            return math.ceil(nbytes / self.chunk_bytes)
        best = math.sqrt(nbytes * _CHUNK_SECONDS * self.bytes_per_second / 2)
        return math.ceil(nbytes / min(max(best, LEAST_CHUNK_BYTES), MOST_CHUNK_BYTES))


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
