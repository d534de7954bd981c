"""Pool of result memory, reused once the program holds no reference to a result.

The system gives a program new pages one by one, full of zeros, when they are first written. That takes longer than to
reduce what they then hold. So the results of a call lie where results of an earlier call like it lay, once the program
has let go of those, and of all views of them. That begins with the second call, as many calls are made once.

Where the ranks of a node can write each other's results, that memory is shared memory: blocks of an arena.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate, count
from math import prod
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.transport import arrays
from mpidist.transport.node_memory.arena import SharedArena
from mpidist.transport.node_memory.result_block import ResultBlock

__all__ = [
    "LentArrays",
    "RecycledResults",
    "ResultMemory",
    "SumMemory",
    "most_result_bytes",
    "node_bytes",
    "references_are_exact",
]

_LEAST_LIST_BYTES: Final = 128 << 10  # what a program lets go in fewer bytes, the C library keeps by itself
_LEAST_ARRAY_BYTES: Final = 16 << 10  # a program may keep a small result of each step, such as a loss
_ALIGNMENT: Final = 64  # bytes; JAX takes no other memory without a copy
_MAX_LISTS: Final = 4  # of equal calls; a program that keeps more than three results keeps all of them
_MAX_AGE: Final = 1024  # lists that were taken since
_MOST_IN_VAIN: Final = 8  # calls in a row, each of which all ranks had to stage twice
_MAX_ALIKE: Final = 256  # shapes of calls without a plan

Array = np.ndarray[Any, Any]


@cache
def node_bytes() -> int:
    """Return the memory of this rank's node in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def most_result_bytes(num_local_ranks: int) -> int:
    """Return how many bytes of results a rank keeps by default: a quarter of its part of the node's memory."""
    return node_bytes() // (4 * num_local_ranks)


def references_are_exact() -> bool:
    """Whether `sys.getrefcount` counts all references: without a GIL, other threads may hold some that it misses."""
    has_gil: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
    return has_gil


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@final
class _Blocks:
    """The memory of one list of results.

    Attributes:
        nbytes: Bytes of all of them.
        taken_at: When results last lay here, counted in lists.
        place: `ResultBlock.place`; 0 in other memory.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]], block: ResultBlock | None = None
    ) -> None:
        self._owners: list[Array] = []  # each is the `base` of all results, and of their views, that lie in its memory
        self._arrays: list[Array] = []
        self.place = 0 if block is None else block.place
        begin = 0
        for shape, dtype in zip(shapes, dtypes, strict=True):
            nbytes = prod(shape) * dtype.itemsize
            owner = np.empty(nbytes + _ALIGNMENT, np.uint8) if block is None else block.array(begin, nbytes)
            start = -owner.ctypes.data % _ALIGNMENT
            begin += _aligned(nbytes)
            self._owners.append(owner)
            self._arrays.append(owner[start : start + nbytes].view(dtype).reshape(shape))
        self.nbytes = sum(owner.nbytes for owner in self._owners)
        self.taken_at = 0
        if block is not None:
            block.is_used = partial(_is_used, weakref.ref(self))

    @property
    def is_used(self) -> bool:
        """Whether the program has an array that lies here."""
        return max(map(sys.getrefcount, self._owners)) != _UNUSED

    def take(self) -> list[Array] | None:
        """Return arrays in this memory; `None` if the program still has one that lies there."""
        if next(map(sys.getrefcount, self._owners)) != _UNUSED:  # the first tells in most cases
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


def _is_used(blocks: weakref.ref[_Blocks]) -> bool:
    kept = blocks()
    return kept is None or kept.is_used  # of blocks that are not kept, the program has an array


@final
class SumMemory:
    """Host memory for the sums of one call at a time. It is kept, as new pages of the system take as long as to add.

    `limit`: the most bytes that are kept, until `clear`.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.clear()

    def clear(self) -> None:
        """Give the memory back, once no call uses it."""
        self._kept = np.empty(0, np.uint8)
        self._forms: list[tuple[tuple[int, ...], np.dtype[Any]]] = []
        self._taken: list[Any] = []  # of these forms

    def take(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]]) -> list[Any]:
        """Return arrays of these shapes and dtypes, uninitialised, until the next call overwrites them.

        The next call of the same shapes and dtypes gets the same objects, so that a reduction in place is a known one.
        """
        forms = list(zip(shapes, dtypes, strict=True))
        if forms != self._forms:
            sizes = [prod(shape) * dtype.itemsize for shape, dtype in forms]
            starts = list(accumulate(map(_aligned, sizes), initial=0))
            if starts[-1] > self._limit:
                return list(map(np.empty, shapes, dtypes))
            if self._kept.size < starts[-1]:
                self._kept = np.empty(starts[-1], np.uint8)
            places = zip(starts, sizes, forms, strict=False)
            self._taken = [self._kept[at : at + size].view(dtype).reshape(shape) for at, size, (shape, dtype) in places]
            self._forms = forms
        return list(self._taken)


