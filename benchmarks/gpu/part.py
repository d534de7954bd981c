"""How one part of the check is run as a program of its own."""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
from collections.abc import Callable
from pathlib import Path

from gpu.measuring import Bench
from gpu.report import Report
from mpidist.transport import cuda

__all__ = ["NO_GPU", "run_part"]

NO_GPU = 3  # what a part exits with where there is none


def run_part(title: str, measure: Callable[[Bench, Report], None], rank: int = 0) -> int:
    """Read `--out` and `--tiny`, measure, and say what became of it.

    Args:
        title: For `--help`.
        measure: Measures.
        rank: The rank of this process; the first one reports.

    Returns:
        0; 1 if a question could not be answered; 3 where there is no GPU.
    """
    faulthandler.enable()
    parser = argparse.ArgumentParser(description=title.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    parser.add_argument("--tiny", action="store_true", help="see whether it runs")
    given = parser.parse_args()
    found = cuda.current()
    if not found.support.num_devices:
        print(f"nothing can be measured here: {found.support.reason}", file=sys.stderr)
        return NO_GPU
    found.cupy.cuda.Device(rank % found.support.num_devices).use()
    report = Report(given.out if rank == 0 else None, shows=rank == 0)
    measure(Bench(found, given.tiny or os.environ.get("GPU_CHECK_TINY") == "1"), report)
    return int(report.num_failed > 0)
