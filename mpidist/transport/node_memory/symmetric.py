"""Symmetric and per-node arrays: arrays in shared memory of a node, which a strategy allocates for users."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.errors import UnavailableError
from mpidist.transport.arrays import memory_bounds
from mpidist.transport.communicator import Array, Communicator
from mpidist.transport.mpi.library import Intracomm
from mpidist.transport.node_memory.result_block import is_result
from mpidist.transport.node_memory.window import LINE_BYTES, SharedWindow

__all__ = ["Place", "Run", "SharedArrays", "places_digest"]

_MASK: Final = (1 << 62) - 1


@final
@dataclass(frozen=True)
class Place:
    """The place of an array in shared memory of the node.

    Attributes:
        window: The number of the window, the same on all ranks.
        offset: The array's first byte in a rank's part of the window.
        per_node: Whether there is one array for all ranks of the node.
        arrays: [ranks], each rank's array at this place, flat; only one if `per_node`.
    """

    window: int
    offset: int
    per_node: bool
    arrays: tuple[Array, ...]


@final
class Run(NamedTuple):
    """Elements that are contiguous both in the sources [ranks] and in the targets, [ranks], or one for the node."""

    sources: tuple[Array, ...]
    targets: tuple[Array, ...]


@final
class _Window:
    """The layout of one window's arrays. Holds no reference to the memory: only the arrays keep it alive.

    Args:
        next_offsets: The end of each array -> the offset of the array that was allocated after it.
        on_end: Called when the last array is gone and the memory is given back.
    """

    def __init__(
        self, window: SharedWindow, per_node: bool, next_offsets: dict[int, int], on_end: Callable[[], None]
    ) -> None:
        root = _root(window.parts[0])
        start, _ = memory_bounds(root)
        self.per_node, self.next_offsets = per_node, next_offsets
        self.bounds = [memory_bounds(part) for part in window.parts]
        self._slices = [slice(low - start, high - start) for low, high in self.bounds]
        self._root = weakref.ref(root, lambda _: on_end())

    def views(self, offset: int, nbytes: int, dtype: np.dtype[Any]) -> tuple[Array, ...]:
        """View each rank's memory at an offset, while some array of the window exists; only one if `per_node`."""
        root = self._root()
        assert root is not None
        slices = self._slices[:1] if self.per_node else self._slices
        return tuple(root[part][offset : offset + nbytes].view(dtype) for part in slices)


