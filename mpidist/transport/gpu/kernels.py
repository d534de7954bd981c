"""Many arrays of device memory to a flat buffer, back, and several pieces into one: a kernel launch each.

The kernels are in `kernels.cu`. A table says what they do: a row for up to 8 KiB of an array, made once for a list of
sizes and dtypes, and the arrays' addresses. Both stay on the device (`device_tables.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property
from importlib.resources import files
from itertools import pairwise
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Final, final

import numpy as np

from mpidist.transport.arrays import is_aligned
from mpidist.transport.cuda import Cuda
from mpidist.transport.gpu.copy_table import BLOCK, Move, Rows, dtype_code, rows_of
from mpidist.transport.gpu.kernel_tables import DeviceTables, Table
from mpidist.transport.reduction import Reduction

__all__ = ["KERNEL_OPTIONS", "DeviceKernels", "kernel_source"]

# Not fused: a product and a sum that are rounded once would not be NumPy's numbers.
KERNEL_OPTIONS: Final = ("--fmad=false",)
_MAX_BLOCKS: Final = 1 << 16  # of a kernel whose threads take several numbers in turn
_MAX_LISTS: Final = 256
_COUNTER_BYTES: Final = 512  # the least that is allocated
_COMBINED: Final = frozenset({
    "i1 i1", "u1 u1", "i2 i2", "u2 u2", "i4 i4", "u4 u4", "i8 i8", "u8 u8", "f4 f4", "f8 f8", "c8 c8", "c16 c16",
    "f2 f2", "f2 f4", "f4 f2", "bf bf", "bf f4", "f4 bf",
})  # fmt: skip
_OPS: Final = {"sum": 0, "prod": 1, "min": 2, "max": 3}

_NO_WORDS: Final = np.empty(0, np.uint64)

_address_of: Final = attrgetter("data.ptr")
_size_of: Final = attrgetter("size")
_dtype_of: Final = attrgetter("dtype")
_is_contiguous: Final = attrgetter("flags.c_contiguous")

Array = Any


@final
class _Known:
    """What was found out about lists of arrays."""

    __slots__ = ("addresses", "generations", "refs", "rows")

    def __init__(self, rows: Table, addresses: Sequence[Table]) -> None:
        self.rows = rows
        self.addresses = tuple(addresses)
        self.generations = [table.generation for table in (rows, *addresses)]
        self.refs: list[Any] = []

    @property
    def is_there(self) -> bool:
        """Whether all tables still are what they were."""
        return self.generations == [self.rows.generation, *(table.generation for table in self.addresses)]


@final
class _Counter(np.ndarray[Any, Any]):
    """Pinned memory in the place of an array of device memory: kernels reach it by the same address."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])


