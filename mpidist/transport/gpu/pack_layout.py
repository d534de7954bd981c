"""Where each array of a list lies in a buffer: found once for lists of the same sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final, final

import numpy as np

from mpidist.transport.gpu.copy_table import CopyTables, Dtypes

__all__ = ["PackLayout"]

_STEP: Final = 16  # bytes, the most that a thread copies at once


@final
class PackLayout:
    """Arrays of a list one after another in a buffer, and the tables of the copies to the buffer and back.

    Args:
        counts: The number of elements of each array; none is 0.
        dtype: That of the buffer.
        is_padded: Whether each array begins at a multiple of 16 bytes, so that threads copy 16 bytes at once whatever
            the sizes of the arrays before it. What lies between arrays is 0.

    Attributes:
        offsets: The byte of the buffer at which each array begins, [n].
        size: Number of elements of the buffer.
    """

    def __init__(self, counts: Sequence[int], dtype: np.dtype[Any], is_padded: bool = False) -> None:
        self.counts, self.dtype = counts, dtype
        step = max(1, _STEP // dtype.itemsize) if is_padded else 1
        taken = -(-np.array(counts, np.int64) // step) * step
        ends = np.cumsum(taken)
        self.offsets = (ends - taken) * dtype.itemsize
        self.size = int(ends[-1]) if counts else 0
        self._pads = taken - counts
        self.tables = cache(self._make_tables)

    def _make_tables(self, dtypes: Dtypes, is_in: bool, divides: bool = False) -> CopyTables | None:
        """Make the tables of copies from arrays to the buffer, or back; `None` if there is a dtype without a kernel."""
        pairs = [(dtype, self.dtype) if is_in else (self.dtype, dtype) for dtype in dtypes]
        return CopyTables.between(self.counts, pairs, divides, self._pads if is_in else [0])
