"""What does it cost that nobody waits for ever, and how soon does a rank notice?

mpiexec -n 2 python benchmarks/watching.py --out results

Small calls with and without the header check and a deadline, side by side; MPI's blocking calls beside the polled ones
that take their place; the flight recorder; and how far behind their deadline ranks give up. README.md beside this file
says what the rows mean.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from all_reduce import Case, Inputs, measure, mpidist_case, provenance, rows_of
from mpi4py import MPI
from record import parse_size, stolen_seconds, text_of, write_rows

import mpidist
from mpidist.transport.failures.flight_recorder import FLIGHT_BYTES, FlightRecorder
from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.reduction import Reduction

_DEADLINE: Final = 0.2  # seconds
_BLOCKING: Final = "blocking Allreduce"
_UNCHECKED: Final = "no check"
_RECORDED: Final = 100_000
_SWITCHES: Final = {
    _UNCHECKED: {"MPIDIST_CHECK": "0"},
    "check": {},
    "check, deadline": {"MPIDIST_TIMEOUT_SECONDS": "600"},
}


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables that a strategy reads as it is built."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _strategy(comm: MPI.Intracomm, variables: dict[str, str]) -> mpidist.Strategy:
    with _environment(variables):
        return mpidist.MultiWorkerMirroredStrategy(comm=comm)


def _measure_switches(comm: MPI.Intracomm, arguments: argparse.Namespace) -> list[dict[str, str]]:
    """Time a call of 4 bytes with the check, and a deadline, off and on. Collective."""
    strategies = {name: _strategy(comm, variables) for name, variables in _SWITCHES.items()}
    inputs = Inputs([(1,)], False, comm)
    cases = [_held_against(_UNCHECKED, mpidist_case(name, strategy)) for name, strategy in strategies.items()]
    where = provenance(comm, strategies[_UNCHECKED])
    rows = rows_of("check", "4", inputs, measure(comm, cases, inputs, arguments.rounds, arguments.seconds))
    for strategy in strategies.values():
        strategy.close()
    return [where | row for row in rows]


def _held_against(baseline: str, case: Case) -> Case:
    return Case(case.name, baseline, case.call, case.within)


def _measure_polling(comm: MPI.Intracomm, arguments: argparse.Namespace) -> list[dict[str, str]]:
    """Time MPI's blocking all-reduce beside the one of the transport, which never blocks. Collective."""
    polled, rows = MpiCommunicator(comm.Dup(), "polled"), []
    with _environment({"MPIDIST_TRANSPORT": "mpi"}):
        strategy = mpidist.MultiWorkerMirroredStrategy(comm=comm)
    where, total = provenance(comm, strategy), Reduction("sum")

    def blocking(array: Any) -> Any:
        comm.Allreduce(MPI.IN_PLACE, array)
        return array

    def polling(array: Any) -> Any:
        polled.all_reduce(array, total)
        return array

    cases = [Case(_BLOCKING, _BLOCKING, blocking), Case("polled", _BLOCKING, polling)]
    for text in arguments.sizes.split(","):
        inputs = Inputs([(max(1, parse_size(text) // 4),)], False, comm)
        timings = measure(comm, cases, inputs, arguments.rounds, arguments.seconds)
        rows += [where | row for row in rows_of("polling", text, inputs, timings)]
    polled.free()
    strategy.close()
    return rows


def _measure_recorder(rounds: int) -> list[float]:
    """Time one recorded call, all three notes of it, in microseconds. Local."""
    recorder, times = FlightRecorder(np.zeros(FLIGHT_BYTES, np.uint8)), []
    for _ in range(rounds):
        start = time.perf_counter()
        for number in range(_RECORDED):
            recorder.begin(number, "all_reduce", "SUM of 3 x float32")
            recorder.agree()
            recorder.end()
        times.append((time.perf_counter() - start) / _RECORDED * 1e6)
    return times


def _measure_lateness(comm: MPI.Intracomm, times: int) -> list[float]:
    """Let the last rank be late, and see how long after the deadline the others raise, in ms. Collective."""
    strategy = _strategy(comm, {"MPIDIST_TIMEOUT_SECONDS": str(_DEADLINE), "MPIDIST_FLIGHT_DIR": "off"})
    overshoot = []
    for _ in range(times):
        comm.Barrier()
        start = time.monotonic()
        if comm.rank < comm.size - 1:
            waited = _seconds_until_it_raises(lambda: strategy.reduce("SUM", 1.0), start)
            overshoot.append((waited - _DEADLINE) * 1e3)
        comm.Barrier()
        strategy.reset()
    strategy.close()
    return overshoot


def _seconds_until_it_raises(call: Callable[[], Any], start: float) -> float:
    try:
        call()
    except mpidist.errors.DeadlineExceededError:
        return time.monotonic() - start
    raise AssertionError("a rank is late, and nobody noticed")


def _single(where: dict[str, str], kind: str, case: str, unit: str, numbers: list[float]) -> dict[str, str]:
    row = {"kind": kind, "case": case, "rounds": str(len(numbers))}
    spread = {"": float(np.median(numbers)), "_low": min(numbers), "_high": max(numbers)}
    return where | row | {f"{unit}{end}": f"{number:.3f}" for end, number in spread.items()}


def _print(rows: list[dict[str, str]], singles: list[dict[str, str]]) -> None:
    where = rows[0]
    print(f"{where['mpi']}, {where['ranks']} ranks ({where['placement']}), load {where['load']}")
    for row in rows:
        above, low, high = (float(row[name]) for name in ("above_us", "above_us_low", "above_us_high"))
        ratio = f"{1 / float(row['ratio']):.2f} x {row['baseline']}"
        print(
            f"{row['shape']:>6} | {row['case']:>20} | {text_of(float(row['us'])):>8} | "
            f"{above:>+9.2f} us ({low:+.2f} to {high:+.2f}) | {ratio}"
        )
    for row in singles:
        unit = "us" if "us" in row else "ms"
        spread = f"{row[unit]} {unit} ({row[f'{unit}_low']} to {row[f'{unit}_high']})"
        print(f"{row['case']:>29} | {spread}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="64,16K,256K,4M,64M", help="of the polled all-reduce: %(default)s")
    parser.add_argument("--rounds", type=int, default=11, help="medians to take: %(default)s")
    parser.add_argument("--seconds", type=float, default=0.3, help="of one round, about: %(default)s")
    parser.add_argument("--late", type=int, default=20, help="how often a rank is late: %(default)s")
    parser.add_argument("--out", type=Path, help="folder for the CSV files; without, none are written")
    return parser.parse_args()


def main() -> None:
    """Measure. Collective."""
    arguments, comm, stolen = _arguments(), MPI.COMM_WORLD, stolen_seconds()
    if comm.size == 1:
        raise SystemExit("nobody waits for anybody on one rank: mpiexec -n 2 python benchmarks/watching.py")
    rows = _measure_switches(comm, arguments) + _measure_polling(comm, arguments)
    late = _measure_lateness(comm, arguments.late)
    if comm.rank > 0:
        return
    where = {name: rows[0][name] for name in ("date", "commit", "mpi", "python", "numpy", "cpus", "ranks", "placement")}
    singles = [
        _single(where, "recorder", "flight recorder, one call", "us", _measure_recorder(arguments.rounds)),
        _single(where, "late", f"after a deadline of {_DEADLINE:g} s", "ms", late),
    ]
    _print(rows, singles)
    print(f"stolen from this machine meanwhile: {stolen_seconds() - stolen:.2f} s")
    if arguments.out is not None:
        stem = f"watching-{where['mpi'].split()[0].lower()}-{where['ranks']}-ranks-{where['placement'].split()[0]}"
        write_rows(arguments.out / f"{stem}.csv", rows)
        write_rows(arguments.out / f"{stem}-times.csv", singles)


if __name__ == "__main__":
    main()
