"""Are eight pieces of half precision added in float32 in one launch, as fast as memory allows? (G14)"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from gpu.measuring import Bench
from gpu.pack import launches_of, share_of_roof
from gpu.part import run_part
from gpu.report import Report
from mpidist.transport.gpu.kernels import DeviceKernels
from mpidist.transport.half import bfloat16
from mpidist.transport.reduction import Reduction

__all__ = ["measure"]

PIECES, SETS = 8, 2
BYTES = 25 << 20  # of a piece


def added(rows: Any, dtype: Any) -> Any:
    """Add rows in order, in float32, and round once."""
    total = rows[0].astype(np.float32)
    for row in rows[1:]:
        total += row.astype(np.float32)
    return total.astype(dtype)


def measure_sum(bench: Bench, report: Report, dtype: Any) -> None:
    """Add pieces of one dtype."""
    kernels, dtype = DeviceKernels(bench.cuda), np.dtype(dtype)
    count = bench.nbytes(BYTES) // dtype.itemsize
    calls = []
    for _ in range(SETS):
        host = bench.numbers(PIECES * count).astype(dtype).reshape(PIECES, count)
        rows, out = bench.up(host.view(np.uint8)).view(dtype), bench.empty(count, dtype)
        bench.poison(out)
        kernels.combine(rows, Reduction("sum"), out)
        bench.require_equal(f"sum of {dtype} pieces", out, added(host, dtype))
        calls.append(lambda rows=rows, out=out: kernels.combine(rows, Reduction("sum"), out))
    (times,) = bench.gpu_times({f"sum {dtype}": calls}, bench.turns(50)).values()
    question = f"sum of {PIECES} {dtype} pieces of {count * dtype.itemsize / 1e6:.1f} MB, float32 accumulator"
    launches = launches_of(kernels, calls[0])
    share_of_roof(bench, report, "G14", question, (PIECES + 1) * count * dtype.itemsize, times, 85, launches)


def measure(bench: Bench, report: Report) -> None:
    """Answer for bfloat16, and for float16 and float32 beside it."""
    for dtype in (bfloat16(), np.float16, np.float32):
        with report.question("G14", f"sum of {PIECES} {np.dtype(dtype)} pieces"):
            measure_sum(bench, report, dtype)


if __name__ == "__main__":
    sys.exit(run_part(__doc__ or "", measure))
