"""In how many chunks device memory goes through the host."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, final

from mpidist.transport.settings import LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES

__all__ = ["StagingSizes"]

_LEAST_CHUNKS: Final = 4  # of fewer, too little overlaps
_CHUNK_SECONDS: Final = 20e-6  # Python, launches and messages of one chunk; a guess, not measured on a GPU


@final
@dataclass(frozen=True)
class StagingSizes:
    """Sizes of staging. They must be the same on all ranks.

    A message of n bytes goes in chunks of c = sqrt(n a B / 2), between 256 KiB and 8 MiB: three stages (down, network,
    up) take (n / c + 2) (a + c / B), which is least there. a is a chunk's own cost, 20 us; B the speed of the slowest
    stage, taken to be the network. There are at least 4 chunks, or, below 1 MiB, one.
    """

    chunk_bytes: int = 0  # of all chunks, whatever the formula says; 0 for the formula
    bytes_per_second: float = 1.25e9  # B
    join_bytes: int = 256 << 10  # from which on GPUs add what MPI brings; MPI adds what is smaller
    join_ranks: int = 32  # up to which GPUs add: every rank sends a part to each other rank
    depth: int = 3  # chunks under way at once

    def num_chunks(self, nbytes: int) -> int:
        """Say in how many chunks a message goes; 0 for an empty one."""
        if self.chunk_bytes:
            return math.ceil(nbytes / self.chunk_bytes)
        if nbytes < _LEAST_CHUNKS * LEAST_CHUNK_BYTES:
            return min(1, nbytes)
        best = math.sqrt(nbytes * _CHUNK_SECONDS * self.bytes_per_second / 2)
        chunk = min(max(best, LEAST_CHUNK_BYTES), MOST_CHUNK_BYTES)
        return max(_LEAST_CHUNKS, math.ceil(nbytes / chunk))
