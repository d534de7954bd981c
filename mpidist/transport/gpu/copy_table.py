"""Lists of arrays for kernels, and the tables of those that copy: where each array lies, and where in a buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np

from mpidist.transport import cuda
from mpidist.transport.arrays import address_of
from mpidist.transport.gpu.compiled import LONG, SHORT_TABLE, copier, longest_table

__all__ = ["BLOCK", "ArrayList", "CopyTable", "CopyTables", "Numbers", "PackLayout", "by_value", "is_plain"]

BLOCK: Final = 256  # threads; a warp of them takes a row
_WARP: Final = 32
_ROW_BYTES: Final = 8 << 10  # of one array
_STEP: Final = 16  # bytes, the most that a thread copies at once

_ARRAY: Final = np.dtype([("source", "u8"), ("target", "u8"), ("first_row", "u4"), ("last", "u2"), ("pad", "u2")])
_LAUNCH: Final = np.dtype([("num_arrays", "u4"), ("num_rows", "u4"), ("divisor", "i8"), ("counter", "u8")])

_is_contiguous: Final = attrgetter("_c_contiguous")  # CuPy makes an object of `flags`, which takes eight times as long
_dtype_of: Final = attrgetter("dtype")
_size_of: Final = attrgetter("size")

Array = Any
Numbers: TypeAlias = Sequence[int] | np.ndarray[Any, Any]
_Dtypes: TypeAlias = tuple[np.dtype[Any], ...]  # of each array; one for all


@final
class ArrayList(NamedTuple):
    """Properties of a list of CuPy's arrays for kernels."""

    dtypes: _Dtypes  # of each array; one if all have the same, as hashing each takes longer
    sizes: tuple[int, ...]  # elements of each array
    places: np.ndarray[Any, Any]  # addresses, [n]
    are_plain: bool  # contiguous, and aligned to their numbers' size: no context of a GPU survives what is not

    @classmethod
    def of(cls, arrays: list[Array] | ArrayList) -> ArrayList:
        """Inspect arrays, unless that was done before."""
        if isinstance(arrays, ArrayList):
            return arrays
        dtypes = tuple(map(_dtype_of, arrays))
        if dtypes and dtypes.count(dtypes[0]) == len(dtypes):
            dtypes = dtypes[:1]
        places = np.fromiter(map(address_of, arrays), np.uint64, len(arrays))
        widths = np.array([dtype.itemsize for dtype in dtypes], np.uint64)
        are_plain = all(map(_is_contiguous, arrays)) and not (places % widths).any()
        return cls(dtypes, tuple(map(_size_of, arrays)), places, are_plain)


def is_plain(array: Array) -> bool:
    """Whether kernels can use an array: see `ArrayList`."""
    return bool(_is_contiguous(array)) and address_of(array) % array.itemsize == 0


@final
class CopyTable(NamedTuple):
    """The copies of one launch."""

    kernel: str
    num_blocks: int  # of threads
    arguments: tuple[Any, ...]


@final
class CopyTables:
    """The tables of copies whose sizes stay the same: each call fills in addresses.

    Args:
        counts: The number of elements of each array, [n]; none is 0.
        kernels: The kernel that copies it, of `copier`, [n]; [1] for all.
        widths: The bytes of an element, of the wider side, [n]; [1] for all.
        pads: How many elements after its copy become 0, [n]; [1] for all.
    """

    def __init__(self, counts: Numbers, kernels: Sequence[str], widths: Numbers, pads: Numbers = (0,)) -> None:
        counts = np.array(counts, np.int64)
        most = _ROW_BYTES // np.asarray(widths)
        rows = -(-counts // most)
        launches = list(_launches(counts.size, kernels))
        self._whole = np.zeros(sum(size for _, size, _ in launches), _ARRAY)
        self._launches = np.zeros(len(launches), _LAUNCH)
        self._tables = []
        slots, at = np.zeros(counts.size, np.intp), 0
        for number, (kernel, size, its) in enumerate(launches):
            table, ends = self._whole[at : at + size], np.cumsum(rows[its])
            table["first_row"][: ends.size] = ends - rows[its]
            slots[its] = np.arange(at, at + ends.size)
            self._launches[number] = ends.size, ends[-1], 1, 0
            arguments = by_value(table), by_value(self._launches[number : number + 1])
            self._tables.append(CopyTable(kernel, -(-int(ends[-1]) * _WARP // BLOCK), arguments))
            at += size
        is_in_order = bool((slots == np.arange(counts.size)).all())
        self._slots: Any = slice(counts.size) if is_in_order else slots  # a slice is written sooner
        self._sources, self._targets = self._whole["source"], self._whole["target"]
        self._told = 1, 0  # the divisor and the counter that are filled in
        self._whole["pad"][self._slots] = pads
        self._whole["last"][self._slots] = counts - (rows - 1) * most

    @classmethod
    def between(
        cls, counts: Numbers, pairs: Sequence[tuple[np.dtype[Any], np.dtype[Any]]], divides: bool, pads: Numbers = (0,)
    ) -> CopyTables | None:
        """Make tables for dtypes that are read and written, [n] or [1]; `None` if a copy has no kernel."""
        kernels = [kernel for pair in pairs if (kernel := copier(*pair, divides)) is not None]
        widths = [max(one.itemsize, other.itemsize) for one, other in pairs]
        return cls(counts, kernels, widths, pads) if len(kernels) == len(pairs) else None

    def fill(self, sources: Numbers, targets: Numbers, divisor: int = 1, counter: int = 0) -> Sequence[CopyTable]:
        """Fill in addresses [n], and that of a counter of overflows or 0. The tables are valid until the next call."""
        self._sources[self._slots] = sources
        self._targets[self._slots] = targets
        if self._told != (divisor, counter):
            self._told = self._launches["divisor"], self._launches["counter"] = divisor, counter
        return self._tables


@final
class PackLayout:
    """Arrays of a list one after another in a buffer, and the tables of the copies to the buffer and back.

    With `is_padded` each array begins at a multiple of 16 bytes, so that threads copy 16 bytes at once whatever the
    sizes of the arrays before it. What lies between arrays is 0. No count is 0.

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

    def _make_tables(self, dtypes: _Dtypes, is_in: bool, divides: bool = False) -> CopyTables | None:
        """Make the tables of copies from arrays to the buffer, or back; `None` if there is a dtype without a kernel."""
        pairs = [(dtype, self.dtype) if is_in else (self.dtype, dtype) for dtype in dtypes]
        return CopyTables.between(self.counts, pairs, divides, self._pads if is_in else [0])


def _launches(num: int, kernels: Sequence[str]) -> Iterable[tuple[str, int, np.ndarray[Any, Any]]]:
    """Return for each launch its kernel, the size of its table, and the arrays of the list that it copies."""
    of_arrays = np.broadcast_to(np.array(kernels), num)
    for kernel in dict.fromkeys(kernels):
        own = np.flatnonzero(of_arrays == kernel)
        size = SHORT_TABLE if own.size <= SHORT_TABLE else longest_table()
        for at in range(0, own.size, size):
            yield kernel + LONG * (size > SHORT_TABLE), size, own[at : at + size]


def by_value(numbers: np.ndarray[Any, Any]) -> Any:
    """Return the argument of a kernel that gets the bytes of an array, which must live until the launch.

    CuPy also takes an array of one element itself, and then reads all its NumPy attributes at each launch.
    """
    return cuda.cupy().cuda.function.CPointer(numbers.ctypes.data)