@final
class ResultMemory:
    """The memory of the results of one group of ranks: at most `limit` bytes, used or not; 0 keeps nothing. Local.

    Nothing is kept, either, where references cannot be counted.

    `sums` and `products` are of one call at a time: of this rank's replicas; of values with weights.
    """

    def __init__(self, limit: int) -> None:
        self.sums, self.products = SumMemory(limit), SumMemory(limit)
        self._limit, self.nbytes = limit if references_are_exact() else 0, 0  # `nbytes`: of all that is kept
        self._clock = count(1)
        self._kept: OrderedDict[_Blocks, RecycledResults] = OrderedDict()  # the one that was taken last comes last
        self._alike: dict[tuple[Any, ...], RecycledResults] = {}

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
            alike = self._alike[shape, dtype] = RecycledResults(self, [shape], [dtype])
        return alike.take()[0]

    def clear(self) -> None:
        """Give the memory back: at once, or when the program releases the arrays in it."""
        for blocks in list(self._kept):
            self.drop(blocks)
        self.sums.clear()
        self.products.clear()

    def has_taken(self, blocks: _Blocks) -> None:
        """Note that results lie in `blocks` from now on."""
        now = blocks.taken_at = next(self._clock)
        self._kept.move_to_end(blocks)
        oldest = next(iter(self._kept))
        if oldest.taken_at < now - _MAX_AGE:
            self.drop(oldest)

    def has_room(self, nbytes: int) -> bool:
        """Whether as many bytes are kept at all."""
        return nbytes <= self._limit

    def keep(self, blocks: _Blocks, results: RecycledResults) -> None:
        """Keep memory for later results; drop the least recently used where there is too much."""
        if not self.has_room(blocks.nbytes):
            return
        while self.nbytes + blocks.nbytes > self._limit:
            self.drop(next(iter(self._kept)))
        self._kept[blocks] = results
        self.nbytes += blocks.nbytes
        results.kept.append(blocks)

    def drop(self, blocks: _Blocks) -> None:
        """Keep memory no longer."""
        results = self._kept.pop(blocks)
        self.nbytes -= blocks.nbytes
        results.kept.remove(blocks)
        if not results.kept:
            self._alike.pop(results.key, None)


@final
class LentArrays(NamedTuple):
    """Arrays to which the results of one call are written.

    Attributes:
        arrays: [results], C-contiguous, uninitialised.
        place: Where they lie in this rank's part of the shared memory of results; 0 in other memory.
        is_kept: Whether the memory of small ones, too, is kept for later results, so that `finalize` has to copy them.
    """

    arrays: list[Any]
    place: int = 0
    is_kept: bool = False


@final
class RecycledResults:
    """The results of calls that have results of the same shapes and dtypes, list by list, in an arena if it has room.

    Attributes:
        kept: The memory of lists; the one that was taken last comes last.
        key: The shape and the dtype of a list of one.
    """

    def __init__(
        self,
        memory: ResultMemory,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[np.dtype[Any]],
        arena: SharedArena | None = None,
    ) -> None:
        self._memory, self._shapes, self._dtypes, self._arena = memory, shapes, dtypes, arena
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        is_large = sum(sizes) >= _LEAST_LIST_BYTES
        self._large = [at for at, size in enumerate(sizes) if is_large and size >= _LEAST_ARRAY_BYTES]
        self._small = [at for at in range(len(sizes)) if at not in set(self._large)]
        self._is_repeated = False
        self._num_in_vain = 0
        self.kept: list[_Blocks] = []
        self.key = shapes[0] if shapes else None, dtypes[0] if dtypes else None

    @property
    def is_kept(self) -> bool:
        """Whether memory of these results is kept at all: that of small ones is not."""
        return bool(self._large)

    def take(self) -> list[Array]:
        """Return C-contiguous arrays, uninitialised, which no array that the program has overlaps."""
        return self.finalize(self.lend())

    def lend(self) -> LentArrays:
        """Lend the arrays to which results are written; `finalize` makes those of them that the program gets."""
        if not (self._large and self._is_repeated):  # a call that is made once leaves nothing behind
            self._is_repeated = True
            return LentArrays([np.empty(shape, dtype) for shape, dtype in zip(self._shapes, self._dtypes, strict=True)])
        if self._arena is not None:
            return self._take_kept(range(len(self._shapes)), self._arena)
        large = self._take_kept(self._large, None).arrays
        if not self._small:
            return LentArrays(large)
        results: list[Any] = [None] * len(self._shapes)
        for at, result in zip(self._large, large, strict=True):
            results[at] = result
        for at in self._small:
            results[at] = np.empty(self._shapes[at], self._dtypes[at])
        return LentArrays(results)

    def finalize(self, lent: LentArrays) -> list[Array]:
        """Return the arrays for the program, with the results of those that were lent.

        Small ones get memory of their own: a program may keep them, and the memory of a whole list with them.
        """
        if lent.is_kept:
            for at in self._small:
                lent.arrays[at] = lent.arrays[at].copy()
        return lent.arrays

    def note_use(self, was_in_vain: bool) -> None:
        """Note whether shared memory was in vain in a call, as other ranks had none; after many, leave the arena."""
        self._num_in_vain = self._num_in_vain + 1 if was_in_vain else 0
        if self._num_in_vain >= _MOST_IN_VAIN and self._arena is not None:
            self._arena = None
            for blocks in list(self.kept):
                self._memory.drop(blocks)

    def _take_kept(self, which: Sequence[int], arena: SharedArena | None) -> LentArrays:
        for blocks in reversed(self.kept):  # the last one is the likeliest to be in the cache
            results = blocks.take()
            if results is not None:
                self.kept.remove(blocks)
                self.kept.append(blocks)
                self._memory.has_taken(blocks)
                return LentArrays(results, blocks.place, arena is not None)
        shapes, dtypes = [self._shapes[at] for at in which], [self._dtypes[at] for at in which]
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        block = None
        is_full = len(self.kept) == _MAX_LISTS  # the program keeps its results: not all that is shared
        if arena is not None and not is_full and self._memory.has_room(sum(sizes)):
            block = ResultBlock.take(arena, sum(map(_aligned, sizes)))
        blocks = _Blocks(shapes, dtypes, block)
        if is_full:
            self._memory.drop(self.kept[0])
        self._memory.keep(blocks, self)
        results = blocks.take()
        assert results is not None
        return LentArrays(results, blocks.place, arena is not None)