@final
class DeviceKernels:
    """Moves and joins arrays of device memory, any number of them in one launch on the current stream.

    Nothing waits: a call returns when it is launched. A call with arrays that are new makes a table of them and copies
    it to the device, on the same stream. One with the same arrays (the same objects, or others in the same places)
    allocates nothing and copies nothing; such calls can be captured in a CUDA graph.

    All arrays lie on the current device, and must stay there until the launch is done, which memory of CuPy's pool
    does by itself on the stream that it came from.

    Args:
        cuda: What this process has of CuPy. Nothing of it is touched before the first call; the first of a kernel
            compiles it, which takes seconds and is remembered on disk by CuPy.

    Attributes:
        num_launches: How many kernels were launched.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._functions: dict[str, Any] = {}
        self._lists: dict[Any, _Known] = {}
        self.num_launches = 0

    def compile(self) -> None:
        """Compile the kernels, as their first use would: for the current device. Takes seconds where CuPy has none."""
        self._module.compile()

    def pack(self, sources: Sequence[Array], buffer: Array, overflow: Array | None = None) -> None:
        """Copy arrays one after another into a buffer, with its dtype. One launch.

        Args:
            sources: Arrays of any shapes, some perhaps empty. Those that are not contiguous, or not aligned to their
                numbers' size, are copied before, in a launch each.
            buffer: [sum of the sizes], contiguous.
            overflow: [1], of 32 bits: to it the number of finite numbers is added that became infinities.

        Raises:
            TypeError: If a dtype cannot be brought to the buffer's.
            ValueError: If the sizes do not fit.
        """
        known = self._known(Move("pack", buffer.dtype, False), sources, ())
        self._require_size("pack", known, buffer)
        self._move(known, 0, _address_of(buffer), 1, overflow)

    def unpack(self, buffer: Array, targets: Sequence[Array], divide_by: int = 1) -> None:
        """Copy a buffer to arrays one after another, with their dtypes, and divide. One launch.

        Args:
            buffer: [sum of the sizes], contiguous.
            targets: Contiguous arrays of any shapes.
            divide_by: What the numbers are divided by, as NumPy does it: integers in float64. float16 and bfloat16 in
                float32.

        Raises:
            TypeError: If the buffer's dtype cannot be brought to that of a target.
            ValueError: If the sizes do not fit, or a target is not contiguous.
        """
        known = self._known(Move("unpack", buffer.dtype, divide_by != 1), (), targets)
        self._require_size("unpack", known, buffer)
        self._move(known, _address_of(buffer), 0, divide_by, None)

    def copy(self, sources: Sequence[Array], targets: Sequence[Array], divide_by: int = 1) -> None:
        """Copy arrays to others of the same sizes and dtypes, and divide. One launch.

        Args:
            sources: Arrays of any shapes. Those that are not contiguous are copied before, in a launch each.
            targets: Contiguous arrays. A target may be its own source.
            divide_by: As in `unpack`.

        Raises:
            TypeError: If numbers of such a dtype cannot be divided to the same dtype.
            ValueError: If the sizes or dtypes do not fit, or a target is not contiguous.
        """
        for source, target in zip(sources, targets, strict=True):
            if source.size != target.size or source.dtype != target.dtype:
                raise ValueError(f"cannot copy {_text(source)} to {_text(target)}: needed the same size and dtype")
        known = self._known(Move("copy", None, divide_by != 1), sources, targets)
        self._move(known, 0, 0, divide_by, None)

    def combine(
        self, parts: Array | Sequence[Array], reduction: Reduction, out: Array, overflow: Array | None = None
    ) -> None:
        """Join pieces in order, half precision in float32, divide by `reduction.divisor`, and round once. One launch.

        The numbers are those of `Reduction.combine`, bit by bit (but which of two zeros or of two NaNs the minimum is).

        Args:
            parts: [P, m], whose rows are contiguous, or P contiguous arrays [m]. 16-byte aligned ones are faster.
            reduction: How.
            out: [m], contiguous, of the dtype of the parts; float32 for parts of half precision, and half precision
                for parts of float32, can be had too. It may be one of the parts.
            overflow: As in `pack`.

        Raises:
            TypeError: If such dtypes cannot be joined in this way.
            ValueError: If the sizes do not fit.
        """
        rows: Sequence[Array] = parts if isinstance(parts, (list, tuple)) else [parts[at] for at in range(len(parts))]
        if any(part.size != out.size or part.dtype != rows[0].dtype for part in rows) or not rows:
            raise ValueError(
                f"cannot combine {[_text(part) for part in rows]} into {_text(out)}: needed the same sizes"
            )
        if not all(map(_is_plain, (*rows, out))):
            raise ValueError("cannot combine arrays that are not contiguous and aligned; pass array.copy()")
        pair = f"{dtype_code(rows[0].dtype)} {dtype_code(out.dtype)}"
        kind = out.dtype.kind
        if pair not in _COMBINED or (kind == "c" and reduction.op in ("min", "max")):
            raise TypeError(f"cannot combine {rows[0].dtype} into {out.dtype} by {reduction.op}")
        if reduction.divisor != 1 and kind in "iu":
            raise TypeError(f"cannot divide {out.dtype}: its quotients are no integers")
        if not out.size:
            return
        self._combine(rows, pair, reduction, out, overflow)

    def _combine(
        self, rows: Sequence[Array], pair: str, reduction: Reduction, out: Array, overflow: Array | None
    ) -> None:
        addresses = tuple(map(_address_of, rows))
        steps = {after - before for before, after in pairwise(addresses)}
        stream = self._cuda.cupy.cuda.get_current_stream()
        is_capturing = stream.is_capturing()
        table = 0
        if len(steps) > 1 or min(steps, default=0) < 0:
            table = self._tables.use(self._addresses(addresses, stream, ()), stream, is_capturing)
        count, width = out.size, rows[0].itemsize
        arguments = (
            table, addresses[0], min(steps, default=0), len(rows), count, _address_of(out), _OPS[reduction.op],
            reduction.divisor, int(not any(address % 16 for address in addresses)), _counter(overflow),
        )  # fmt: skip
        num_blocks = min(_MAX_BLOCKS, -(-count * width // (16 * BLOCK)))
        self._launch(f"combine_{pair.replace(' ', '_')}", num_blocks, arguments)
        if table and not is_capturing:
            self._tables.mark(stream)

    def overflow_of(self, dtype: np.dtype[Any]) -> Array | None:
        """Return the counter for numbers that are rounded to `dtype`: float16 has one, which `overflowed` reads."""
        return self._counter if dtype == np.float16 else None

    @property
    def overflowed(self) -> int:
        """How many finite numbers became infinite float16 in what was launched with `overflow_of`, and is done."""
        return int(self._counter[0]) if "_counter" in vars(self) else 0

    @cached_property
    def _counter(self) -> Any:
        """One number in pinned memory, which the GPU writes, rarely, and the host reads without a copy."""
        cuda = self._cuda.cupy.cuda
        memory = cuda.PinnedMemoryPointer(cuda.PinnedMemory(_COUNTER_BYTES), 0)
        counter = np.ndarray(1, np.int32, buffer=memory).view(_Counter)
        counter[0] = 0
        return counter

    @cached_property
    def _tables(self) -> DeviceTables:
        return DeviceTables(self._cuda.cupy)

    @cached_property
    def _module(self) -> Any:
        return self._cuda.cupy.RawModule(code=kernel_source(), options=KERNEL_OPTIONS)

    def _launch(self, kernel: str, num_blocks: int, arguments: tuple[int, ...]) -> None:
        function = self._functions.get(kernel)
        if function is None:
            function = self._functions[kernel] = self._module.get_function(f"mpidist_{kernel}")
        function((num_blocks,), (BLOCK,), arguments)
        self.num_launches += 1

    def _move(self, known: _Known | None, read: int, written: int, divide_by: int, overflow: Array | None) -> None:
        """Launch a move; a side whose address is 0 is that of the arrays."""
        if known is None:
            return
        rows: Rows = known.rows.about
        stream, tables = self._cuda.cupy.cuda.get_current_stream(), self._tables
        is_capturing = stream.is_capturing()
        table = tables.use(known.rows, stream, is_capturing)
        addresses = [tables.use(table, stream, is_capturing) for table in known.addresses]
        arguments = (
            table, rows.num_rows, 0 if read else addresses[0], read, 0 if written else addresses[-1], written,
            divide_by, _counter(overflow),
        )  # fmt: skip
        self._launch(rows.kernel, rows.num_blocks, arguments)
        if not is_capturing:
            tables.mark(stream)

    def _require_size(self, what: str, known: _Known | None, buffer: Array) -> None:
        size = 0 if known is None else known.rows.about.num_elements
        if buffer.size != size or not _is_plain(buffer):
            raise ValueError(f"{what} needs a contiguous buffer of {size} elements, got {_text(buffer)}")

    def _known(self, move: Move, sources: Sequence[Array], targets: Sequence[Array]) -> _Known | None:
        """Return the tables of the arrays that are read and written; `None` if there is nothing to move."""
        # An array that is gone takes its entry with it, before its id comes again.
        key = (move, len(sources), *map(id, sources), *map(id, targets))
        known = self._lists.get(key)
        if known is not None and known.is_there:
            return known
        arrays = [*sources, *targets]
        if not any(map(_size_of, arrays)):
            return None
        if not all(map(_is_plain, arrays)):
            copies = _contiguous(arrays, len(sources))
            known = self._found(move, copies[: len(sources)], copies[len(sources) :])
            known.refs = copies  # until the launch
            return known
        known = self._found(move, sources, targets)
        lists = self._lists
        known.refs = [weakref.ref(array, lambda _: lists.pop(key, None)) for array in arrays]
        lists[key] = known
        if len(lists) > _MAX_LISTS:
            del lists[next(iter(lists))]
        return known

    def _found(self, move: Move, sources: Sequence[Array], targets: Sequence[Array]) -> _Known:
        stream, tables = self._cuda.cupy.cuda.get_current_stream(), self._tables
        arrays = sources or targets
        sizes, dtypes = tuple(map(_size_of, arrays)), tuple(map(_dtype_of, arrays))
        is_uniform = dtypes.count(dtypes[0]) == len(dtypes)  # hashing each takes longer
        key = (move, sizes, dtypes[0] if is_uniform else dtypes)
        table = tables.find(key)
        if table is None:
            rows = rows_of(move, sizes, dtypes)
            table = tables.upload(key, rows.words, rows._replace(words=_NO_WORDS), stream)
        found: list[Table] = []
        for side in (sources, targets):
            if side:
                found.append(self._addresses(tuple(map(_address_of, side)), stream, (table, *found)))
        return _Known(table, found)

    def _addresses(self, places: tuple[int, ...], stream: Any, beside: Sequence[Table]) -> Table:
        table = self._tables.find(places)
        return table or self._tables.upload(places, np.array(places, np.uint64), None, stream, beside)


def kernel_source() -> str:
    """Return the kernels, in CUDA C++."""
    return (files("mpidist.transport.gpu") / "kernels.cu").read_text(encoding="utf-8")


def _is_plain(array: Array) -> bool:
    """Whether kernels can use an array: contiguous, and aligned, as a GPU's context does not survive what is not."""
    return bool(_is_contiguous(array)) and is_aligned(array)


def _contiguous(arrays: Sequence[Array], num_read: int) -> list[Array]:
    """Copy what is read and not plain; refuse what is written and not plain."""
    for array in arrays[num_read:]:
        if not _is_plain(array):
            raise ValueError(f"cannot write to {_text(array)}, which is not contiguous, or not aligned")
    return [array if _is_plain(array) else array.copy() for array in arrays]


def _counter(overflow: Array | None) -> int:
    if overflow is None:
        return 0
    if overflow.dtype.kind not in "iu" or overflow.itemsize != 4 or overflow.size < 1:
        raise TypeError(f"overflow must be an array [1] of 32-bit integers, got {_text(overflow)}")
    return int(_address_of(overflow))


def _text(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)}"
