"""One part of the check alone: `PYTHONPATH=.. python -m gpu gpu.kernels:measure`, from `benchmarks`.

`GPU_CHECK_OUT` is a file for the answers, `GPU_CHECK_TINY=1` shows whether it runs, `GPU_CHECK_RANKS=2` is for mpiexec.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from importlib import import_module
from pathlib import Path

from gpu.bench import Bench
from gpu.report import NOT_MEASURED, Report

if __name__ == "__main__":
    faulthandler.enable()
    comm = import_module("mpi4py.MPI").COMM_WORLD if os.environ.get("GPU_CHECK_RANKS", "0") != "0" else None
    bench, out = Bench(os.environ.get("GPU_CHECK_TINY") == "1", comm), os.environ.get("GPU_CHECK_OUT")
    report = Report(Path(out) if out and bench.rank == 0 else None, bench.rank == 0, not bench.is_tiny)
    module, _, function = sys.argv[1].partition(":")
    getattr(import_module(module), function)(bench, report)
    sys.exit(any(row.got == NOT_MEASURED for row in report.rows))
