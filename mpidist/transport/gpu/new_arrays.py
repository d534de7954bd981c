"""New arrays of device memory for equal calls. Small ones share an allocation, which takes half the time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.transport import cuda

__all__ = ["NewArrays"]

_ALIGNMENT: Final = 16  # bytes, the most that kernels copy at once
_SMALL: Final = 64 << 10  # bytes of an array
_SHARED: Final = 1 << 20  # bytes of an allocation, all of which a program keeps that keeps one array of it


@final
class _Run(NamedTuple):
    """Small arrays of one dtype, one after the other in an allocation."""

    dtype: np.dtype[Any]
    size: int  # elements
    cuts: list[int]  # where each array but the first begins, and the padding after an array
    pieces: list[tuple[int, int]]  # of each array, its number among the arrays and among what is cut
    shapes: list[tuple[int, tuple[int, ...]]]  # of arrays with several dimensions or none, its number, and its shape


@final
class NewArrays:
    """Makes the results of equal calls, of dtypes of at most 16 bytes."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]]) -> None:
        self._number = len(shapes)
        self._large: list[tuple[int, tuple[int, ...], np.dtype[Any], int]] = []  # number, shape, dtype, bytes
        self._runs: list[_Run] = []
        small: dict[np.dtype[Any], list[int]] = defaultdict(list)
        for at, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            nbytes = prod(shape) * dtype.itemsize
            if nbytes > _SMALL:
                self._large.append((at, shape, dtype, nbytes))
            else:
                small[dtype].append(at)
        for dtype, indices in small.items():
            step, run = max(1, _ALIGNMENT // dtype.itemsize), list[int]()
            taken = {at: -(-prod(shapes[at]) // step) * step for at in indices}
            for at in indices:
                if (sum(taken[its] for its in run) + taken[at]) * dtype.itemsize > _SHARED:
                    self._runs.append(_run_of(run, shapes, taken, dtype))
                    run = []
                run.append(at)
            self._runs.append(_run_of(run, shapes, taken, dtype))

    def take(self) -> list[Any]:
        """Return C-contiguous arrays on the current device, uninitialised."""
        cupy = cuda.cupy()
        ndarray, alloc = cupy.ndarray, cupy.cuda.alloc
        made: list[Any] = [None] * self._number
        for at, shape, dtype, nbytes in self._large:
            made[at] = ndarray(shape, dtype, alloc(nbytes))
        for run in self._runs:
            parts = cupy.split(ndarray((run.size,), run.dtype, alloc(run.size * run.dtype.itemsize)), run.cuts)
            for at, piece in run.pieces:
                made[at] = parts[piece]
            for at, shape in run.shapes:
                made[at] = made[at].reshape(shape)
        return made


def _run_of(
    indices: Sequence[int], shapes: Sequence[tuple[int, ...]], taken: dict[int, int], dtype: np.dtype[Any]
) -> _Run:
    """Lay arrays one after the other. `taken`: the elements of each, with padding."""
    lengths, pieces = list[int](), list[tuple[int, int]]()
    for at in indices:
        pieces.append((at, len(lengths)))
        size = prod(shapes[at])
        lengths += [size] if size == taken[at] else [size, taken[at] - size]
    ends = list(accumulate(lengths))
    odd = [(at, shapes[at]) for at in indices if len(shapes[at]) != 1]
    return _Run(dtype, ends[-1], ends[:-1], pieces, odd)
