"""Tables for the kernels that copy: where each array is read and written, and what its numbers become on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np

from mpidist.transport.half import is_of_numpy

__all__ = ["BLOCK", "CASTS", "COPIES", "QUOTIENTS", "CopyTable", "Numbers", "copy_kind", "dtype_code", "tables_of"]

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
_ARRAY: Final = np.dtype([("source", "u8"), ("target", "u8"), ("first_row", "u4"), ("last", "u2"), ("kind", "u2")])
_ARRAYS: Final = 168  # in a table
_TABLE: Final = np.dtype([("arrays", _ARRAY, (_ARRAYS,))])

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


def tables_of(
    sources: Numbers, targets: Numbers, counts: Numbers, kinds: Numbers, widths: Numbers
) -> Iterator[CopyTable]:
    """Cut copies into rows, and lay them into tables of up to 168 arrays.

    Args:
        sources: The address of each array that is read, [n].
        targets: The address to which it is copied, [n].
        counts: Its number of elements, [n]; none is 0.
        kinds: Its kind of copy, of `copy_kind`, [n]; [1] for all.
        widths: The bytes of an element, of the wider side, [n]; [1] for all.
    """
    counts = np.array(counts, np.int64)
    most = _ROW_BYTES // np.asarray(widths)
    rows = -(-counts // most)
    ends = np.cumsum(rows)
    arrays = np.empty(counts.size, _ARRAY)
    arrays["source"], arrays["target"], arrays["kind"] = sources, targets, kinds
    arrays["last"] = counts - (rows - 1) * most
    arrays["first_row"] = ends - rows
    for start in range(0, len(arrays), _ARRAYS):
        words, part = np.zeros(1, _TABLE), arrays[start : start + _ARRAYS]
        before, num_rows = int(part["first_row"][0]), int(ends[start + len(part) - 1])
        part["first_row"] -= before
        words["arrays"][0, : len(part)] = part
        num_rows -= before
        yield CopyTable(words, len(part), num_rows, _kernel_of(part["kind"]), -(-num_rows * _WARP // BLOCK))


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


def _kernel_of(kinds: np.ndarray[Any, Any]) -> str:
    most = int(kinds.max())
    if most == QUOTIENTS["f4 f4"]:  # then all are
        return "divide_f4"
    return "copy" if most < _FIRST_CAST else "cast" if most < QUOTIENTS["f4 f4"] else "divide"
