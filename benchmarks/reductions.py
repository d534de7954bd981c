"""How fast are the other reductions, beside what a user would write with mpi4py alone?

mpiexec -n 2 python benchmarks/reductions.py --out results

Other operations than the sum, other collectives, half precision, and results that are the same on any placement.
README.md beside this file says what the columns mean and how to be fair.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, Final, final

import ml_dtypes
import numpy as np
from all_reduce import provenance
from mpi4py import MPI
from record import parse_size, stolen_seconds, text_of, write_rows

import mpidist

__all__ = ["Pair", "measure", "pairs"]

_SIZES: Final = "64K,1M,16M,64M"
_REPRODUCIBLE: Final = mpidist.CommunicationOptions(reproducible=True)
_PRODUCT: Final = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}


@final
@dataclass(frozen=True)
class Pair:
    """Two ways to do the same, or nearly.

    Attributes:
        name: For people.
        theirs: What is held against ours: a function that returns the result, or `None` where this rank has none.
        ours: What is measured.
        want: Every number of the result.
        asked: The ratio, theirs / ours, that this project wants.
    """

    name: str
    theirs: Callable[[], Any]
    ours: Callable[[], Any]
    want: float
    asked: float = 1.0


@final
class _Raw:
    """What a user writes with mpi4py. Every rank's numbers are its rank + 1."""

    def __init__(self, comm: MPI.Intracomm, array: Any) -> None:
        self._comm, self._array = comm, array
        bounds = np.linspace(0, array.size, comm.Get_size() + 1).astype(int)
        self._counts = [int(stop - start) for start, stop in pairwise(bounds)]
        self.shard = array[: self._counts[comm.Get_rank()]]

    def all_reduce(self, op: MPI.Op = MPI.SUM) -> Any:
        self._comm.Allreduce(MPI.IN_PLACE, self._array, op)
        return self._array

    def mean(self) -> Any:
        return np.divide(self.all_reduce(), np.float32(self._comm.Get_size()), out=self._array)

    def reduce(self) -> Any:
        result = np.empty_like(self._array) if self._comm.Get_rank() == 0 else None
        self._comm.Reduce(self._array, result)
        return result

    def broadcast(self) -> Any:
        result = self._array.copy() if self._comm.Get_rank() == 0 else np.empty_like(self._array)
        self._comm.Bcast(result)
        return result

    def reduce_scatter(self) -> Any:
        result = np.empty_like(self.shard)
        self._comm.Reduce_scatter(self._array, result, self._counts)
        return result

    def all_gather(self) -> Any:
        result = np.empty_like(self._array)
        self._comm.Allgatherv(self.shard, [result, self._counts])
        return result


def pairs(comm: MPI.Intracomm, strategy: mpidist.Strategy, array: Any) -> Iterator[tuple[Pair, list[Any]]]:
    """List what is compared, with the arrays that are written before each step.

    Args:
        comm: The ranks.
        strategy: Over the same ranks.
        array: [n], float32.
    """
    size, raw, extended = comm.Get_size(), _Raw(comm, array), strategy.extended
    total = size * (size + 1) / 2
    wants = {"sum": total, "max": size, "min": 1, "prod": float(np.prod(np.arange(1, size + 1)))}

    def reduced(op: str, of: Any, options: Any = None) -> Callable[[], Any]:
        return lambda: strategy.run(lambda: _context().all_reduce(op, of, options, out=of))

    for name, op in _PRODUCT.items():
        yield Pair(name, lambda op=op: raw.all_reduce(op), reduced(name, array), wants[name]), [array]  # type: ignore[misc]
    yield Pair("mean", raw.mean, reduced("mean", array), total / size), [array]
    # A half precision array of as many elements, against float32.
    for dtype in (np.float16, ml_dtypes.bfloat16):
        half = np.empty(array.size, dtype)
        yield Pair(f"sum of {half.dtype}", raw.all_reduce, reduced("sum", half), total), [array, half]
    default = reduced("sum", array)
    yield Pair("reproducible", default, reduced("sum", array, _REPRODUCIBLE), total, 1 / 1.5), [array]
    yield Pair("reduce", raw.reduce, lambda: extended.reduce_to("sum", array, 0), total), [array]
    yield Pair("broadcast", raw.broadcast, lambda: extended.broadcast_to(array, "all"), 1), [array]
    scatter = lambda: strategy.run(lambda: _context().reduce_scatter("sum", array))  # noqa: E731
    yield Pair("reduce_scatter", raw.reduce_scatter, scatter, total), [array]
    gather = lambda: strategy.run(lambda: _context().all_gather(raw.shard, 0))  # noqa: E731
    yield Pair("all_gather", raw.all_gather, gather, -1), [array]


