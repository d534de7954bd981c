"""Memory of the sums of one call at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, Final, final

import numpy as np

__all__ = ["SumMemory"]

_ALIGNMENT: Final = 64


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
            starts = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
            if starts[-1] > self._limit:
                return list(map(np.empty, shapes, dtypes))
            if self._kept.size < starts[-1]:
                self._kept = np.empty(starts[-1], np.uint8)
            places = zip(starts, sizes, forms, strict=False)
            self._taken = [self._kept[at : at + size].view(dtype).reshape(shape) for at, size, (shape, dtype) in places]
            self._forms = forms
        return list(self._taken)
