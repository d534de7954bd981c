"""Where each array of a list lies in a buffer: found out once for lists of the same sizes."""

from __future__ import annotations

from collections.abc import Sequence
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
        counts: As above.
        dtype: As above.
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
        self._address, self._places = 0, self.offsets
        self._tables: dict[tuple[Dtypes, bool, bool], CopyTables | None] = {}

    def places(self, address: int) -> np.ndarray[Any, Any]:
        """Return the address of each array in a buffer, [n]: the same object as at the last call, if the buffer is."""
        if address != self._address:
            self._address, self._places = address, self.offsets + address
        return self._places

    def tables(self, dtypes: Dtypes, is_in: bool, divides: bool = False) -> CopyTables | None:
        """Return the tables of copies between arrays and the buffer; `None` if there is a dtype without a kernel.

        Args:
            dtypes: Those of the arrays.
            is_in: Whether the buffer is written, and not the arrays.
            divides: Whether the numbers are divided.
        """
        key = dtypes, is_in, divides
        if key not in self._tables:
            pairs = [(dtype, self.dtype) if is_in else (self.dtype, dtype) for dtype in dtypes]
            self._tables[key] = CopyTables.between(self.counts, pairs, divides, self._pads if is_in else [0])
        return self._tables[key]
