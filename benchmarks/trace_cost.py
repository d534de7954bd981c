"""What a trace costs a call: blocks of small all-reduces in turn without and with a trace, and the medians of both.

$ mpiexec -n 2 python benchmarks/trace_cost.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import nullcontext
from functools import partial

import numpy as np
from mpi4py import MPI

import mpidist

__all__ = ["main"]


def block(strategy: mpidist.Strategy, num_calls: int) -> float:
    """Return the microseconds of a call, on the rank that calls."""
    value = np.ones(1, np.float32)
    call = partial(mpidist.get_replica_context().all_reduce, "sum")
    for _ in range(10):
        call(value)
    start = time.perf_counter()
    for _ in range(num_calls):
        call(value)
    return (time.perf_counter() - start) / num_calls * 1e6


def main() -> None:
    """Measure, and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000, help="in a block")
    parser.add_argument("--blocks", type=int, default=31, help="of each kind")
    arguments = parser.parse_args()
    with mpidist.MultiWorkerMirroredStrategy() as strategy, tempfile.TemporaryDirectory() as own:
        folder = MPI.COMM_WORLD.bcast(own, 0)
        found: dict[str, list[float]] = {"no trace": [], "trace": []}
        for _ in range(arguments.blocks):
            for name, times in found.items():
                with strategy.trace(folder) if name == "trace" else nullcontext():
                    times.append(strategy.run(block, (strategy, arguments.calls)))
        if strategy.is_chief:
            for name, times in found.items():
                low, _, high = statistics.quantiles(times, n=4)
                print(f"{name:>8}: {statistics.median(times):.2f} us a call ({low:.2f} to {high:.2f})")
        strategy.reduce("sum", 0)  # nobody removes the folder before all are done


if __name__ == "__main__":
    main()
