"""What the kernels that move arrays are told: rows of up to 8 KiB of one array, and what becomes of each."""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple, final

import numpy as np

__all__ = ["BLOCK", "CASTS", "COPIES", "QUOTIENTS", "Move", "Rows", "dtype_code", "rows_of"]

BLOCK: Final = 256  # threads; a warp of them takes a row
_WARP: Final = 32
_ROW_BYTES: Final = 8 << 10
_FIRST_CAST: Final = 16

# As in kernels.cu: what is read and what is written, by dtype_code; copies by the bytes of an element.
COPIES: Final = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}
CASTS: Final = {
    "i1 i4": 16, "u1 i4": 17, "i2 i4": 18, "u2 i4": 19, "i4 i8": 20, "u4 u8": 21, "i4 f4": 22, "i8 f8": 23,
    "u8 f8": 24, "f4 f2": 25, "f4 bf": 26, "f2 f4": 27, "bf f4": 28,
}  # fmt: skip
QUOTIENTS: Final = {
    "i4 f4": 32, "i8 f8": 33, "u8 f8": 34, "f4 f4": 35, "f8 f8": 36, "c8 c8": 37, "c16 c16": 38, "f2 f2": 39,
    "bf bf": 40, "f2 f4": 41, "bf f4": 42,
}  # fmt: skip


@final
class Move(NamedTuple):
    """A kind of move.

    Attributes:
        what: `"pack"`, from arrays to a flat buffer; `"unpack"`, from it to arrays; `"copy"`, from arrays to others of
            the same dtypes.
        flat: The dtype of the buffer; `None` for a copy.
        divides: Whether the numbers are divided.
    """

    what: str
    flat: np.dtype[Any] | None
    divides: bool

    def kind(self, dtype: np.dtype[Any]) -> int:
        """Return the kernels' number for this move of arrays of a dtype.

        Raises:
            TypeError: If they have none.
        """
        read = self.flat if self.what == "unpack" else dtype
        written = self.flat if self.what == "pack" else dtype
        assert read is not None
        assert written is not None
        pair = f"{dtype_code(read)} {dtype_code(written)}"
        kind = QUOTIENTS.get(pair) if self.divides else CASTS.get(pair)
        if kind is None and read == written and not self.divides:
            kind = COPIES.get(read.itemsize)
        if kind is None:
            raise TypeError(f"no kernel {'divides' if self.divides else 'brings'} {read} to {written}")
        return kind

    def row_elements(self, dtype: np.dtype[Any]) -> int:
        """Return how many elements of a dtype a row takes."""
        return _ROW_BYTES // max(dtype.itemsize, 0 if self.flat is None else self.flat.itemsize)


@final
class Rows(NamedTuple):
    """A table of rows.

    Attributes:
        words: [3 r]: where each row starts in its array, where it is on the other side (in elements), and the array's
            index, the number of elements and the kind of move in the bits from 0, 32 and 48 on.
        num_rows: Number of rows, r.
        kernel: The kernel that makes such moves.
        num_blocks: How many blocks of threads it needs.
        num_elements: How many elements are moved.
    """

    words: np.ndarray[Any, np.dtype[np.uint64]]
    num_rows: int
    kernel: str
    num_blocks: int
    num_elements: int


def rows_of(move: Move, sizes: tuple[int, ...], dtypes: tuple[np.dtype[Any], ...]) -> Rows:
    """Cut arrays into rows.

    Args:
        move: What becomes of them. On the other side they lie one after another, or (of a copy) each by itself.
        sizes: Number of elements of each; at least one is not 0.
        dtypes: The dtype of each.

    Raises:
        TypeError: If no kernel moves such dtypes.
    """
    kind_of = {dtype: move.kind(dtype) for dtype in set(dtypes)}
    most_of = {dtype: move.row_elements(dtype) for dtype in kind_of}
    counts = np.array(sizes, np.int64)
    most = np.array([most_of[dtype] for dtype in dtypes], np.int64)
    kinds = np.array([kind_of[dtype] for dtype in dtypes], np.int64)
    rows_each = -(-counts // most)
    index = np.repeat(np.arange(counts.size), rows_each)
    start = (np.arange(index.size) - np.repeat(np.cumsum(rows_each) - rows_each, rows_each)) * most[index]
    words = np.empty((index.size, 3), np.uint64)
    words[:, 0] = start
    words[:, 1] = start if move.what == "copy" else start + (np.cumsum(counts) - counts)[index]
    words[:, 2] = index | np.minimum(most[index], counts[index] - start) << 32 | kinds[index] << 48
    kernel = "divide" if move.divides else "copy" if max(kind_of.values()) < _FIRST_CAST else "cast"
    return Rows(words.reshape(-1), index.size, kernel, -(-index.size * _WARP // BLOCK), int(counts.sum()))


@cache
def dtype_code(dtype: np.dtype[Any]) -> str:
    """Return the kernels' name of a dtype: `f4` for float32, `bf` for bfloat16. Others than theirs have others.

    Booleans are bytes, 0 or 1, whose minima and maxima are booleans.
    """
    if dtype.kind == "b":
        return "u1"
    if dtype.name == "bfloat16":
        return "bf"
    return f"{dtype.kind}{dtype.itemsize}" if dtype.char in np.typecodes["All"] else dtype.name
