"""A small run of every kernel, for compute-sanitizer: each array is an allocation of its own, so that it sees its ends.

compute-sanitizer --tool memcheck python -m gpu.small_kernels
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import numpy as np

from gpu.measuring import Bench
from gpu.part import run_part
from gpu.report import Report
from mpidist.transport.gpu.kernels import DeviceKernels
from mpidist.transport.half import bfloat16
from mpidist.transport.reduction import Reduction

__all__ = ["measure"]

SIZES = (1, 7, 64, 2048, 2049, 5000)  # below, at and above what a block takes, and none a multiple of the other


def added(rows: Any, dtype: Any) -> Any:
    """Add rows in order, in float32, and round once."""
    total = rows[0].astype(np.float32)
    for row in rows[1:]:
        total += row.astype(np.float32)
    return total.astype(dtype)


def measure(bench: Bench, report: Report) -> None:
    """Run them and look at the numbers; the sanitizer's own findings come from it."""
    if hasattr(bench.cupy.cuda, "set_allocator"):
        bench.cupy.cuda.set_allocator(None)  # no pool, in which arrays lie side by side
    kernels, half = DeviceKernels(bench.cuda), np.dtype(bfloat16())
    bounds = [0, *np.cumsum(SIZES).tolist()]
    for dtype in (np.dtype(np.float32), half, np.dtype(np.float16)):
        host = bench.numbers(bounds[-1])
        arrays = [bench.up(host[a:b].copy()) for a, b in pairwise(bounds)]
        buffer = bench.up(np.zeros(bounds[-1], np.uint8).repeat(dtype.itemsize)).view(dtype)
        kernels.pack(arrays, buffer)
        bench.require_equal(f"pack to {dtype}", buffer, host.astype(dtype))
        kernels.unpack(buffer, arrays, 2)
        for array, (a, b) in zip(arrays, pairwise(bounds), strict=True):
            expected = host[a:b].astype(dtype).astype(np.float32) / np.float32(2)
            bench.require_equal(f"unpack from {dtype}", array, expected)
        rows = bench.numbers(3 * 5000).astype(dtype).reshape(3, 5000)
        parts = [bench.up(row.view(np.uint8)).view(dtype) for row in rows]
        out = bench.up(np.zeros(5000 * dtype.itemsize, np.uint8)).view(dtype)
        kernels.combine(parts, Reduction("sum"), out)
        bench.require_equal(f"sum of {dtype}", out, added(rows, dtype))
    report.add("a small run of the kernels", f"{kernels.num_launches} launches, right numbers", True)


if __name__ == "__main__":
    sys.exit(run_part(__doc__ or "", measure))
