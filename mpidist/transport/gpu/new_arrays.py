"""New arrays of device memory for equal calls. Small ones share an allocation, which takes half the time."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final, final

import numpy as np

from mpidist.transport import cuda

__all__ = ["NewArrays"]

_ALIGNMENT: Final = 16  # bytes, the most that kernels copy at once
_SMALL: Final = 64 << 10  # bytes of an array
_SHARED: Final = 1 << 20  # bytes of an allocation, all of which a program keeps that keeps one array of it


@final
class NewArrays:
    """Makes the results of equal calls, of dtypes of at most 16 bytes."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]]) -> None:
        self._sizes: list[int] = []  # bytes of each allocation
        self._arrays: list[tuple[tuple[int, ...], np.dtype[Any], int, int]] = []  # with allocation, and byte in it
        shared = None  # the last allocation of small arrays
        for shape, dtype in zip(shapes, dtypes, strict=True):
            nbytes = -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
            its = shared
            if its is None or nbytes > _SMALL or self._sizes[its] + nbytes > _SHARED:
                its = len(self._sizes)
                self._sizes.append(0)
                shared = shared if nbytes > _SMALL else its
            self._arrays.append((shape, dtype, its, self._sizes[its]))
            self._sizes[its] += nbytes

    def take(self) -> list[Any]:
        """Return C-contiguous arrays on the current device, uninitialised."""
        cupy = cuda.cupy()
        memory = [cupy.cuda.alloc(nbytes) for nbytes in self._sizes]
        return [cupy.ndarray(shape, dtype, memory[its] + at) for shape, dtype, its, at in self._arrays]