def _context() -> mpidist.ReplicaContext:
    context = mpidist.get_replica_context()
    assert context is not None  # inside strategy.run
    return context


def measure(comm: MPI.Intracomm, pair: Pair, arrays: list[Any], rounds: int, seconds: float) -> Any:
    """Time both of a pair in turn. Collective.

    Returns:
        [2, rounds]: the median step of each round, in seconds, theirs first.
    """
    both = (pair.theirs, pair.ours)
    for call in both:
        _step(comm, pair, call, arrays)
    start = perf_counter()
    for call in both:
        _step(comm, pair, call, arrays)
    steps = int(comm.bcast(max(3, min(300, int(seconds / (perf_counter() - start)))), 0))
    times = np.empty((2, rounds, steps))
    for at_round in range(rounds):
        for step in range(steps):
            for at, call in enumerate(both):
                times[at, at_round, step] = _step(comm, pair, call, arrays)
    comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    return np.median(times, axis=2)


def _step(comm: MPI.Intracomm, pair: Pair, call: Callable[[], Any], arrays: list[Any]) -> float:
    for array in arrays:
        array.fill(1 + comm.Get_rank())
    comm.Barrier()
    start = perf_counter()
    result = call()
    seconds = perf_counter() - start
    if result is not None and result.size:
        ends = {float(result.flat[0]), float(result.flat[-1])}
        if ends != ({1.0, float(comm.Get_size())} if pair.want < 0 else {pair.want}):
            raise ArithmeticError(f"{pair.name}: {sorted(ends)} instead of {pair.want}")
    return seconds


def _row(pair: Pair, nbytes: int, rounds: Any) -> dict[str, str]:
    theirs, ours = np.median(rounds, axis=1) * 1e6
    ratios = rounds[0] / rounds[1]
    return {
        "bytes": str(nbytes),
        "case": pair.name,
        "rounds": str(rounds.shape[1]),
        "theirs_us": f"{theirs:.2f}",
        "us": f"{ours:.2f}",
        "ratio": f"{np.median(ratios):.3f}",
        "ratio_low": f"{ratios.min():.3f}",
        "ratio_high": f"{ratios.max():.3f}",
        "asked": f"{pair.asked:.2f}",
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=_SIZES, help="bytes of the float32 array: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="medians to take: %(default)s")
    parser.add_argument("--seconds", type=float, default=0.3, help="of one round of one pair, about: %(default)s")
    parser.add_argument("--out", type=Path, help="folder for the CSV file; without, none is written")
    return parser.parse_args()


def main() -> None:
    """Measure, print and save. Collective."""
    given, comm = _arguments(), MPI.COMM_WORLD
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        where, stolen, is_first = provenance(comm, strategy), stolen_seconds(), comm.Get_rank() == 0
        if is_first:
            print(", ".join(f"{name} {text}" for name, text in where.items()))
            print(f"{'bytes':>6} {'':>16} {'theirs':>10} {'mpidist':>10} {'ratio':>6}")
        rows = []
        for text in given.sizes.split(","):
            array = np.empty(parse_size(text) // 4, np.float32)
            for pair, arrays in pairs(comm, strategy, array):
                row = _row(pair, array.nbytes, measure(comm, pair, arrays, given.rounds, given.seconds))
                rows.append(where | {"stolen_seconds": f"{stolen_seconds() - stolen:.2f}"} | row)
                if is_first:
                    times = f"{text_of(float(row['theirs_us'])):>10} {text_of(float(row['us'])):>10}"
                    print(f"{text:>6} {pair.name:>16} {times} {float(row['ratio']):>6.2f}", flush=True)
    if is_first and given.out:
        name = f"reductions-{where['mpi'].lower().replace(' ', '-')}-{where['ranks']}-ranks.csv"
        write_rows(given.out / name, rows)
        print(f"written: {given.out / name}")


if __name__ == "__main__":
    main()
