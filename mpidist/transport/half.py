"""Conversion of float16, bfloat16 and float8 to float32 and back, in blocks that stay in the cache.

NumPy converts float16 one number at a time, which takes longer than the rest of a reduction; here, integer operations
on whole arrays convert the bits. The results are equal to NumPy's `astype`, bit by bit. bfloat16 and float8
(`ml_dtypes`) are converted by `astype`, which is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Final, final

import numpy as np

__all__ = ["HalfAccumulator", "bfloat16", "dtype_named", "is_of_numpy"]

_BLOCK: Final = 1 << 15  # elements, whose buffers fit into a core's second-level cache
_ABSOLUTE: Final = np.int32(0x7FFFFFFF)
_EXPONENT: Final = np.int32(0x7F800000)
_SCALE: Final = np.float32(2.0**112)  # between the exponents' biases, 127 and 15
_LEAST_NORMAL: Final = np.float32(2.0**-14)  # of float16
_OVERFLOW: Final = 0x477FF000  # bits of 65520, the least number that rounds to infinity
_TO_LAST_BIT: Final = np.int32(13 << 23)  # 2^13: float32 has 13 bits more than float16
_BIAS: Final = np.uint16((113 << 10) % (1 << 16))  # of both exponents, in float16's place


@final
class HalfAccumulator:
    """Reduces arrays of half precision, or of a float8, in float32, and rounds once."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._is_float16 = dtype == np.float16
        self._total = np.empty(_BLOCK, np.float32)
        self._wide = np.empty(_BLOCK, np.float32)
        self._bits = [np.empty(_BLOCK, np.int32) for _ in range(3)]
        self._short = np.empty(_BLOCK, np.uint16)

    def combine(self, parts: Sequence[Any], out: Any, ufunc: Callable[..., Any], divisor: int) -> int:
        """Reduce arrays [m] in order, divide, and round into `out` [m], which may be one of them; count as `narrow`."""
        overflowed = 0
        for block in _blocks(out):
            into = out[block]
            total, wide = self._total[: into.size], self._wide[: into.size]
            self._widen(parts[0][block], total)
            for part in parts[1:]:
                self._widen(part[block], wide)
                ufunc(total, wide, out=total)
            if divisor != 1:
                total /= divisor
            overflowed += self._narrow(total, into)
        return overflowed

    def narrow(self, numbers: Any, out: Any) -> int:
        """Round float32 numbers [m] into `out` [m]; return how many finite ones became infinite float16."""
        return sum(self._narrow(numbers[block], out[block]) for block in _blocks(out))

    def widen(self, numbers: Any, out: Any) -> None:
        """Convert numbers [m] of half precision into float32 `out` [m]. Exact."""
        for block in _blocks(out):
            self._widen(numbers[block], out[block])

    def _widen(self, part: Any, wide: Any) -> None:
        if not self._is_float16 or not part.dtype.isnative:
            wide[...] = part
            return
        bits, short = self._bits[0][: part.size], self._short[: part.size]
        if np.bitwise_and(part.view(np.uint16), 0x7FFF, out=short).max() >= 0x7C00:  # an infinity, or NaN
            wide[...] = part
            return
        bits[...] = part.view(np.int16)
        np.left_shift(bits, 13, out=bits)
        np.bitwise_and(bits, np.int32(-0x70002000), out=bits)  # sign, exponent and fraction, in float32's places
        np.multiply(bits.view(np.float32), _SCALE, out=wide)  # corrects the exponent, also of subnormals; exact

    def _narrow(self, total: Any, out: Any) -> int:
        if not self._is_float16 or not out.dtype.isnative:
            out[...] = total
            return 0
        size, exponent, unit = (bits[: total.size] for bits in self._bits)
        bits, sign, result = total.view(np.int32), self._short[: total.size], out.view(np.uint16)
        np.bitwise_and(bits, _ABSOLUTE, out=size)
        if size.max() >= _OVERFLOW:  # an infinity, or NaN
            with np.errstate(all="ignore"):  # an overflow is a result, and counted
                out[...] = total
            return int(np.count_nonzero(np.isinf(out)) - np.count_nonzero(np.isinf(total)))
        # The power of two that is added makes the last bit of the sum worth that of a float16: the processor rounds.
        np.bitwise_and(size, _EXPONENT, out=exponent)
        np.maximum(exponent.view(np.float32), _LEAST_NORMAL, out=exponent.view(np.float32))
        np.add(exponent, _TO_LAST_BIT, out=unit)
        np.add(size.view(np.float32), unit.view(np.float32), out=size.view(np.float32))
        np.subtract(size, unit, out=size)  # the fraction, with its leading one
        np.right_shift(exponent, 13, out=exponent)
        np.add(size, exponent, out=size)
        np.right_shift(bits, 16, out=unit)
        np.copyto(sign, unit, casting="unsafe")
        np.bitwise_and(sign, 0x8000, out=sign)
        np.copyto(result, size, casting="unsafe")
        np.subtract(result, _BIAS, out=result)
        np.bitwise_or(result, sign, out=result)
        return 0


def _blocks(array: Any) -> Iterator[slice]:
    """Cut an array [m] into blocks, the last one perhaps shorter."""
    return (slice(start, start + _BLOCK) for start in range(0, array.size, _BLOCK))


@cache
def bfloat16() -> np.dtype[Any]:
    """Return the dtype bfloat16."""
    return dtype_named("bfloat16")


@cache
def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype of a name, also bfloat16 and others of `ml_dtypes`, which NumPy lacks."""
    if not name[0].isalpha() or hasattr(np, name):
        return np.dtype(name)
    import ml_dtypes  # guarded: importing it takes a while, and most programs do not need it

    return np.dtype(getattr(ml_dtypes, name, name))


def is_of_numpy(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is NumPy's own, in any byte order. The character is no sign, as `ml_dtypes` uses the same."""
    return not 256 <= dtype.num < 2048  # the numbers of dtypes of other packages
