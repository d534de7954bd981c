"""Arrays in memory that all ranks of a node reach."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.transport.arrays import memory_bounds
from mpidist.transport.communicator import Array, Communicator
from mpidist.transport.mpi import Intracomm
from mpidist.transport.shared_memory.window import LINE_BYTES, SharedWindow

__all__ = ["Place", "Run", "SharedArrays", "places_digest"]

_MASK: Final = (1 << 62) - 1


@final
@dataclass(frozen=True)
class Place:
    """Where an array lies in memory that all ranks of the node reach.

    Attributes:
        window: The number of the window, the same on all ranks.
        offset: Its first byte in a rank's part of the window.
        per_node: Whether there is one array for all ranks of the node.
        arrays: [ranks], each rank's array of this place, flat; only one where `per_node`.
    """

    window: int
    offset: int
    per_node: bool
    arrays: tuple[Array, ...]


@final
class Run(NamedTuple):
    """Elements that lie one after the other, both where they are read and where they are written.

    Attributes:
        sources: [ranks], what each rank contributes, flat.
        targets: [places], where the results go.
    """

    sources: tuple[Array, ...]
    targets: tuple[Array, ...]


@final
class _Window:
    """Where the arrays of one window lie. Does not keep its memory, which is there as long as one of them.

    Args:
        window: The window.
        per_node: Whether there is one array for all ranks of the node.
        next_offsets: Where an array ends -> where the next one begins.
        on_end: Called when its memory is given back.
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
        """View each rank's memory of a place, while an array lies in it; only one where `per_node`."""
        root = self._root()
        assert root is not None
        slices = self._slices[:1] if self.per_node else self._slices
        return tuple(root[part][offset : offset + nbytes].view(dtype) for part in slices)


