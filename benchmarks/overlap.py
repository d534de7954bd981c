"""How much of a reduction hides behind computation, when it is started early?

mpiexec -n 2 python benchmarks/overlap.py

A step computes pieces of work and has a bucket of gradients ready after each, as back-propagation does. Three ways:
compute alone; reduce every bucket when all are there; start each bucket's reduction when it is there, and wait last.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from all_reduce import provenance
from mpi4py import MPI
from record import write_rows

import mpidist

__all__ = ["main"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buckets", type=int, default=16, help="number of buckets: %(default)s")
    parser.add_argument("--kib", type=int, default=1024, help="size of a bucket in KiB: %(default)s")
    parser.add_argument("--work", type=int, default=192, help="rows of the matrices multiplied for each: %(default)s")
    parser.add_argument("--steps", type=int, default=60, help="steps of each way: %(default)s")
    parser.add_argument("--out", type=Path, help="folder for the CSV file; without, none is written")
    return parser.parse_args()


def main() -> None:
    """Measure and print. Collective."""
    given, comm = _arguments(), MPI.COMM_WORLD
    gradients = [np.ones(given.kib * 256, np.float32) for _ in range(given.buckets)]
    matrix = np.ones((given.work, given.work), np.float32)

    def compute(bucket: Any) -> None:
        np.matmul(matrix, matrix)
        bucket.fill(comm.Get_rank())

    def alone() -> None:
        for bucket in gradients:
            compute(bucket)

    def after() -> None:
        alone()
        mpidist.get_replica_context().all_reduce("sum", gradients, out=gradients)

    def early() -> None:
        context, handles = mpidist.get_replica_context(), []
        for bucket in gradients:
            compute(bucket)
            handles.append(context.start_all_reduce("sum", bucket, out=bucket))
        for handle in handles:
            handle.wait()

    ways = {"compute alone": alone, "reduce after": after, "start early": early}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        for step in range(given.steps + 1):
            for name, way in ways.items():
                comm.Barrier()
                start = perf_counter()
                strategy.run(way)
                took = comm.allreduce(perf_counter() - start, MPI.MAX)
                if step:
                    seconds[name].append(took)
                if name != "compute alone":
                    total = comm.Get_size() * (comm.Get_size() - 1) // 2
                    assert all(bucket[0] == bucket[-1] == total for bucket in gradients)
        median = {name: float(np.median(times)) * 1e3 for name, times in seconds.items()}
        reducing = median["reduce after"] - median["compute alone"]
        hidden = (median["reduce after"] - median["start early"]) / reducing
        where = provenance(comm, strategy)
    if comm.Get_rank() == 0:
        print(", ".join(f"{name} {text}" for name, text in where.items()))
        print("  ".join(f"{name} {time:.2f} ms" for name, time in median.items()) + f"  hidden {hidden:.0%}")
        if given.out:
            write_rows(given.out / "overlap.csv", [where | {name: f"{time:.3f}" for name, time in median.items()}])


if __name__ == "__main__":
    main()
