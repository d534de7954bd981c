"""What the tests of kernels share: numbers of every dtype, odd ones too, and what it means that two are the same."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.contributions import COMPLEX, HALVES, INTEGERS, bits

from mpidist.transport import cuda
from mpidist.transport.gpu.kernels import DeviceKernels

__all__ = ["BF16", "DTYPES", "F16", "F32", "F64", "ON_DEVICE", "ROW", "SIZES", "empty", "every_pattern", "kernels",
           "numbers_of", "odd_numbers_of", "same"]  # fmt: skip

BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
ON_DEVICE = [*INTEGERS, *HALVES, F32, F64, *COMPLEX[:2]]
DTYPES = {"bf": BF16} | {f"{its.kind}{its.itemsize}": its for its in ON_DEVICE if its != BF16}
ROW = 8192  # bytes
SIZES = [1, 0, 2, 3, 15, 16, 17, 31, 33, 511, 513, ROW // 4 - 1, ROW // 4, ROW // 4 + 1, ROW // 2, ROW, ROW + 1, 20_000]


@pytest.fixture
def kernels(gpus: cuda.Cuda) -> DeviceKernels:
    return DeviceKernels()


def empty(size: int, dtype: Any) -> Any:
    return cuda.current().cupy.empty(size, dtype)


def numbers_of(dtype: np.dtype[Any], size: int, seed: int = 0) -> Any:
    """Any numbers of a dtype, [size]."""
    rng = np.random.default_rng([seed, size])
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, size, dtype, endpoint=True)
    numbers = rng.standard_normal(size) * 2.0 ** rng.integers(-12, 12, size)
    return (numbers + 1j * rng.standard_normal(size) if dtype.kind == "c" else numbers).astype(dtype)


def odd_numbers_of(dtype: np.dtype[Any]) -> Any:
    """Zeros, subnormal numbers, infinities and no numbers, [n]."""
    if dtype.kind in "iu":
        return np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, 0, 1], dtype)
    least = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    odd = np.array([0.0, -0.0, least, -least, 5 * least, np.inf, -np.inf, np.nan, 1])
    if dtype.kind != "c":
        return odd.astype(dtype)
    pairs = np.empty((odd.size, odd.size), dtype)
    pairs.real, pairs.imag = odd, odd[:, None]
    return pairs.reshape(-1)


def every_pattern(dtype: np.dtype[Any]) -> Any:
    """All numbers of half precision; of float32, patterns at random, and those where roundings turn, [n]."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    if dtype in HALVES:
        return halves.view(dtype)
    patterns = np.random.default_rng(3).integers(0, 1 << 32, 1 << 16, np.uint32)
    edges = [halves.view(half).astype(F32).view(np.uint32) for half in HALVES]
    steps = (0, 1, -1 % 2**32, 0x7FFF, 0x8000, 0x8001, 0xFFF, 0x1000, 0x1001)
    return np.concatenate([patterns, *(edge + np.uint32(step) for edge in edges for step in steps)]).view(F32)


def same(one: Any, other: Any) -> bool:
    """Whether the bits are the same; those of what is no number may be others."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.kind in "iu":
        return bool((one == other).all())
    with np.errstate(invalid="ignore"):  # of those that signal
        nan, other_nan = np.isnan(one), np.isnan(other)
    return bool((nan == other_nan).all()) and bits(one[~nan]) == bits(other[~nan])
