"""New arrays of device memory for equal calls. Small ones share an allocation, which takes half the time."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.transport import cuda

__all__ = ["NewArrays"]

_ALIGNMENT: Final = 16  # bytes, the most that kernels copy at once; more would cut pads off, too, which takes as long
_SMALL: Final = 64 << 10  # bytes of an array
_SHARED: Final = 1 << 20  # bytes of an allocation, all of which a program keeps that keeps one array of it


@final
class _Block(NamedTuple):
    """Arrays of one dtype that share an allocation, and all lengths but the first."""

    dtype: np.dtype[Any]
    rest: tuple[int, ...]  # those lengths
    bounds: list[int]  # where the allocation is cut along the first axis
    places: list[tuple[int, int]]  # the place in the list, and the piece, of each array


@final
class NewArrays:
    """Makes the results of equal calls, of dtypes of at most 16 bytes."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]]) -> None:
        self._forms = list(zip(shapes, dtypes, strict=True))
        blocks: list[_Block] = []
        last: dict[Any, _Block] = {}
        for at, (shape, dtype) in enumerate(self._forms):
            width = prod(shape[1:]) * dtype.itemsize
            if not shape or not 0 < shape[0] * width <= _SMALL:
                continue
            block = last.get((dtype, shape[1:]))
            if block is None or (block.bounds[-1] + shape[0]) * width > _SHARED:
                block = last[dtype, shape[1:]] = _Block(dtype, shape[1:], [0], [])
                blocks.append(block)
            block.places.append((at, len(block.bounds)))
            end = block.bounds[-1] + shape[0]
            pad = -end % (_ALIGNMENT // gcd(_ALIGNMENT, width))
            block.bounds.extend([end, end + pad] if pad else [end])
        self._blocks = [block for block in blocks if len(block.places) > 1]
        shared = {at for block in self._blocks for at, _ in block.places}
        self._alone = [at for at in range(len(self._forms)) if at not in shared]

    def take(self) -> list[Any]:
        """Return C-contiguous arrays on the current device, uninitialised."""
        cupy = cuda.cupy()
        arrays: list[Any] = [None] * len(self._forms)
        for dtype, rest, bounds, places in self._blocks:
            pieces = cupy.split(cupy.empty((bounds[-1], *rest), dtype), bounds)
            for at, piece in places:
                arrays[at] = pieces[piece]
        for at in self._alone:
            arrays[at] = cupy.empty(*self._forms[at])
        return arrays
