"""New arrays of device memory for equal calls. Small ones share an allocation, which takes half the time."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.transport import cuda

__all__ = ["NewArrays"]

_ALIGNMENT: Final = 64  # bytes
_SMALL: Final = 64 << 10  # bytes of an array
_SHARED: Final = 1 << 20  # bytes of an allocation, all of which a program keeps that keeps one array of it


@final
class _Block(NamedTuple):
    """An allocation that arrays share: where it is cut, and the place in the list, piece and shape of each array."""

    dtype: np.dtype[Any]
    bounds: list[int]
    places: list[tuple[int, int, tuple[int, ...]]]


@final
class NewArrays:
    """Makes the results of equal calls.

    Args:
        shapes: The shapes of the arrays.
        dtypes: Their dtypes, of at most 16 bytes.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]]) -> None:
        self._forms = list(zip(shapes, dtypes, strict=True))
        self._blocks: list[_Block] = []
        last: dict[np.dtype[Any], _Block] = {}
        for at, (shape, dtype) in enumerate(self._forms):
            count, width = prod(shape), dtype.itemsize
            if not 0 < count * width <= _SMALL:
                continue
            block = last.get(dtype)
            if block is None or (block.bounds[-1] + count) * width > _SHARED:
                block = last[dtype] = _Block(dtype, [0], [])
                self._blocks.append(block)
            block.places.append((at, len(block.bounds), shape))
            end = block.bounds[-1] + count
            pad = -end % (_ALIGNMENT // width)
            block.bounds.extend([end, end + pad] if pad else [end])
        shared = {at for block in self._blocks for at, _, _ in block.places}
        self._alone = [at for at in range(len(self._forms)) if at not in shared]

    def take(self) -> list[Any]:
        """Return C-contiguous arrays on the current device, uninitialised."""
        cupy = cuda.current().cupy
        arrays: list[Any] = [None] * len(self._forms)
        for dtype, bounds, places in self._blocks:
            pieces = cupy.split(cupy.empty(bounds[-1], dtype), bounds)
            for at, piece, shape in places:
                arrays[at] = pieces[piece] if len(shape) == 1 else pieces[piece].reshape(shape)
        for at in self._alone:
            arrays[at] = cupy.empty(*self._forms[at])
        return arrays