@final
class SharedArrays:
    """The arrays in shared memory of a node. A window's memory is given back when all its arrays are gone.

    Attributes:
        within_node: The ranks of the node; replaced in a reset.
        num_windows: How many windows were allocated: equal on all ranks, unlike the number of windows that still exist.
    """

    def __init__(self, within_node: Communicator) -> None:
        self.within_node = within_node
        self.num_windows = 0
        self._windows: dict[int, _Window] = {}
        self._bases: dict[int, int] = {}  # id of the base of all views of a window -> the window's number
        self._places: dict[int, tuple[weakref.ref[Any], Place]] = {}

    @property
    def _comm(self) -> Intracomm | None:
        comm: Intracomm | None = getattr(self.within_node, "comm", None)  # a node of one rank has none
        return comm

    def empty(
        self, specs: Sequence[tuple[tuple[int, ...], np.dtype[Any]]], per_node: bool, call: str
    ) -> list[np.ndarray[Any, Any]]:
        """Allocate arrays in shared memory, C-contiguous zeros, one for each rank or node. Collective over the node."""
        offsets, end, next_offsets = [], 0, {}
        for shape, dtype in specs:
            nbytes = prod(shape) * dtype.itemsize
            offsets.append(end)
            next_offsets[end + nbytes] = end = end + -(-nbytes // LINE_BYTES) * LINE_BYTES
        number, self.num_windows = self.num_windows, self.num_windows + 1  # counted also where memory is too short
        try:
            window = SharedWindow(self._comm, end, is_common=per_node)
        except UnavailableError as error:
            raise UnavailableError(f"{call}: {error}") from error
        part = window.parts[0 if per_node else self.within_node.rank]
        self._register(number, window, per_node, next_offsets)
        return [
            part[offset : offset + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            for offset, (shape, dtype) in zip(offsets, specs, strict=True)
        ]

    def _register(self, number: int, window: SharedWindow, per_node: bool, next_offsets: dict[int, int]) -> None:
        key = id(_root(window.parts[0]))
        windows, bases = self._windows, self._bases

        def forget() -> None:
            windows.pop(number, None)
            bases.pop(key, None)

        windows[number] = _Window(window, per_node, next_offsets, forget)
        bases[key] = number

    def place(self, array: Any) -> Place | None:
        """Return where an array lies; `None` if it is not in shared memory, not contiguous, or not of native order."""
        if not self._windows or type(array) is not np.ndarray:
            return None
        known = self._places.get(id(array))
        if known is not None and known[1].arrays[0].dtype == array.dtype and known[0]() is array:
            return known[1]
        number = self._number_of(_root(array))
        if number is None or not array.flags.c_contiguous or not array.dtype.isnative:
            return None
        found = self._find(array, number)
        if found is not None:
            key, places = id(array), self._places
            # Kept until the array is gone, and no longer: the place refers to the memory.
            places[key] = weakref.ref(array, lambda _: places.pop(key, None)), found
        return found

    def places(self, arrays: Sequence[Any]) -> list[Place] | None:
        """Return where arrays lie; `None` unless all are symmetric arrays, or all are per-node arrays."""
        if not self._windows or not arrays:
            return None
        places: list[Place] = []
        for array in arrays:
            place = self.place(array)
            if place is None or place.per_node != (places or [place])[0].per_node:
                return None
            places.append(place)
        return places

    def runs(self, sources: Sequence[Place], outs: Sequence[Place], dtype: np.dtype[Any]) -> list[Run]:
        """Join arrays that were allocated one after the other, so that many small arrays are added as one large run.

        The padding between arrays, which aligns each to whole cache lines, is added with them; it is in no array.
        """
        runs: list[tuple[Place, Place, int]] = []
        for source, out in sorted(zip(sources, outs, strict=True), key=lambda both: (both[0].window, both[0].offset)):
            nbytes = source.arrays[0].nbytes
            if runs:
                first, into, length = runs[-1]
                step = source.offset - first.offset
                both_follow = self._is_next(first, length, source) and self._is_next(into, length, out)
                if both_follow and out.offset - into.offset == step:  # a view of a part may begin anywhere
                    runs[-1] = first, into, step + nbytes
                    continue
            runs.append((source, out, nbytes))
        return [
            Run(self._arrays(source, length, dtype), self._arrays(out, length, dtype)) for source, out, length in runs
        ]

    def is_private(self, array: Any) -> bool:
        """Whether an array surely is private, in host memory: one of NumPy's by a quick look."""
        root = _root(array)
        if not isinstance(root, np.ndarray) or id(root) in self._bases:
            return False
        if not self._windows or root.flags.owndata or is_result(root):
            return True
        # The memory of another library, such as that of a tensor, which may be that of a symmetric array.
        return not _overlaps(array, [part for window in list(self._windows.values()) for part in window.bounds])

    def is_per_node(self, array: Any) -> bool:
        """Whether an array is a per-node array, or a view of any kind of one."""
        root = _root(array)
        if not self._windows or not isinstance(root, np.ndarray) or root.flags.owndata or is_result(root):
            return False
        number = self._bases.get(id(root))
        if number is not None:
            return self._windows[number].per_node
        return _overlaps(array, [window.bounds[0] for window in list(self._windows.values()) if window.per_node])

    def write(self, out: Any, result: Any) -> None:
        """Write a result to a per-node array on the node's first rank. Collective over the node: see `change`."""
        self.change(lambda: out.__setitem__(..., result))

    def change(self, change: Callable[[], None]) -> None:
        """Change per-node arrays on the node's first rank, and wait for the change. Collective over the node."""
        if self.within_node.rank == 0:
            change()
        self.within_node.broadcast(np.zeros(1, np.uint8), 0)  # completes after the change on every rank

    def free(self) -> None:
        """Forget the arrays, which keep their memory until they are gone."""
        self._windows.clear()
        self._bases.clear()
        self._places.clear()

    def _number_of(self, root: np.ndarray[Any, Any]) -> int | None:
        """Return the number of the window in which `root`, which is no view, lies; `None` for none."""
        number = self._bases.get(id(root))
        if number is not None or root.flags.owndata:
            return number
        # An array of another library, such as a tensor that shares memory with a symmetric array: compare addresses.
        start, stop = memory_bounds(root)
        for number, window in list(self._windows.items()):
            low, high = window.bounds[0 if window.per_node else self.within_node.rank]
            if low <= start and stop <= high:
                return number
        return None

    def _find(self, array: np.ndarray[Any, Any], number: int) -> Place | None:
        window = self._windows[number]
        low, high = window.bounds[0 if window.per_node else self.within_node.rank]
        address = array.__array_interface__["data"][0]
        if address < low or address + array.nbytes > high:
            return None
        arrays = window.views(address - low, array.nbytes, array.dtype)
        return Place(number, address - low, window.per_node, arrays)

    def _is_next(self, first: Place, nbytes: int, place: Place) -> bool:
        """Whether `place` starts where the allocation after `first` (its first `nbytes` bytes) starts."""
        if first.window != place.window:
            return False
        return self._windows[first.window].next_offsets.get(first.offset + nbytes) == place.offset

    def _arrays(self, place: Place, nbytes: int, dtype: np.dtype[Any]) -> tuple[Array, ...]:
        return self._windows[place.window].views(place.offset, nbytes, dtype)


def places_digest(places: Sequence[Place] | None) -> int:
    """Return a digest of places that is equal on all ranks if the places are; 0 for `None`."""
    if places is None:
        return 0
    return hash(tuple((place.window, place.offset) for place in places)) & _MASK | 1


def _overlaps(array: Array, bounds: Sequence[tuple[int, int]]) -> bool:
    start, stop = memory_bounds(array)
    return any(start < high and low < stop for low, high in bounds)


def _root(array: np.ndarray[Any, Any]) -> Any:
    return array if array.base is None or not isinstance(array.base, np.ndarray) else array.base
