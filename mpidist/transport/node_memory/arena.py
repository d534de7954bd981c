"""An arena: shared memory of a node that ranks allocate piece by piece, and that all have mapped from the beginning."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Final, final

from mpidist.transport.mpi.library import Intracomm, greatest
from mpidist.transport.node_memory.barrier import Fence
from mpidist.transport.node_memory.window import (
    LINE_BYTES,
    discard,
    file_system_bytes,
    map_file,
    part_stride,
    whole_pages,
)

__all__ = ["SharedArena"]

_STEP_BYTES: Final = 1 << 20  # how much more than is needed is reserved at once, if the system has as much
_LEFT_TO_OTHERS: Final = 1 / 8


@final
class SharedArena:
    """Shared memory of a node, in which each rank allocates by itself. Making the arena is collective over the node.

    Each rank has a part of the arena, with addresses for as many bytes as the whole memory file system has; the system
    provides memory only for bytes that were taken. All ranks have mapped all parts. So if a rank takes memory later, it
    need only send the other ranks the place of that memory.

    Args:
        nbytes: How much this rank takes at once, from the start of its part.
        most_bytes: How much a rank may take; `None` for as much as there is.
        left_to_others: The share of the memory file system that the arena leaves free, for other uses.

    Attributes:
        own: This rank's part.
        parts: [ranks], each rank's part as bytes. Bytes that were not taken must not be touched.
    """

    def __init__(
        self, comm: Intracomm, nbytes: int, most_bytes: int | None = None, left_to_others: float = _LEFT_TO_OTHERS
    ) -> None:
        rank, size = comm.Get_rank(), comm.Get_size()
        whole = _size()
        self._left_to_others = int(whole * left_to_others)
        most = whole if most_bytes is None else min(whole, most_bytes)
        span: int = greatest(comm, part_stride(max(most, nbytes)))
        self._start, self._end = span * rank, span * (rank + 1)
        self._next = self._start + nbytes
        self._taken = self._start + whole_pages(nbytes)
        self._file, self._whole = map_file(comm, span * size, self._start, self._taken - self._start)
        self.parts = [self._whole[span * owner : span * (owner + 1)] for owner in range(size)]
        self.own = self.parts[rank]
        self._fence: Fence | None = None
        self._gaps: list[tuple[int, int]] = []  # what was given back, as bounds in this rank's part, in rising order
        self._returned: deque[tuple[int, int]] = deque()  # from `give_back`, not joined to the gaps yet
        self._process = os.getpid()

    @property
    def fence(self) -> Callable[[], None] | None:
        """The function that orders loads and stores; `None` where none is needed."""
        if self._fence is None:
            self._fence = Fence()
        return self._fence.sync

    def take(self, nbytes: int) -> int | None:
        """Take memory; return where it begins in this rank's part, at a whole `LINE_BYTES`, or `None`. Local."""
        start = -(-self._next // LINE_BYTES) * LINE_BYTES
        end = start + nbytes
        if end > self._taken and not (self._extend(end + _STEP_BYTES) or self._extend(end)):
            return None
        self._next = end
        return start - self._start

    def take_pages(self, nbytes: int) -> int | None:
        """Take memory that can be given back; return where it begins, at a whole page, or `None`. Local."""
        size = whole_pages(nbytes)
        while self._returned:
            self._gaps = _joined([*self._gaps, self._returned.popleft()])
        for at, (start, end) in enumerate(self._gaps):
            if end - start >= size:
                if not self._reserve(self._start + start, size):
                    return None
                self._gaps[at : at + 1] = [(start + size, end)] if end - start > size else []
                return start
        self._next = whole_pages(self._next)
        return self.take(size)

    def give_back(self, start: int, nbytes: int) -> None:
        """Give back what `take_pages` took. Local; garbage collection may call it at any moment."""
        if os.getpid() != self._process:  # forked: the memory is the parent's
            return
        end = start + whole_pages(nbytes)
        discard(self.own[start:end])
        self._returned.append((start, end))

    def close(self) -> None:
        """Take no more memory; memory taken before stays usable. Local."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def free(self) -> None:
        """Give back the memory that this rank has taken, even if arrays refer to it. Local; no rank may use it."""
        self.close()
        if self._taken > self._start:
            discard(self._whole[self._start : self._taken])
        if self._fence is not None:
            self._fence.free()

    def _extend(self, end: int) -> bool:
        """Reserve memory up to `end`. Returns whether there is enough."""
        end = whole_pages(end)
        if end > self._end or not self._reserve(self._taken, end - self._taken):
            return False
        self._taken = end
        return True

    def _reserve(self, start: int, nbytes: int) -> bool:
        """Reserve memory of the system for pages of the file. Returns whether there is enough."""
        try:
            if self._file < 0 or file_system_bytes()[1] - nbytes < self._left_to_others:
                return False
            os.posix_fallocate(self._file, start, nbytes)
        except OSError:
            return False
        return True


def _joined(gaps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return gaps in rising order, of which none touches the next."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(gaps):
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return joined


def _size() -> int:
    try:
        return file_system_bytes()[0]
    except OSError:  # making the file says what is wrong
        return 0
