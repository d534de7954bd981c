"""Memory of the sums of one call at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, final

import numpy as np

__all__ = ["SumMemory"]

_KEPT_BYTES: Final = 128 << 10  # memory for fewer bytes is no new pages of the system, and is quickly there
_ALIGNMENT: Final = 64


@final
class SumMemory:
    """Host memory for the sums of one call at a time. It is kept, as new pages of the system take as long as to add."""

    def __init__(self) -> None:
        self._kept = np.empty(0, np.uint8)

    def take(self, counts: Sequence[int], dtypes: Sequence[np.dtype[Any]]) -> list[Any]:
        """Return flat arrays of these lengths and dtypes, uninitialised, until the next call overwrites them."""
        sizes = [count * dtype.itemsize for count, dtype in zip(counts, dtypes, strict=True)]
        starts = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
        if starts[-1] < _KEPT_BYTES:
            return [np.empty(count, dtype) for count, dtype in zip(counts, dtypes, strict=True)]
        if self._kept.size < starts[-1]:
            self._kept = np.empty(starts[-1], np.uint8)
        places = zip(starts, sizes, dtypes, strict=False)
        return [self._kept[start : start + size].view(dtype) for start, size, dtype in places]
