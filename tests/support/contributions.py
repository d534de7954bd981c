"""What each rank contributes in the tests of reductions, and what must come of it.

The numbers are small and whole, and powers of two where they are multiplied: every sum and product is exact in every
dtype and in any order of adding, so results are compared with `==`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

__all__ = [
    "COMPLEX", "DTYPES", "HALVES", "INTEGERS", "REALS", "bits", "contribution", "in_rank_order", "reduction_of",
]  # fmt: skip

Array = np.ndarray[Any, Any]
DType = np.dtype[Any]

INTEGERS: list[DType] = [np.dtype(code) for code in "bBhHiIlLqQ"]
HALVES: list[DType] = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
REALS: list[DType] = [np.dtype(code) for code in "fdg"]
COMPLEX: list[DType] = [np.dtype(code) for code in "FDG"]
DTYPES = INTEGERS + HALVES + REALS + COMPLEX

_JOIN: dict[str, Any] = {
    "sum": lambda rows: rows.sum(axis=0, dtype=rows.dtype),
    "prod": lambda rows: rows.prod(axis=0, dtype=rows.dtype),
    "min": lambda rows: rows.min(axis=0),
    "max": lambda rows: rows.max(axis=0),
}


def contribution(op: str, rank: int, count: int, dtype: DType) -> Array:
    """Return what a rank adds (1 to 7), multiplies (1 or 2), or compares (0 to 12), [count]."""
    where = np.arange(count)
    if op == "prod":
        numbers = 1 + (rank + where) % 2
        return (numbers * (1j ** (where % 4)) if dtype.kind == "c" else numbers).astype(dtype)
    if op == "sum":
        numbers = 1 + (3 * rank + where) % 7
        return (numbers + 1j * ((rank + where) % 3) if dtype.kind == "c" else numbers).astype(dtype)
    return ((5 * rank + 3 * where) % 13).astype(dtype)


def reduction_of(op: str, size: int, count: int, dtype: DType) -> Array:
    """Return what the contributions of all ranks make, [count]."""
    wide = np.dtype(np.float32) if dtype in HALVES else dtype
    rows = np.stack([contribution(op, rank, count, dtype).astype(wide) for rank in range(size)])
    return _JOIN[op](rows).astype(dtype)  # type: ignore[no-any-return]


def in_rank_order(ufunc: np.ufunc, rows: Iterable[Array], dtype: DType, divisor: int = 1) -> Array:
    """Join rows in order, half precision in float32, and round once."""
    wide = np.dtype(np.float32) if dtype in HALVES else dtype
    first, *others = (row.astype(wide) for row in rows)
    for other in others:
        first = ufunc(first, other)
    return (first / divisor if divisor != 1 else first).astype(dtype)  # type: ignore[no-any-return]


def bits(array: Any) -> bytes:
    """Return an array's numbers as they are stored, without the bytes that pad a long double."""
    flat = np.ascontiguousarray(array)
    if flat.dtype.char not in "gG":
        return flat.tobytes()
    used = 10 if np.finfo(np.longdouble).nmant == 63 else 16  # x86: 80 bits in 16 bytes
    return np.frombuffer(flat.tobytes(), np.uint8).reshape(-1, 16)[:, :used].tobytes()
