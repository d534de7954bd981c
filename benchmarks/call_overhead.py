"""Where does the Python time of one small call go?

mpiexec -n 2 python benchmarks/call_overhead.py --out results

Strategies with the header check on and off are timed side by side with what MPI itself takes; README.md beside this
file says what the rows mean.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from all_reduce import (
    RAW,
    Case,
    Inputs,
    measure,
    mpidist_case,
    provenance,
    raw_cases,
    rows_of,
)
from mpi4py import MPI
from record import stolen_seconds, write_rows

import mpidist

_CHECK: Final = "MPIDIST_CHECK"
_PROFILED_CALLS: Final = 20_000


def _strategy(check: bool, comm: MPI.Intracomm) -> mpidist.Strategy:
    """Make a strategy with the header check on or off, which it reads as it is built. Collective."""
    before = os.environ.pop(_CHECK, None)
    os.environ[_CHECK] = "1" if check else "0"
    try:
        return mpidist.MultiWorkerMirroredStrategy(comm=comm)
    finally:
        del os.environ[_CHECK]
        if before is not None:
            os.environ[_CHECK] = before


def _raw_with_header(comm: MPI.Intracomm) -> Case:
    """Do with mpi4py alone what the header check adds: an all-reduce of 16 bytes, polled."""
    sent, received = np.zeros(2, np.int64), np.zeros(2, np.int64)

    def call(array: Any) -> Any:
        test = comm.Iallreduce(sent, received, MPI.MAX).Test
        while not test():
            pass
        result = np.empty_like(array)
        comm.Allreduce(array, result)
        return result

    return Case("raw, header before it", RAW, call)


def _whole_run(strategy: mpidist.Strategy) -> Case:
    """Time a step with nothing in it but the all-reduce, `strategy.run` included."""

    def step(array: Any) -> Any:
        context = mpidist.get_replica_context()
        assert context is not None  # inside strategy.run
        return context.all_reduce(mpidist.ReduceOp.SUM, array)

    return Case("run of all_reduce", RAW, lambda array: strategy.run(step, args=(array,)))


def _our_cases(checked: mpidist.Strategy, unchecked: mpidist.Strategy) -> list[Case]:
    return [
        mpidist_case("all_reduce, no check", unchecked),
        mpidist_case("all_reduce", checked),
        mpidist_case("all_reduce out=, no check", unchecked, in_place=True),
        mpidist_case("all_reduce out=", checked, in_place=True),
        Case("strategy.reduce", RAW, lambda array: checked.reduce(mpidist.ReduceOp.SUM, array)),
        _whole_run(checked),
    ]


def _measure_group(comm: MPI.Intracomm, arguments: argparse.Namespace) -> list[dict[str, str]]:
    """Time calls among the ranks of a communicator. Collective over it."""
    checked, unchecked = _strategy(True, comm), _strategy(False, comm)
    inputs = Inputs([(arguments.bytes // 4,)], False, comm)
    cases = [*raw_cases(comm, inputs), _raw_with_header(comm), *_our_cases(checked, unchecked)]
    where, stolen = provenance(comm, checked), stolen_seconds()
    timings = measure(comm, cases, inputs, arguments.rounds, arguments.seconds)
    where["stolen_seconds"] = f"{stolen_seconds() - stolen:.2f}"
    if arguments.profile and comm.Get_size() > 1:
        _profile(checked, inputs.value, comm.Get_rank())
    unchecked.close()
    checked.close()
    return [where | row for row in rows_of("call", str(arguments.bytes), inputs, timings)]


def _profile(strategy: mpidist.Strategy, array: Any, rank: int) -> None:
    """Print which functions take the time of many calls. Collective."""

    def step() -> None:
        context = mpidist.get_replica_context()
        assert context is not None  # inside strategy.run
        for _ in range(_PROFILED_CALLS):
            context.all_reduce(mpidist.ReduceOp.SUM, array)

    profiler = cProfile.Profile()
    profiler.runcall(strategy.run, step)
    if rank == 0:
        pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(25)


def _print(rows: Sequence[dict[str, str]]) -> None:
    where = rows[0]
    print(
        f"\n{where['mpi']}, {where['ranks']} ranks ({where['placement']}), {where['bytes']} bytes, load {where['load']}"
    )
    print(f"{'':>26} | {'median':>9} | {'rounds':>15} | {'above raw':>9} | {'rounds':>15}")
    for row in rows:
        spread = f"{float(row['us_low']):.2f} to {float(row['us_high']):.2f}"
        above = f"{float(row['above_us_low']):+.2f} to {float(row['above_us_high']):+.2f}"
        print(
            f"{row['case']:>26} | {row['us']:>6} us | {spread:>15} | {float(row['above_us']):>+6.2f} us | {above:>15}"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=4, help="size of the float32 array: %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="medians to take: %(default)s")
    parser.add_argument("--seconds", type=float, default=0.3, help="of one round, about: %(default)s")
    parser.add_argument("--profile", action="store_true", help="also print where cProfile sees the time go")
    parser.add_argument("--out", type=Path, help="folder for the CSV file; without, none is written")
    return parser.parse_args()


def main() -> None:
    """Measure all ranks together, then each alone, where nothing is sent. Collective."""
    arguments, comm = _arguments(), MPI.COMM_WORLD
    together = _measure_group(comm, arguments)
    alone = _measure_group(MPI.COMM_SELF, arguments)
    if comm.Get_rank() > 0:
        return
    _print(together)
    _print(alone)
    if arguments.out:
        name = f"call-overhead-{together[0]['mpi']}-{together[0]['ranks']}-ranks-{together[0]['placement']}.csv"
        write_rows(arguments.out / name.lower().replace(" ", "-"), [*together, *alone])


if __name__ == "__main__":
    main()
