"""Tables for the kernels that copy: where each array is read and written, and what its numbers become on the way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np

from mpidist.transport import cuda
from mpidist.transport.gpu.compiled import LONG, SHORT_TABLE, longest_table
from mpidist.transport.half import is_of_numpy

__all__ = [
    "ARRAY",
    "BLOCK",
    "CASTS",
    "COPIES",
    "QUOTIENTS",
    "CopyTable",
    "CopyTables",
    "Dtypes",
    "Numbers",
    "by_value",
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
_LAUNCH: Final = np.dtype([("num_arrays", "u4"), ("num_rows", "u4"), ("divisor", "i8"), ("counter", "u8")])

Numbers: TypeAlias = Sequence[int] | np.ndarray[Any, Any]
Dtypes: TypeAlias = tuple[np.dtype[Any], ...]  # of each array; one for all


@final
class CopyTable(NamedTuple):
    """The copies of one launch.

    Attributes:
        kernel: The kernel that makes such copies.
        num_blocks: How many blocks of threads it needs.
        arguments: What it is given.
    """

    kernel: str
    num_blocks: int
    arguments: tuple[Any, ...]


@final
class CopyTables:
    """The tables of copies whose sizes stay the same: each call fills in what has changed since the last one.

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
        size = SHORT_TABLE if counts.size <= SHORT_TABLE else longest_table(cuda.current())
        whole = np.zeros(-(-counts.size // size) * size, ARRAY)
        self._arrays = arrays = whole[: counts.size]
        arrays["kind"], arrays["pad"] = kinds, pads
        arrays["last"] = counts - (rows - 1) * most
        self._launches = np.zeros(whole.size // size, _LAUNCH)
        self._sources: Numbers = ()
        self._targets: Numbers = ()
        self._told = 1, 0
        self._tables = []
        for at in range(self._launches.size):
            part = slice(at * size, (at + 1) * size)
            ends = np.cumsum(rows[part])
            arrays["first_row"][part] = ends - rows[part]
            self._launches[at] = ends.size, ends[-1], 1, 0
            kernel = kernel_of_copies(int(arrays["kind"][part].max())) + LONG * (size > SHORT_TABLE)
            arguments = by_value(whole[part]), by_value(self._launches[at : at + 1])
            self._tables.append(CopyTable(kernel, -(-int(ends[-1]) * _WARP // BLOCK), arguments))

    @classmethod
    def between(
        cls, counts: Numbers, pairs: Sequence[tuple[np.dtype[Any], np.dtype[Any]]], divides: bool, pads: Numbers = (0,)
    ) -> CopyTables | None:
        """Make tables for dtypes that are read and written, [n] or [1]; `None` if no kernel makes such a copy."""
        kinds = [kind for pair in pairs if (kind := copy_kind(*pair, divides)) is not None]
        widths = [max(one.itemsize, other.itemsize) for one, other in pairs]
        return cls(counts, kinds, widths, pads) if len(kinds) == len(pairs) else None

    def fill(self, sources: Numbers, targets: Numbers, divisor: int = 1, counter: int = 0) -> Sequence[CopyTable]:
        """Fill in what the kernels are told, and return the tables, which are good until the next call.

        Args:
            sources: The address of each array that is read, [n]. The same object has the same numbers.
            targets: The address to which it is copied, [n]; as above.
            divisor: What numbers are divided by.
            counter: The address of a number to which overflows are added; 0 for none.
        """
        if sources is not self._sources:
            self._sources = self._arrays["source"] = sources
        if targets is not self._targets:
            self._targets = self._arrays["target"] = targets
        if (divisor, counter) != self._told:
            self._told = divisor, counter
            self._launches["divisor"], self._launches["counter"] = divisor, counter
        return self._tables


def by_value(numbers: np.ndarray[Any, Any]) -> Any:
    """Return the argument of a kernel that gets the bytes of an array, which must live until the launch.

    CuPy also takes an array of one element itself, and then asks it at each launch for all that NumPy knows of it.
    """
    return cuda.current().cupy.cuda.function.CPointer(numbers.ctypes.data)


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
