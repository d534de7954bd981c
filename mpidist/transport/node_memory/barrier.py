"""The barrier of a node's ranks, in shared memory."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, Final, final

from mpidist.transport.mpi.library import load_mpi
from mpidist.transport.native.loading import native
from mpidist.transport.node_memory.window import LINE_BYTES, SharedWindow
from mpidist.transport.waiting import SPINS

__all__ = ["Fence", "NodeBarrier", "make_barrier", "writer_of"]

# On these processors, all cores see the stores of one core in order; on others, memory fences have to order them.
_ORDERED: Final = platform.machine().lower() in ("x86_64", "amd64", "i686")


@final
class Fence:
    """A memory fence: orders this rank's loads and stores, on processors that do not."""

    def __init__(self) -> None:
        self._window: Any = None
        if not _ORDERED:
            mpi = load_mpi()
            self._window = mpi.Win.Allocate(8, comm=mpi.COMM_SELF)  # MPI has a fence only as a method of a window
            self._window.Lock_all()

    @property
    def sync(self) -> Callable[[], None] | None:
        """The function that is the fence; `None` where none is needed."""
        return None if self._window is None else self._window.Sync

    def free(self) -> None:
        """Free the MPI window."""
        if self._window is not None:
            self._window.Unlock_all()
            self._window.Free()
            self._window = None


def make_barrier(window: SharedWindow, rank: int, fence: Callable[[], None] | None) -> NodeBarrier:
    """Make the barrier of a node, in C if it is there; the arguments are those of `NodeBarrier`. Local."""
    if native is None:
        return NodeBarrier(window, rank, fence)
    barrier: NodeBarrier = native.Barrier(window.parts, rank, SPINS)
    return barrier


def writer_of(line: Any) -> Callable[[Any, Any], bool] | None:
    """Return the compiled copy to memory that another rank reads, past the caches where that takes less, or `None`.

    It takes contiguous bytes, to be written and to be read. `line` has `LINE_BYTES`, which are not touched. Local.
    """
    return None if native is None else native.Barrier([line], 0, 0).copy  # of one rank, which waits for nobody


@final
class NodeBarrier:
    """A barrier of a node's ranks in shared memory, in which ranks can compare two words and pass on another one.

    A rank posts its arrival, and then polls until all other ranks have posted theirs. All that a rank wrote into shared
    memory before its post, the other ranks see when they have passed the barrier. The first `LINE_BYTES` of each part
    of the window are the barrier's; `count` is the number of the barrier that this rank posted last.
    """

    def __init__(self, window: SharedWindow, rank: int, fence: Callable[[], None] | None = None) -> None:
        lines = [part[:LINE_BYTES].data.cast("q") for part in window.parts]
        self.count = 0
        self._lines, self._own = lines, lines[rank]
        self._peers = lines[:rank] + lines[rank + 1 :]
        self._fence = fence

    def post_words(self, first: int, second: int, /) -> None:
        """Post this rank's arrival, with two words of 63 bits."""
        count = self.count + 1
        at = 1 + count % 2 * 4  # two places in turn: slow ranks may still read the words of the last barrier
        own = self._own
        own[at] = first
        own[at + 1] = second
        if self._fence is not None:
            self._fence()
        self.count = own[0] = count

    def publish(self, word: int, /) -> None:
        """Pass a word of 63 bits to the other ranks, with the next barrier."""
        # Four places in turn: a rank that is two barriers ahead may publish its next word.
        self._own[9 + (self.count + 1) % 4] = word

    def published(self, count: int, /) -> list[int]:
        """Return [ranks], the word that each passed with barrier `count`: the last one, or the one before."""
        return [line[9 + count % 4] for line in self._lines]

    def has_equal_words(self) -> tuple[bool, bool]:
        """Whether all ranks posted the same first word, and the same second word, in the barrier passed last."""
        at = 1 + self.count % 2 * 4
        first, second = self._own[at], self._own[at + 1]
        same_first = same_second = True
        for line in self._peers:
            same_first &= line[at] == first
            same_second &= line[at + 1] == second
        return same_first, same_second

    def post(self) -> None:
        """Post this rank's arrival."""
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
