"""New arrays of device memory for equal calls. Small ones share an allocation, and serve again when they are let go."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from math import prod
from operator import attrgetter
from sys import getrefcount
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.transport import cuda

__all__ = ["NewArrays"]

_ALIGNMENT: Final = 16  # bytes, the most that kernels copy at once
_SMALL: Final = 64 << 10  # bytes of an array
_SHARED: Final = 1 << 20  # bytes of an allocation, all of which a program keeps that keeps one array of it
_LEAST_KEPT: Final = 8  # arrays of an allocation: fewer are made as soon as they are looked at
_SETS: Final = 2  # of arrays that are kept: a program still has the last results when it asks for the next ones
_MOST_KEPT: Final = 16 << 20  # bytes that are kept in a process: those that were made first go first

_shape_of: Final = attrgetter("shape")
_pointer_of: Final = attrgetter("data")

_Form = tuple[tuple[int, ...], np.dtype[Any], int]  # shape, dtype, and where an array begins, in bytes


@final
class NewArrays:
    """Makes the results of equal calls, of dtypes of at most 16 bytes."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]]) -> None:
        sizes: list[int] = []  # bytes of each allocation
        forms: list[list[_Form]] = []  # of the arrays in each allocation
        self._places: list[tuple[int, int]] = []  # of each array, its allocation, and its number there
        shared = None  # the last allocation of small arrays
        for shape, dtype in zip(shapes, dtypes, strict=True):
            nbytes = -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
            its = shared
            if its is None or nbytes > _SMALL or sizes[its] + nbytes > _SHARED:
                its = len(sizes)
                sizes.append(0)
                forms.append([])
                shared = shared if nbytes > _SMALL else its
            self._places.append((its, len(forms[its])))
            forms[its].append((shape, dtype, sizes[its]))
            sizes[its] += nbytes
        self._allocations = [_Allocation(*its) for its in zip(sizes, forms, strict=True)]

    def take(self) -> list[Any]:
        """Return C-contiguous arrays on the current device, uninitialised."""
        made = [allocation.take() for allocation in self._allocations]
        return [made[its][number] for its, number in self._places]


@final
class _Allocation:
    """The arrays of one allocation: made anew, or those of an earlier call that nothing refers to any more.

    A weak reference to such an array is one to the array of a later call, too.
    """

    def __init__(self, nbytes: int, forms: Sequence[_Form]) -> None:
        self._nbytes, self._forms = nbytes, forms
        self._shapes = [shape for shape, _, _ in forms]
        self._kept: deque[_Kept] = deque(maxlen=_SETS)

    def take(self) -> list[Any]:
        """Return the arrays. Their work comes after that of the current stream, as memory of CuPy's pool has it."""
        if len(self._forms) < _LEAST_KEPT:
            return self._make()
        its = cuda.cupy().cuda
        place = int(its.get_current_stream().ptr), its.get_allocator()
        for kept in self._kept:
            if kept.place == place and kept.references == kept.references_now() and kept.shapes() == self._shapes:
                return list(kept.arrays)
        arrays = self._make()
        pointers = list(map(_pointer_of, arrays))
        first = _Kept(place, arrays, pointers, pointers[0].mem, ())
        self._kept.append(first._replace(references=first.references_now()))
        _KEEPING.append((weakref.ref(self), self._nbytes))
        while sum(nbytes for _, nbytes in _KEEPING) > _MOST_KEPT:
            oldest, _ = _KEEPING.popleft()
            if (allocation := oldest()) is not None and allocation._kept:
                allocation._kept.popleft()
        return list(arrays)

    def _make(self) -> list[Any]:
        cupy = cuda.cupy()
        memory = cupy.cuda.alloc(self._nbytes)
        return [cupy.ndarray(shape, dtype, memory + at) for shape, dtype, at in self._forms]


@final
class _Kept(NamedTuple):
    """Arrays that may serve again, on the stream and with the allocator of CuPy that their memory is of."""

    place: tuple[int, Any]
    arrays: list[Any]
    pointers: list[Any]  # CuPy's, which a program may keep without the array
    memory: Any
    references: tuple[int, ...]  # to these, where the program has none

    def references_now(self) -> tuple[int, ...]:
        """Count the references to arrays, of which views and other libraries hold some, to pointers and memory."""
        most = (max(map(getrefcount, self.arrays)), max(map(getrefcount, self.pointers)))
        return (*most, getrefcount(self.memory))

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes, which a program may have changed in place."""
        return list(map(_shape_of, self.arrays))


_KEEPING: Final[deque[tuple[weakref.ref[_Allocation], int]]] = deque()  # allocations, each time that they keep a set
