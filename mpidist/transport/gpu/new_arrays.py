"""New arrays of device memory for equal calls. Small ones share an allocation; a released list is reused."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from functools import cache
from math import prod
from operator import attrgetter
from sys import getrefcount
from threading import get_ident
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.transport import cuda
from mpidist.transport.host_memory.result_memory import references_are_exact

__all__ = ["NewArrays"]

_ALIGNMENT: Final = 16  # bytes, the most that kernels copy at once
_SMALL: Final = 64 << 10  # bytes of an array
_SHARED: Final = 1 << 20  # bytes of an allocation, all of which a program keeps that keeps one array of it
_LEAST_KEPT: Final = 8  # arrays of a list: fewer are made as soon as they are looked at
_LISTS: Final = 2  # that are kept: a program still has the last results when it asks for the next ones
_SHARE_KEPT: Final = 128  # of a GPU's memory, one part is kept in a process, at most

_shape_of: Final = attrgetter("shape")
_pointer_of: Final = attrgetter("data")


@final
class NewArrays:
    """Makes the results of equal calls, of dtypes of at most 16 bytes.

    The list is made anew, or is that of an earlier call to whose arrays nothing refers any more. A weak reference to
    such an array is one to the array of the later call, too.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]]) -> None:
        self._shapes = list(shapes)
        self._sizes: list[int] = []  # bytes of each allocation
        self._forms: list[tuple[tuple[int, ...], np.dtype[Any], int, int]] = []  # the last two: allocation, and byte
        self._kept: deque[_Kept] = deque(maxlen=_LISTS)
        shared = None  # the last allocation of small arrays
        for shape, dtype in zip(shapes, dtypes, strict=True):
            nbytes = -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
            its = shared
            if its is None or nbytes > _SMALL or self._sizes[its] + nbytes > _SHARED:
                its = len(self._sizes)
                self._sizes.append(0)
                shared = shared if nbytes > _SMALL else its
            self._forms.append((shape, dtype, its, self._sizes[its]))
            self._sizes[its] += nbytes

    def take(self) -> list[Any]:
        """Return C-contiguous arrays on the current device, uninitialised.

        Their work comes after that of the current stream, as memory of CuPy's pool has it.
        """
        cupy = cuda.cupy()
        its = cupy.cuda
        # A thread may have a stream of its own by the number of its default stream.
        place = its.runtime.getDevice(), its.get_current_stream().ptr, its.get_allocator(), get_ident()
        for kept in self._kept:
            if kept.place == place and kept.is_let_go() and list(map(_shape_of, kept.arrays)) == self._shapes:
                return list(kept.arrays)  # not those whose shape a program has changed in place
        try:
            memory = list(map(its.alloc, self._sizes))
        except its.memory.OutOfMemoryError:
            for keeper in list(_KEEPERS.values()):
                keeper._kept.clear()
            memory = list(map(its.alloc, self._sizes))
        arrays = [cupy.ndarray(shape, dtype, memory[which] + at) for shape, dtype, which, at in self._forms]
        if len(arrays) >= _LEAST_KEPT:
            del memory
            self._keep(place, arrays)
        return list(arrays)

    def _keep(self, place: tuple[Any, ...], arrays: list[Any]) -> None:
        """Keep a list, unless it is long, and let those go that were made before it, until there is room for it."""
        most, kept = _most_kept(place[0]), _Kept.of(place, arrays)
        if sum(self._sizes) > most or kept is None:
            return
        self._kept.append(kept)
        _KEEPERS.pop(id(self), None)
        _KEEPERS[id(self)] = self  # as the last one
        keepers = list(_KEEPERS.values())
        nbytes = sum(len(keeper._kept) * sum(keeper._sizes) for keeper in keepers)
        for keeper in keepers:
            while nbytes > most and keeper._kept:
                keeper._kept.popleft()
                nbytes -= sum(keeper._sizes)


def _most_kept(device: int) -> int:
    """Return how many bytes are kept: of the GPU's memory, or of what CuPy's pool may take of it."""
    limit = int(cuda.cupy().get_default_memory_pool().get_limit())
    total = _total_memory(device)
    return (min(limit, total) if limit else total) // _SHARE_KEPT


@cache
def _total_memory(device: int) -> int:
    """Return the bytes of a GPU's memory. Asking takes long."""
    return int(cuda.cupy().cuda.Device(device).mem_info[1])


@final
class _Kept(NamedTuple):
    """Arrays that may serve again, on the device and stream, and with CuPy's allocator, that their memory is of."""

    place: tuple[Any, ...]
    arrays: list[Any]
    parts: list[Any]  # all that a program may refer to: arrays, CuPy's pointers, which outlive arrays, and memory
    num_references: int  # to these, where the program has none

    @classmethod
    def of(cls, place: tuple[Any, ...], arrays: list[Any]) -> _Kept | None:
        """Keep arrays of which the program has none yet; `None` if something, as another thread, refers to one now.

        Nothing is kept, either, where references cannot be counted.
        """
        parts = [*arrays, *map(_pointer_of, arrays)]
        if not references_are_exact() or set(map(getrefcount, parts)) != {_HELD_TWICE}:
            return None
        parts += {id(pointer.mem): pointer.mem for pointer in parts[len(arrays) :]}.values()
        return cls(place, arrays, parts, sum(map(getrefcount, parts)))

    def is_let_go(self) -> bool:
        """Whether the program has none, nor views of some, which refer to them, nor has another library."""
        return sum(map(getrefcount, self.parts)) == self.num_references


def _count_held_twice() -> int:
    """Count the references to what two objects hold, as `map` counts them."""
    one = [object()]
    two = [*one]
    return max(map(getrefcount, two))


_HELD_TWICE: Final = _count_held_twice()

# What keeps lists, by its `id`: what made a list last comes last.
_KEEPERS: Final[weakref.WeakValueDictionary[int, NewArrays]] = weakref.WeakValueDictionary()
