"""The elementwise operation that reduces the ranks' numbers, and its precision."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, replace
from typing import Any, Final, final

import numpy as np

from mpidist.transport.float_errors import without_float_errors
from mpidist.transport.half import HalfAccumulator
from mpidist.transport.native.loading import native
from mpidist.transport.tree import Fold, multiply_complex

__all__ = ["UFUNCS", "Reduction", "accumulator_dtype", "is_low_precision", "narrow", "widen"]

UFUNCS: Final = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


@final
@dataclass(frozen=True)
class Reduction:
    """An elementwise reduction over ranks.

    Half-precision numbers are reduced in a float32 accumulator, which is divided by `divisor` and then rounded, so
    that a mean cannot overflow. For all other dtypes `divisor` is 1 and the caller divides.

    Args:
        op: `"sum"`, `"prod"`, `"min"` or `"max"`.
        divisor: The divisor of the accumulator of half-precision numbers, before it is rounded.
        in_rank_order: Whether contributions must be reduced in rank order, even if another order is faster.
        counts_overflow: Whether to count numbers that become infinite: those of compressed float32 numbers. Sums of
            the caller's own float16 numbers overflow as they do in NumPy.
        fold: The order of additions in a tree of replicas; `None` for no tree. With a tree, contributions are rows of a
            `ReplicaTree`, never of half precision, and the caller divides.
        fold_across: The `fold` of the phases after the first.
    """

    op: str = "sum"
    divisor: int = 1
    in_rank_order: bool = False
    counts_overflow: bool = False
    fold: Fold | None = None
    fold_across: Fold | None = None

    @property
    def rest(self) -> Reduction:
        """The reduction for the phases after the first: with `fold_across`, and without the division, which is done."""
        if self.fold is not None:
            return replace(self, divisor=1, fold=self.fold_across, fold_across=None)
        return self if self.divisor == 1 else replace(self, divisor=1)

    @functools.cached_property
    def is_in_order(self) -> bool:
        """Whether `combine` adds the parts in their order."""
        return self.fold is None or self.fold.is_in_order

    def is_compiled(self, dtype: np.dtype[Any]) -> bool:
        """Whether compiled code, which counts no overflow, reduces numbers of a dtype."""
        is_counted = self.counts_overflow and dtype == np.float16
        if native is None or not self.is_in_order or is_counted:
            return False
        return bool(native.combines(self.op, dtype))

    @functools.cached_property
    def ufunc(self) -> np.ufunc:
        """The operation on two arrays."""
        return UFUNCS[self.op]

    def finish(self, buffer: Any) -> None:
        """Divide the numbers of a group of one rank by `divisor`, as `combine` does in larger groups."""
        if self.divisor != 1:
            buffer[...] = buffer.astype(accumulator_dtype(buffer.dtype)) / self.divisor

    def combine(self, parts: list[Any], out: Any) -> int:
        """Reduce NumPy arrays [m] of `parts` into `out` [m], in order, rounding once. `out` may be one of `parts`.

        No floating-point error is reported.

        Returns:
            How many finite numbers became infinite when rounded to float16; 0 unless `counts_overflow`.
        """
        if self._combines_compiled(parts, out, self.divisor):
            return 0
        ufunc = self.ufunc
        if self.fold is not None:
            self.fold.combine(ufunc, parts, (out,))
            return 0
        if self.in_rank_order and ufunc is np.multiply and out.dtype.kind == "c":
            out[...] = functools.reduce(functools.partial(multiply_complex, False), parts)
            return 0
        if is_low_precision(out.dtype):
            with np.errstate(all="ignore"):
                overflowed = _accumulators.of(out.dtype).combine(parts, out, ufunc, self.divisor)
            return overflowed if self.counts_overflow else 0
        if len(parts) == 2:
            without_float_errors(ufunc, parts[0], parts[1], out=out)
        elif len(parts) == 1:
            if parts[0] is not out:
                out[...] = parts[0]
        else:  # only the last step writes `out`, which may be one of `parts`
            total = without_float_errors(ufunc, parts[0], parts[1])
            for part in parts[2:-1]:
                without_float_errors(ufunc, total, part, out=total)
            without_float_errors(ufunc, total, parts[-1], out=out)
        return 0

    def combine_and_divide(self, parts: list[Any], out: Any, divide_by: int) -> int:
        """Reduce as `combine` does, and divide `out` by a whole number; compiled code does both in one pass.

        Returns:
            As `combine`.
        """
        if self._combines_compiled(parts, out, divide_by * self.divisor):
            return 0
        overflowed = self.combine(parts, out)
        if divide_by != 1:
            without_float_errors(np.true_divide, out, divide_by, out=out)
        return overflowed

    def _combines_compiled(self, parts: list[Any], out: Any, divide_by: int) -> bool:
        """Reduce and divide in compiled code, if there is any for the arrays."""
        if native is None or not self.is_in_order or (self.counts_overflow and out.dtype == np.float16):
            return False
        return bool(native.combine(self.op, parts, out, divide_by, None))


@final
class _Accumulators(threading.local):
    """The accumulators of half-precision numbers: one for each dtype and thread."""

    def __init__(self) -> None:
        self.of = functools.cache(HalfAccumulator)


_accumulators: Final = _Accumulators()


def narrow(numbers: Any, out: Any) -> int:
    """Round float32 numbers [m] of host memory to half precision; return how many became infinite float16."""
    native = numbers if numbers.dtype.isnative else numbers.astype(numbers.dtype.newbyteorder("="))
    return _accumulators.of(out.dtype).narrow(native, out)


def widen(numbers: Any, out: Any) -> None:
    """Convert numbers [m] of half precision and host memory to float32, into `out` [m]. Exact."""
    _accumulators.of(numbers.dtype).widen(numbers, out)


@functools.cache
def is_low_precision(dtype: np.dtype[Any]) -> bool:
    """Whether numbers of a dtype are added as float32: float16, bfloat16 and float8 (of the package `ml_dtypes`)."""
    is_float8 = dtype.name.startswith("float8") and dtype.name != "float8_e8m0fnu"  # which has neither 0 nor signs
    return dtype == np.float16 or dtype.name == "bfloat16" or is_float8


@functools.cache
def accumulator_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which numbers of `dtype` are reduced."""
    return np.dtype(np.float32) if is_low_precision(dtype) else dtype
