"""The barrier of a node's ranks, which lives in the memory that they share."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, Final, final

from mpidist.transport.mpi import load_mpi
from mpidist.transport.shared_memory.window import LINE_BYTES, SharedWindow

__all__ = ["Fence", "NodeBarrier"]

# Processors that keep one core's stores in order for all others; elsewhere MPI has to see to it.
_ORDERED: Final = platform.machine().lower() in ("x86_64", "amd64", "i686")


@final
class Fence:
    """Orders this rank's loads and stores, those before it and those after it, where the processor does not."""

    def __init__(self) -> None:
        self._window: Any = None
        if not _ORDERED:
            mpi = load_mpi()
            self._window = mpi.Win.Allocate(8, comm=mpi.COMM_SELF)  # MPI's only fence belongs to a window
            self._window.Lock_all()

    @property
    def sync(self) -> Callable[[], None] | None:
        """What to call; `None` where nothing is needed."""
        return None if self._window is None else self._window.Sync

    def free(self) -> None:
        """Give back what MPI holds for it."""
        if self._window is not None:
            self._window.Unlock_all()
            self._window.Free()
            self._window = None


@final
class NodeBarrier:
    """Counts the barriers of a node's ranks, in shared memory, with a few words that each rank shows the others.

    A rank posts its arrival and then asks whether all others have posted theirs. What a rank wrote into shared
    memory before it posted, the others see once they have has_passed.

    Args:
        window: The memory; each part begins with `LINE_BYTES` for this.
        rank: This rank on the node.
        fence: `Fence.sync`.
    """

    def __init__(self, window: SharedWindow, rank: int, fence: Callable[[], None] | None = None) -> None:
        lines = [part[:LINE_BYTES].data.cast("q") for part in window.parts]
        self.count = 0
        self.size = len(lines)
        self._own = lines[rank]
        self._lines = lines
        self._peers = lines[:rank] + lines[rank + 1 :]
        self._fence = fence

    def post_words(self, first: int, second: int) -> None:
        """Say that this rank has arrived, and show two words of 63 bits with it."""
        count = self.count + 1
        at = 1 + count % 2 * 4  # two places in turn: slow ranks may still read the one before
        own = self._own
        own[at] = first
        own[at + 1] = second
        if self._fence is not None:
            self._fence()
        self.count = own[0] = count

    def has_equal_words(self) -> tuple[bool, bool]:
        """Whether all ranks showed the same first word, and the same second one, in the barrier has_passed last."""
        at = 1 + self.count % 2 * 4
        first, second = self._own[at], self._own[at + 1]
        same_first = same_second = True
        for line in self._peers:
            same_first &= line[at] == first
            same_second &= line[at + 1] == second
        return same_first, same_second

    def post(self) -> None:
        """Say that this rank has arrived."""
        if self._fence is not None:
            self._fence()
        self.count += 1
        self._own[0] = self.count

    def has_passed(self) -> bool:
        """Whether all ranks have arrived."""
        count = self.count
        for line in self._peers:
            if line[0] < count:
                return False
        if self._fence is not None:
            self._fence()
        return True

    def missing(self) -> list[int]:
        """List the ranks that have not arrived."""
        return [rank for rank, line in enumerate(self._lines) if line[0] < self.count]
