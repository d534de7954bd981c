"""Memory of results that the program has let go, for the results to come.

The system gives a program new pages one by one, full of zeros, when they are first written. That takes longer than to
reduce what they then hold. So the results of a call lie where results of an earlier call like it lay, once the program
has let go of those, and of all views of them. That begins with the second call, as many calls are made once.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from math import prod
from typing import Any, Final, final

import numpy as np

from mpidist.transport import arrays

__all__ = ["RecycledResults", "ResultMemory"]

_LEAST_LIST_BYTES: Final = 128 << 10  # what a program lets go in fewer bytes, the C library keeps by itself
_LEAST_ARRAY_BYTES: Final = 16 << 10  # a program may keep a small result of each step, such as a loss
_ALIGNMENT: Final = 64  # bytes; JAX takes no other memory without a copy
_MAX_LISTS: Final = 4  # of equal calls; a program that keeps more than three results keeps all of them
_MAX_AGE: Final = 1024  # lists that were taken since
_MAX_ALIKE: Final = 256  # shapes of calls without a plan

Array = np.ndarray[Any, Any]


@final
class _Blocks:
    """The memory of one list of results.

    Args:
        shapes: The shapes of the results.
        dtypes: Their dtypes.

    Attributes:
        nbytes: Bytes of all of them.
        taken_at: When results last lay here, counted in lists.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]]) -> None:
        self._owners: list[Array] = []  # each is the `base` of all results, and of their views, that lie in its memory
        self._arrays: list[Array] = []
        for shape, dtype in zip(shapes, dtypes, strict=True):
            nbytes = prod(shape) * dtype.itemsize
            owner = np.empty(nbytes + _ALIGNMENT, np.uint8)
            start = -owner.ctypes.data % _ALIGNMENT
            self._owners.append(owner)
            self._arrays.append(owner[start : start + nbytes].view(dtype).reshape(shape))
        self.nbytes = sum(owner.nbytes for owner in self._owners)
        self.taken_at = 0

    def take(self) -> list[Array] | None:
        """Return arrays in this memory; `None` if the program still has one that lies there."""
        if next(map(sys.getrefcount, self._owners)) != _UNUSED:
            return None
        results = [array.view() for array in self._arrays]
        # Looked at after the views are made: of two threads at once, neither takes what both would have.
        return results if max(map(sys.getrefcount, self._owners)) == _UNUSED + 1 else None

    @classmethod
    def references(cls) -> int:
        """Return how many references `sys.getrefcount` counts of memory in which no result lies."""
        blocks = cls([(1,)], [np.dtype(np.uint8)])
        return max(map(sys.getrefcount, blocks._owners))


_UNUSED: Final = _Blocks.references()


@final
class ResultMemory:
    """The memory of the results of one group of ranks. Local.

    Args:
        limit: The most bytes that are kept, whether results lie there or not; 0 keeps nothing.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._nbytes = limit, 0
        self._clock = count(1)
        self._kept: OrderedDict[_Blocks, RecycledResults] = OrderedDict()  # the one that was taken last comes last
        self._alike: dict[tuple[Any, ...], RecycledResults] = {}

    @classmethod
    def of_rank(cls, limit: int | None, num_local_ranks: int) -> ResultMemory:
        """Make the memory of a rank; `limit` `None` is a quarter of the rank's part of the node's memory."""
        of_node = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(of_node // (4 * num_local_ranks) if limit is None else limit)

    def results(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]]) -> RecycledResults:
        """Return the results of calls that have results of these shapes and dtypes."""
        return RecycledResults(self, shapes, dtypes)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: bool) -> Any:
        """Return a C-contiguous array, uninitialised, in host memory or on the current device."""
        if device:
            return arrays.empty(shape, dtype, device)
        if prod(shape) * dtype.itemsize < _LEAST_LIST_BYTES:
            return np.empty(shape, dtype)
        alike = self._alike.get((shape, dtype))
        if alike is None:
            if len(self._alike) >= _MAX_ALIKE:
                self._alike.clear()
            alike = self._alike[shape, dtype] = self.results([shape], [dtype])
        return alike.take()[0]

    def clear(self) -> None:
        """Give the memory back: at once, or when the program lets go what lies there."""
        for blocks in list(self._kept):
            self.drop(blocks)

    @property
    def nbytes(self) -> int:
        """How many bytes are kept."""
        return self._nbytes

    def has_taken(self, blocks: _Blocks) -> None:
        """Note that results lie in `blocks` from now on."""
        now = blocks.taken_at = next(self._clock)
        self._kept.move_to_end(blocks)
        oldest = next(iter(self._kept))
        if oldest.taken_at < now - _MAX_AGE:
            self.drop(oldest)

    def keep(self, blocks: _Blocks, results: RecycledResults) -> None:
        """Keep memory for later results, instead of what was not used for the longest time where there is too much."""
        if blocks.nbytes > self._limit:
            return
        while self._nbytes + blocks.nbytes > self._limit:
            self.drop(next(iter(self._kept)))
        self._kept[blocks] = results
        self._nbytes += blocks.nbytes
        results.kept.append(blocks)

    def drop(self, blocks: _Blocks) -> None:
        """Keep memory no longer."""
        results = self._kept.pop(blocks)
        self._nbytes -= blocks.nbytes
        results.kept.remove(blocks)
        if not results.kept:
            self._alike.pop(results.key, None)


@final
class RecycledResults:
    """The results of calls alike, list by list. `ResultMemory.results` makes it.

    Attributes:
        kept: The memory of lists; the one that was taken last comes last.
        key: The shape and the dtype of a list of one.
    """

    def __init__(
        self, memory: ResultMemory, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]]
    ) -> None:
        self._memory, self._shapes, self._dtypes = memory, shapes, dtypes
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        is_large = sum(sizes) >= _LEAST_LIST_BYTES
        self._large = [at for at, size in enumerate(sizes) if is_large and size >= _LEAST_ARRAY_BYTES]
        self._small = [at for at in range(len(sizes)) if at not in set(self._large)]
        self._is_repeated = False
        self.kept: list[_Blocks] = []
        self.key = shapes[0] if shapes else None, dtypes[0] if dtypes else None

    @property
    def is_kept(self) -> bool:
        """Whether memory of these results is kept at all: that of small ones is not."""
        return bool(self._large)

    def take(self) -> list[Array]:
        """Return C-contiguous arrays, uninitialised, which no array that the program has overlaps."""
        if not (self._large and self._is_repeated):  # a call that is made once leaves nothing behind
            self._is_repeated = True
            return [np.empty(shape, dtype) for shape, dtype in zip(self._shapes, self._dtypes, strict=True)]
        large = self._take_large()
        if not self._small:
            return large
        results: list[Any] = [None] * len(self._shapes)
        for at, result in zip(self._large, large, strict=True):
            results[at] = result
        for at in self._small:
            results[at] = np.empty(self._shapes[at], self._dtypes[at])
        return results

    def _take_large(self) -> list[Array]:
        for blocks in reversed(self.kept):  # the last one is the likeliest to be in the cache
            results = blocks.take()
            if results is not None:
                self.kept.remove(blocks)
                self.kept.append(blocks)
                self._memory.has_taken(blocks)
                return results
        blocks = _Blocks([self._shapes[at] for at in self._large], [self._dtypes[at] for at in self._large])
        if len(self.kept) == _MAX_LISTS:
            self._memory.drop(self.kept[0])
        self._memory.keep(blocks, self)
        results = blocks.take()
        assert results is not None
        return results
