"""New arrays of device memory for equal calls. Small ones share an allocation, which takes half the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, final

import numpy as np

from mpidist.transport import cuda

__all__ = ["NewArrays"]

_ALIGNMENT: Final = 64  # bytes
_SMALL: Final = 64 << 10  # bytes of an array
_SHARED: Final = 1 << 20  # bytes of an allocation, all of which a program keeps that keeps one array of it

Array = Any


@final
@dataclass
class _Block:
    """Arrays of one dtype that share an allocation.

    Attributes:
        dtype: As above.
        size: Number of elements.
        bounds: Where the allocation is cut.
        places: For each array its piece of the allocation, its place in the list, and its shape; `None` for a flat one.
    """

    dtype: np.dtype[Any]
    size: int = 0
    bounds: list[int] = field(default_factory=list)
    places: list[tuple[int, int, tuple[int, ...] | None]] = field(default_factory=list)

    def add(self, at: int, shape: tuple[int, ...]) -> None:
        """Append an array, the one at `at` of the list."""
        self.places.append((len(self.bounds), at, None if len(shape) == 1 else shape))
        self.bounds.append(self.size + prod(shape))
        step = _ALIGNMENT // self.dtype.itemsize
        self.size += -(-prod(shape) // step) * step
        if self.bounds[-1] < self.size:  # what lies between two arrays is a piece, too
            self.bounds.append(self.size)


@final
class NewArrays:
    """Makes the results of equal calls.

    Args:
        shapes: The shapes of the arrays.
        dtypes: Their dtypes, of at most 16 bytes.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]]) -> None:
        self._num_arrays = len(shapes)
        self._blocks: list[_Block] = []
        self._alone: list[tuple[int, tuple[int, ...], np.dtype[Any]]] = []
        open_blocks: dict[np.dtype[Any], _Block] = {}
        for at, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            nbytes = prod(shape) * dtype.itemsize
            if not 0 < nbytes <= _SMALL:
                self._alone.append((at, shape, dtype))
                continue
            block = open_blocks.get(dtype)
            if block is None or block.size * dtype.itemsize + nbytes > _SHARED:
                block = open_blocks[dtype] = _Block(dtype)
                self._blocks.append(block)
            block.add(at, shape)

    def take(self) -> list[Array]:
        """Return C-contiguous arrays on the current device, uninitialised."""
        cupy = cuda.current().cupy
        arrays: list[Array] = [None] * self._num_arrays
        for block in self._blocks:
            pieces = cupy.split(cupy.empty(block.size, block.dtype), block.bounds)
            for piece, at, shape in block.places:
                arrays[at] = pieces[piece] if shape is None else pieces[piece].reshape(shape)
        for at, whole, dtype in self._alone:
            arrays[at] = cupy.empty(whole, dtype)
        return arrays
