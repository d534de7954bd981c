"""Many arrays of device memory to a flat buffer, back, and several pieces into one: a kernel launch each.

The kernels are in `kernels.cu`. A launch carries its table as a parameter, by value: where each array is read and
written, 24 bytes (`copy_table.py`), or the addresses of the pieces. Nothing is uploaded, kept or waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, cached_property, lru_cache
from operator import attrgetter
from typing import Any, Final, TypeAlias, final

import numpy as np

from mpidist.transport import cuda
from mpidist.transport.arrays import address_of, aligned, memory_bounds
from mpidist.transport.gpu.compiled import LONG, SHORT_TABLE, combiner, compile_kernel, copier, longest_table
from mpidist.transport.gpu.copy_table import BLOCK, ArrayList, CopyTables, Numbers, PackLayout, by_value, is_plain
from mpidist.transport.reduction import Reduction, accumulator_dtype

__all__ = ["DeviceCopy", "DeviceKernels", "kernels_needed"]

_MAX_BLOCKS: Final = 1 << 16  # of a kernel whose threads take several numbers in turn
_COUNTER_BYTES: Final = 512  # the least that is allocated
_MAX_PARTS: Final = 480  # as in kernels.cu
_MAX_ALIKE: Final = 16  # lists of copies whose tables are kept

_size_of: Final = attrgetter("size")

Array = Any
Arrays: TypeAlias = Any  # a list of arrays, or its `ArrayList`, if kernels can read and cast all of them
# What is read, what is written, and whether it is divided.
DeviceCopy: TypeAlias = tuple[np.dtype[Any], np.dtype[Any], bool]


@final
class DeviceKernels:
    """Copies and combines arrays of device memory, many of them in one launch on the current stream.

    Nothing waits: a call returns when it is launched. A launch takes up to 168 arrays of one dtype, or 1,363 where CUDA
    and the GPU take parameters of 32 KiB; a longer list takes several.
    Dtypes without a kernel, integers above all, go by CuPy's own operations, one for each array.

    All arrays lie on the current device, and must stay there until the launch is done, which memory of CuPy's pool
    does by itself on the stream that it came from. The first launch of a kernel compiles it, which takes a tenth of
    a second and is remembered on disk by CuPy. `num_launches` counts the kernels of `kernels.cu` that were launched.
    """

    def __init__(self) -> None:
        self._kernel = cache(compile_kernel)
        self._tables_alike = lru_cache(_MAX_ALIKE)(CopyTables.between)
        self._layout_alike = lru_cache(_MAX_ALIKE)(PackLayout)
        self.num_launches = 0

    def compile(self, kernels: Iterable[str]) -> None:
        """Compile kernels for the current device, as the first use of each would; not those that it cannot take."""
        for kernel in kernels:
            if not kernel.endswith(LONG) or longest_table() > SHORT_TABLE:
                self._kernel(kernel)

    def pack(
        self, sources: Arrays, buffer: Array, counts_overflow: bool = False, layout: PackLayout | None = None
    ) -> None:
        """Copy arrays one after another into a buffer, with its dtype.

        An array that is not contiguous, not aligned to its numbers' size, or whose cast has no kernel is copied before,
        in a launch of its own. With a `layout`, no array is empty, and it gives their places in the contiguous buffer.
        """
        sources, layout = self._laid_out("pack", sources, buffer, layout)
        written, given = buffer.dtype, ArrayList.of(sources)
        tables = layout.tables(given.dtypes, is_in=True)
        if tables is None or not given.are_plain:
            sources = [
                _plain(its) if copier(its.dtype, written, False) else aligned(its).astype(written, "C")
                for its in sources
            ]
            given = ArrayList.of(sources)
            tables = layout.tables(given.dtypes, is_in=True)
        counter = self._counter_for(written, counts_overflow)
        self._copy(tables, given.places, address_of(buffer) + layout.offsets, 1, counter)

    def unpack(self, buffer: Array, targets: Arrays, divide_by: int = 1, layout: PackLayout | None = None) -> None:
        """Copy a buffer to contiguous arrays one after another, with their dtypes, and divide as NumPy does."""
        targets, layout = self._laid_out("unpack", targets, buffer, layout)
        divides, taken = divide_by != 1, self._writable(targets)
        tables = layout.tables(taken.dtypes, False, divides)
        if tables is not None:
            self._copy(tables, address_of(buffer) + layout.offsets, taken.places, divide_by)
            return
        for target, start in zip(targets, (layout.offsets // buffer.itemsize).tolist(), strict=True):
            piece = buffer[start : start + target.size].reshape(target.shape)
            target[...] = piece / divide_by if divides else piece

    def copy(self, sources: Arrays, targets: Arrays, divide_by: int = 1) -> None:
        """Copy arrays, none empty, to contiguous ones of the same sizes and dtypes, or in place, and divide.

        Numbers of half precision cannot be divided. Of sources that are not contiguous, copies are made before.
        """
        given, taken = ArrayList.of(sources), self._writable(targets)
        if given.dtypes != taken.dtypes or given.sizes != taken.sizes:
            raise ValueError(f"cannot copy {_texts(sources)} to {_texts(targets)}: needed the same sizes and dtypes")
        if not given.are_plain:
            sources = list(map(_plain, sources))
            given = ArrayList.of(sources)
        tables = self._tables_alike(taken.sizes, tuple((dtype, dtype) for dtype in taken.dtypes), divide_by != 1)
        self._copy(tables, given.places, taken.places, divide_by)

    def combine(self, parts: Array | Sequence[Array], reduction: Reduction, out: Array) -> None:
        """Join pieces in order, half precision in float32, divide by `reduction.divisor`, and round once.

        The numbers are those of `Reduction.combine`, bit by bit, but for products of complex numbers, which a GPU may
        round once, and for which of two zeros or of two NaNs the minimum is. Up to 480 pieces of floating-point
        numbers take one launch, as do sums of complex ones; others go by CuPy's operations, some for each piece, and
        so do all with a `fold`.

        The parts [P, m], or P arrays [m], are contiguous, and so is `out` [m], which may be one of them.
        """
        rows: Sequence[Array] = parts if isinstance(parts, (list, tuple)) else [parts[at] for at in range(len(parts))]
        if any(part.size != out.size or part.dtype != out.dtype for part in rows) or not rows:
            raise ValueError(f"cannot combine {_texts(rows)} into {_text(out)}: needed the same sizes and dtype")
        if not all(map(is_plain, (*rows, out))):
            raise ValueError("cannot combine arrays that are not contiguous and aligned; pass array.copy()")
        kernel = combiner(out.dtype, reduction.op)
        if reduction.fold is not None:
            reduction.fold.combine(reduction.ufunc, rows, (out,))
        elif kernel is None or len(rows) > _MAX_PARTS:
            self._combine_by_cupy(rows, reduction, out)
        elif out.size:
            self._combine(kernel, rows, reduction, out)

    def _combine(self, kernel: str, rows: Sequence[Array], reduction: Reduction, out: Array) -> None:
        addresses = np.zeros(_MAX_PARTS, np.uint64)
        addresses[: len(rows)] = places = list(map(address_of, rows))
        are_aligned = int(not any(place % 16 for place in places))
        count = 2 * out.size if out.dtype.kind == "c" else out.size
        arguments = (
            by_value(addresses), len(rows), count, address_of(out), reduction.divisor, are_aligned,
            self._counter_for(out.dtype, reduction.counts_overflow),
        )  # fmt: skip
        num_blocks = min(_MAX_BLOCKS, -(-out.nbytes // (16 * BLOCK)))
        self._launch(kernel, num_blocks, arguments)

    def _combine_by_cupy(self, rows: Sequence[Array], reduction: Reduction, out: Array) -> None:
        wide = accumulator_dtype(out.dtype)
        total = rows[0].astype(wide)
        for row in rows[1:]:
            reduction.ufunc(total, row.astype(wide, copy=False), out=total)
        if reduction.divisor != 1:
            total /= reduction.divisor
        if wide == out.dtype:
            out[...] = total  # not before all rows have been read, as it may be one of them
        else:
            self.pack([total], out, reduction.counts_overflow)

    @property
    def overflowed(self) -> int:
        """Number of finite values that became infinite float16, in launches that count them and are done."""
        return int(self._counter[0]) if "_counter" in vars(self) else 0

    def _counter_for(self, written: np.dtype[Any], counts_overflow: bool) -> int:
        """Return the address of the counter for a launch's output; 0 if nothing counts."""
        if not counts_overflow or written != np.float16:
            return 0
        return memory_bounds(self._counter)[0]

    @cached_property
    def _counter(self) -> Array:
        """A number in pinned memory, which GPU and host reach by one address; without such memory, on the device."""
        its = cuda.cupy().cuda
        try:
            memory = its.PinnedMemoryPointer(its.PinnedMemory(_COUNTER_BYTES), 0)
        except (RuntimeError, MemoryError):
            return cuda.cupy().asarray(np.zeros(1, np.int32))
        counter: np.ndarray[Any, Any] = np.ndarray(1, np.int32, buffer=memory)
        counter[0] = 0
        return counter

    def _launch(self, kernel: str, num_blocks: int, arguments: tuple[Any, ...]) -> None:
        self._kernel(kernel)((num_blocks,), (BLOCK,), arguments)
        self.num_launches += 1

    def _copy(
        self, tables: CopyTables | None, sources: Numbers, targets: Numbers, divide_by: int, counter: int = 0
    ) -> None:
        assert tables is not None, "the caller has cast what no kernel can"
        for table in tables.fill(sources, targets, divide_by, counter):
            self._launch(*table)

    def _writable(self, arrays: Arrays) -> ArrayList:
        """Check the properties of arrays that are to be written."""
        taken = ArrayList.of(arrays)
        if not taken.are_plain:
            odd = next(array for array in arrays if not is_plain(array))
            raise ValueError(f"cannot write to {_text(odd)}, which is not contiguous, or not aligned")
        return taken

    def _laid_out(
        self, what: str, arrays: Arrays, buffer: Array, layout: PackLayout | None
    ) -> tuple[Arrays, PackLayout]:
        """Find a layout of arrays that has none, and look whether the buffer fits to it."""
        if layout is None:
            arrays = [array for array in arrays if array.size]
            layout = self._layout_alike(tuple(map(_size_of, arrays)), buffer.dtype)
        if buffer.size != layout.size or buffer.dtype != layout.dtype or not is_plain(buffer):
            raise ValueError(f"{what} needs a contiguous buffer of {layout.size} elements, got {_text(buffer)}")
        return arrays, layout


def kernels_needed(copies: Iterable[DeviceCopy], sums: Iterable[tuple[np.dtype[Any], str]], num: int = 1) -> set[str]:
    """Return the kernels that copies, `num` together, and sums may take on some rank. CuPy makes other casts."""
    needed = {copier(*copy) or copier(copy[1], copy[1], False) for copy in copies}
    needed |= {kernel + LONG for kernel in needed if kernel is not None and num > SHORT_TABLE}
    needed |= {combiner(dtype, op) for dtype, op in sums}
    return {kernel for kernel in needed if kernel is not None}


def _plain(array: Array) -> Array:
    """Return an array, copied if kernels cannot read it."""
    array = aligned(array)
    return array if is_plain(array) else array.copy()


def _texts(arrays: Iterable[Array]) -> str:
    return ", ".join(map(_text, arrays))


def _text(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)}"