@final
class SharedArrays:
    """The arrays that are shared within one node. A window's memory is given back when all its arrays are gone.

    Args:
        within_node: The ranks of the node.

    Attributes:
        num_windows: How many windows were made. The same on all ranks, which let go of arrays at other times.
    """

    def __init__(self, within_node: Communicator) -> None:
        self.within_node = within_node
        self.num_windows = 0
        self._windows: dict[int, _Window] = {}
        self._bases: dict[int, int] = {}  # id of the array that all views of a window come from -> the window
        self._places: dict[int, tuple[weakref.ref[Any], Place]] = {}

    @property
    def _comm(self) -> Intracomm | None:
        comm: Intracomm | None = getattr(self.within_node, "comm", None)  # a node of one rank has none
        return comm

    def empty(
        self, specs: Sequence[tuple[tuple[int, ...], np.dtype[Any]]], per_node: bool
    ) -> list[np.ndarray[Any, Any]]:
        """Allocate arrays in shared memory. Collective over the node.

        Args:
            specs: Shape and dtype of each, the same on every rank.
            per_node: One array for all ranks, instead of one for each.

        Returns:
            C-contiguous arrays, zero at first.

        Raises:
            UnavailableError: If there is too little shared memory, on every rank of the node.
        """
        offsets, end, next_offsets = [], 0, {}
        for shape, dtype in specs:
            nbytes = prod(shape) * dtype.itemsize
            offsets.append(end)
            next_offsets[end + nbytes] = end = end + -(-nbytes // LINE_BYTES) * LINE_BYTES
        window = SharedWindow(self._comm, end)
        part = window.parts[0 if per_node else self.within_node.rank]
        self._register(window, per_node, next_offsets)
        return [
            part[offset : offset + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            for offset, (shape, dtype) in zip(offsets, specs, strict=True)
        ]

    def _register(self, window: SharedWindow, per_node: bool, next_offsets: dict[int, int]) -> None:
        number, key = self.num_windows, id(_root(window.parts[0]))
        windows, bases = self._windows, self._bases

        def forget() -> None:
            windows.pop(number, None)
            bases.pop(key, None)

        windows[number] = _Window(window, per_node, next_offsets, forget)
        bases[key] = number
        self.num_windows += 1

    def place(self, array: Any) -> Place | None:
        """Say where an array lies; `None` if not in shared memory, or if it is not contiguous and of native order."""
        if not self._windows or type(array) is not np.ndarray:
            return None
        known = self._places.get(id(array))
        if known is not None and known[1].arrays[0].dtype == array.dtype and known[0]() is array:
            return known[1]
        number = self._bases.get(id(_root(array)))
        if number is None or not array.flags.c_contiguous or not array.dtype.isnative:
            return None
        found = self._find(array, number)
        if found is not None:
            key, places = id(array), self._places
            places[key] = weakref.ref(array, lambda _: places.pop(key, None)), found  # a place holds the memory
        return found

    def places(self, arrays: Sequence[Any]) -> list[Place] | None:
        """Say where arrays lie, if they all lie in shared memory, one for each rank or one for all."""
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
        """Join arrays that were allocated one after the other: many small ones are added as one large one.

        What lies between them, to begin each at whole cache lines, is added with them, and nobody sees it.

        Args:
            sources: Where the values lie.
            outs: Where the results go.
            dtype: Of all of them.
        """
        runs: list[tuple[Place, Place, int]] = []
        for source, out in sorted(zip(sources, outs, strict=True), key=lambda both: (both[0].window, both[0].offset)):
            nbytes = source.arrays[0].nbytes
            if runs:
                first, into, length = runs[-1]
                step = source.offset - first.offset
                both_follow = self._is_next(first, length, source) and self._is_next(into, length, out)
                if both_follow and out.offset - into.offset == step:  # a part of an array may begin anywhere
                    runs[-1] = first, into, step + nbytes
                    continue
            runs.append((source, out, nbytes))
        return [
            Run(self._arrays(source, length, dtype), self._arrays(out, length, dtype)) for source, out, length in runs
        ]

    def is_per_node(self, array: Any) -> bool:
        """Whether an array lies in memory that is one for all ranks of the node, however it was made."""
        if not self._windows or not isinstance(array, np.ndarray):
            return False
        start, stop = memory_bounds(array)
        parts = (window.bounds[0] for window in list(self._windows.values()) if window.per_node)
        return any(start < its_stop and its_start < stop for its_start, its_stop in parts)

    def write(self, out: Any, result: Any) -> None:
        """Let the node's first rank write an array that is one for all: `change`."""
        self.change(lambda: out.__setitem__(..., result))

    def change(self, change: Callable[[], None]) -> None:
        """Let the node's first rank change arrays that are one for all. Collective over the node.

        Returns when the numbers are there for this rank to read.
        """
        if self.within_node.rank == 0:
            change()
        self.within_node.broadcast(np.zeros(1, np.uint8), 0)  # sent after the numbers were written

    def free(self) -> None:
        """Forget the arrays. Their memory is there as long as they are."""
        self._windows.clear()
        self._bases.clear()
        self._places.clear()

    def _find(self, array: np.ndarray[Any, Any], number: int) -> Place | None:
        window = self._windows[number]
        low, high = window.bounds[0 if window.per_node else self.within_node.rank]
        address = array.__array_interface__["data"][0]
        if address < low or address + array.nbytes > high:
            return None
        arrays = window.views(address - low, array.nbytes, array.dtype)
        return Place(number, address - low, window.per_node, arrays)

    def _is_next(self, first: Place, nbytes: int, place: Place) -> bool:
        """Whether a place is that of the array which was allocated after those that end `nbytes` from a place on."""
        if first.window != place.window:
            return False
        return self._windows[first.window].next_offsets.get(first.offset + nbytes) == place.offset

    def _arrays(self, place: Place, nbytes: int, dtype: np.dtype[Any]) -> tuple[Array, ...]:
        return self._windows[place.window].views(place.offset, nbytes, dtype)


def places_digest(places: Sequence[Place] | None) -> int:
    """Return a number that is the same on all ranks if the places are; 0 for none."""
    if places is None:
        return 0
    return hash(tuple((place.window, place.offset) for place in places)) & _MASK | 1


def _root(array: np.ndarray[Any, Any]) -> Any:
    return array if array.base is None or not isinstance(array.base, np.ndarray) else array.base
