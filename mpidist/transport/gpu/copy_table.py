"""Tables for the kernels that copy: where each array is read and written, and what its numbers become on the way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np

from mpidist.transport.half import is_of_numpy

__all__ = [
    "ARRAY",
    "BLOCK",
    "CASTS",
    "COPIES",
    "QUOTIENTS",
    "CopyTable",
    "CopyTables",
    "Numbers",
    "copy_kind",
    "dtype_code",
    "kernel_of_copies",
]

BLOCK: Final = 256  # threads; a warp of them takes a row
_WARP: Final = 32
_ROW_BYTES: Final = 8 << 10  # of one array
_FIRST_CAST: Final = 16

# As in kernels.cu: what is read and what is written, by dtype_code; copies by the bytes of an element.
COPIES: Final = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}
CASTS: Final = {"f4 f2": 16, "f4 bf": 17, "f2 f4": 18, "bf f4": 19}
QUOTIENTS: Final = {
    "f4 f4": 32, "f8 f8": 33, "c8 c8": 34, "c16 c16": 35, "f2 f2": 36, "bf bf": 37, "f2 f4": 38, "bf f4": 39,
}  # fmt: skip
ARRAY: Final = np.dtype(
    [("source", "u8"), ("target", "u8"), ("first_row", "u4"), ("last", "u2"), ("kind", "u1"), ("pad", "u1")]
)
_ARRAYS: Final = 168  # in a table
_TABLE: Final = np.dtype((np.void, _ARRAYS * ARRAY.itemsize))  # without fields, which CuPy would list at each launch

Numbers: TypeAlias = Sequence[int] | np.ndarray[Any, Any]


@final
class CopyTable(NamedTuple):
    """The copies of one launch.

    Attributes:
        words: The table, [1]: CuPy passes it to the kernel by value.
        num_arrays: Number of arrays in it.
        num_rows: Number of rows that they are cut into.
        kernel: The kernel that makes such copies.
        num_blocks: How many blocks of threads it needs.
    """

    words: np.ndarray[Any, Any]
    num_arrays: int
    num_rows: int
    kernel: str
    num_blocks: int


@final
class CopyTables:
    """The tables, of up to 168 arrays each, of copies whose sizes stay the same: each call fills in the addresses.

    Args:
        counts: The number of elements of each array, [n]; none is 0.
        kinds: Its kind of copy, of `copy_kind`, [n]; [1] for all.
        widths: The bytes of an element, of the wider side, [n]; [1] for all.
        pads: How many elements after its copy become 0, [n]; [1] for all.
    """

    def __init__(self, counts: Numbers, kinds: Numbers, widths: Numbers, pads: Numbers = (0,)) -> None:
        counts = np.array(counts, np.int64)
        most = _ROW_BYTES // np.asarray(widths)
        rows = -(-counts // most)
        whole = np.zeros(-(-counts.size // _ARRAYS) * _ARRAYS, ARRAY)
        self._arrays = arrays = whole[: counts.size]
        arrays["kind"], arrays["pad"] = kinds, pads
        arrays["last"] = counts - (rows - 1) * most
        self._tables = []
        for at in range(whole.size // _ARRAYS):
            part = slice(at * _ARRAYS, (at + 1) * _ARRAYS)
            ends = np.cumsum(rows[part])
            arrays["first_row"][part] = ends - rows[part]
            kernel, num_rows = kernel_of_copies(int(arrays["kind"][part].max())), int(ends[-1])
            table = whole.view(_TABLE)[at : at + 1]
            self._tables.append(CopyTable(table, ends.size, num_rows, kernel, -(-num_rows * _WARP // BLOCK)))

    @property
    def kernels(self) -> set[str]:
        """The kernels that make the copies."""
        return {table.kernel for table in self._tables}

    def fill(self, sources: Numbers, targets: Numbers) -> Sequence[CopyTable]:
        """Fill in the addresses, and return the tables, which are good until the next call.

        Args:
            sources: The address of each array that is read, [n].
            targets: The address to which it is copied, [n].
        """
        self._arrays["source"], self._arrays["target"] = sources, targets
        return self._tables


@cache
def copy_kind(read: np.dtype[Any], written: np.dtype[Any], divides: bool) -> int | None:
    """Return the kernels' number for a copy from one dtype to another; `None` if no kernel makes it."""
    pair = f"{dtype_code(read)} {dtype_code(written)}"
    if divides:
        return QUOTIENTS.get(pair)
    return COPIES.get(read.itemsize) if read == written else CASTS.get(pair)


@cache
def dtype_code(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype in kernels.cu, `f4` for float32; a dtype without kernels gets a name of no kernel."""
    if dtype.name == "bfloat16":
        return "bf"
    return f"{dtype.kind}{dtype.itemsize}" if is_of_numpy(dtype) else dtype.name


def kernel_of_copies(most: int) -> str:
    """Return the kernel that makes copies of up to a kind."""
    if most == QUOTIENTS["f4 f4"]:  # then all are
        return "divide_f4"
    return "copy" if most < _FIRST_CAST else "cast" if most < QUOTIENTS["f4 f4"] else "divide"
