"""Sums in half precision: the dtypes, and how far off a result may be."""

import ml_dtypes
import numpy as np
import pytest

ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
HALF = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}
NUMPY = {"SUM": np.sum, "MEAN": np.mean, "MAX": np.max, "MIN": np.min}
each_half = pytest.mark.parametrize("half", ["bf16", "fp16"])


def normal(size, count, seed=11):
    return np.random.default_rng(seed).standard_normal((size, count)).astype(np.float32)


def allowed(op, rows, half, levels=1):
    """What the docstring of `Compression` allows, with some room for float32 and for terms of second order."""
    total = np.abs(NUMPY[op](rows.astype(np.float64), axis=0))
    parts = np.sum(np.abs(rows), axis=0, dtype=np.float64) / (len(rows) if op == "MEAN" else 1)
    if op in ("MIN", "MAX"):
        parts = total
    return ROUNDOFF[half] * 1.02 * (levels * parts + total) + 2.0**-23
