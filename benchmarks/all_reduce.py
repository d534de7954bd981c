"""How fast is an all-reduce, next to what a user would write with mpi4py alone?

mpiexec -n 2 python benchmarks/all_reduce.py --out results

README.md beside this file says what the columns mean and how to be fair.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final, final

import numpy as np
from mpi4py import MPI
from record import SHAPES, commit_of, parse_size, shapes_of_list, stolen_seconds, text_of, write_rows

import mpidist

__all__ = [
    "RAW", "RAW_IN_PLACE", "Case", "Inputs", "Timing", "measure", "mpidist_case", "provenance", "raw_cases", "rows_of",
]  # fmt: skip

RAW: Final = "raw"
RAW_IN_PLACE: Final = "raw in place"
BUCKET: Final = "bucket"
BUCKET_IN_PLACE: Final = "bucket in place"

_SIZES: Final = "4,64,1K,4K,16K,64K,256K,1M,4M,16M,64M,256M"
_QUICK: Final = ("4,4K,256K,4M", "tiny1000,resnet50", 2, 0.1)
_LISTS: Final = "tiny1000,resnet50,bert_base,gpt2_small"
_SMALL_BYTES: Final = 64 << 10  # above this a call's Python time is lost in its copies
_PATTERN: Final = 251  # prime, so that no chunk or shard starts where the pattern does
_LEAST_STEPS: Final = 3
_MOST_STEPS: Final = 300


@final
@dataclass(frozen=True)
class Case:
    """One way to all-reduce.

    Attributes:
        name: For people.
        baseline: The raw case that gives what this one gives: new results, or results in place.
        call: What is timed: a value to its result.
        within: Calls a function in the context that `call` needs.
    """

    name: str
    baseline: str
    call: Callable[[Any], Any]
    within: Callable[[Callable[[], Any]], Any] = lambda function: function()


@final
@dataclass(frozen=True)
class Timing:
    """What a case took, in seconds.

    Attributes:
        case: The case.
        first: The first call, which plans, allocates and connects.
        rounds: [rounds], the median step of each.
        steps: Number of steps in a round.
    """

    case: Case
    first: float
    rounds: np.ndarray[Any, Any]
    steps: int


@final
class Inputs:
    """What is reduced: float32 arrays that are written anew before every step, as gradients are.

    Args:
        shapes: The shape of each array.
        is_list: Whether the value is a list; else it is the first array.
        comm: The ranks.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], is_list: bool, comm: MPI.Intracomm) -> None:
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self._arrays = [np.empty(shape, np.float32) for shape in shapes]
        self.value: Any = self._arrays if is_list else self._arrays[0]
        self.nbytes = sum(array.nbytes for array in self._arrays)
        self.count = len(self._arrays)

    def fill(self, number: int) -> None:
        """Write `number + rank` everywhere."""
        for array in self._arrays:
            array.fill(number + self._rank)

    def write_pattern(self) -> None:
        """Write numbers that differ from place to place, so that a shard in the wrong place shows."""
        for array in self._arrays:
            array[...] = _pattern(array)
            array += self._rank

    def check(self, result: Any, number: int | None, name: str) -> None:
        """Raise unless a result is right: all of it against the pattern, or each array's ends against `number`."""
        results = result if isinstance(self.value, list) else [result]
        ranks = self._size * (self._size - 1) // 2
        for array, got in zip(self._arrays, results, strict=True):
            if got.shape != array.shape:
                raise ArithmeticError(f"{name}: shape {got.shape} came back for {array.shape}")
            if number is None:
                is_right = np.array_equal(got, self._size * _pattern(array) + ranks)
            else:
                is_right = {float(got.flat[0]), float(got.flat[-1])} == {float(self._size * number + ranks)}
            if not is_right:
                raise ArithmeticError(f"{name}: the sum of {self._size} ranks is wrong for an array {array.shape}")


def _pattern(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.resize(np.arange(_PATTERN, dtype=np.float32), array.shape)


def raw_cases(comm: MPI.Intracomm, inputs: Inputs) -> list[Case]:
    """List what a user would write without mpidist."""

    def fresh(array: Any) -> Any:
        result = np.empty_like(array)
        comm.Allreduce(array, result)
        return result

    def in_place(array: Any) -> Any:
        comm.Allreduce(MPI.IN_PLACE, array)
        return array

    if not isinstance(inputs.value, list):
        return [Case(RAW, RAW, fresh), Case(RAW_IN_PLACE, RAW_IN_PLACE, in_place)]
    kept = np.empty(inputs.nbytes // 4, np.float32)

    def bucket(arrays: list[Any]) -> list[Any]:
        flat = np.concatenate([array.reshape(-1) for array in arrays])
        return [part.reshape(array.shape) for part, array in zip(_cut(in_place(flat), arrays), arrays, strict=True)]

    def bucket_in_place(arrays: list[Any]) -> list[Any]:
        in_place(np.concatenate([array.reshape(-1) for array in arrays], out=kept))
        for part, array in zip(_cut(kept, arrays), arrays, strict=True):
            array.reshape(-1)[...] = part
        return arrays

    return [
        Case(RAW, RAW, lambda arrays: [fresh(array) for array in arrays]),
        Case(RAW_IN_PLACE, RAW_IN_PLACE, lambda arrays: [in_place(array) for array in arrays]),
        Case(BUCKET, RAW, bucket),
        Case(BUCKET_IN_PLACE, RAW_IN_PLACE, bucket_in_place),
    ]


def _cut(flat: Any, arrays: list[Any]) -> Iterator[Any]:
    at = 0
    for array in arrays:
        yield flat[at : at + array.size]
        at += array.size


def mpidist_case(name: str, strategy: mpidist.Strategy, in_place: bool = False) -> Case:
    """Reduce as the function of `strategy.run` does, into new arrays or into the arguments themselves."""

    def call(value: Any) -> Any:
        context = mpidist.get_replica_context()
        assert context is not None  # inside strategy.run
        return context.all_reduce(mpidist.ReduceOp.SUM, value, out=value if in_place else None)

    return Case(name, RAW_IN_PLACE if in_place else RAW, call, strategy.run)


def measure(comm: MPI.Intracomm, cases: Sequence[Case], inputs: Inputs, rounds: int, seconds: float) -> list[Timing]:
    """Time cases side by side: A B C A B C. Collective.

    Every step writes the inputs, waits for all ranks, and counts what the slowest rank took.

    Args:
        comm: The ranks.
        cases: What is compared.
        inputs: What is reduced.
        rounds: How many medians to take of each case.
        seconds: About how long one round shall last.
    """
    first = np.empty(len(cases))
    for at, case in enumerate(cases):
        inputs.write_pattern()
        first[at], result = _step(comm, case, inputs.value)
        inputs.check(result, None, case.name)
    steps = _num_steps(comm, cases, inputs, seconds)
    times = np.empty((len(cases), rounds, steps))
    for at_round in range(rounds):
        for step in range(steps):
            for at, case in enumerate(cases):
                number = 1 + step % 8
                inputs.fill(number)
                times[at, at_round, step], result = _step(comm, case, inputs.value)
                inputs.check(result, number, case.name)
                result = None  # its memory goes back outside of the next step
    for measured in (first, times):
        comm.Allreduce(MPI.IN_PLACE, measured, MPI.MAX)
    medians = np.median(times, axis=2)
    return [Timing(case, first[at], medians[at], steps) for at, case in enumerate(cases)]


def _step(comm: MPI.Intracomm, case: Case, value: Any) -> tuple[float, Any]:
    def timed() -> tuple[float, Any]:
        comm.Barrier()
        start = perf_counter()
        result = case.call(value)
        return perf_counter() - start, result

    seconds, result = case.within(timed)
    return seconds, result


def _num_steps(comm: MPI.Intracomm, cases: Sequence[Case], inputs: Inputs, seconds: float) -> int:
    """Warm every case up once more, and say how often they all go into `seconds`."""
    start = perf_counter()
    for case in cases:
        inputs.fill(0)
        _step(comm, case, inputs.value)
    fits = int(seconds / (perf_counter() - start))
    return int(comm.bcast(max(_LEAST_STEPS, min(_MOST_STEPS, fits)), 0))


def _strategies() -> dict[str, mpidist.Strategy]:
    """Make one strategy for each algorithm. Collective."""
    make, ring = mpidist.MultiWorkerMirroredStrategy, mpidist.CommunicationOptions(implementation="RING")
    return {
        "Collective": make(cross_device_ops=mpidist.CollectiveAllReduce()),
        "Hierarchical": make(cross_device_ops=mpidist.HierarchicalCopyAllReduce()),
        "ToOneDevice": make(cross_device_ops=mpidist.ReductionToOneDevice()),
        "ring": make(communication_options=ring),
        "reproducible": make(communication_options=mpidist.CommunicationOptions(reproducible=True)),
    }


def provenance(comm: MPI.Intracomm, strategy: mpidist.Strategy) -> dict[str, str]:
    """Say what was measured, on what; machines and people are not named. Collective."""
    name, version = MPI.get_vendor()
    sizes = "+".join(map(str, strategy.topology.node_sizes))
    return {
        "date": datetime.date.today().isoformat(),
        "commit": comm.bcast(commit_of(Path(mpidist.__file__).parent.parent), 0),
        "mpi": f"{name} {'.'.join(map(str, version))}",
        "ranks": str(comm.Get_size()),
        "placement": sizes + " pretended" * ("MPIDIST_PRETEND_NODES" in os.environ),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpus": str(os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.2f}",
    }


def rows_of(kind: str, shape: str, inputs: Inputs, timings: Sequence[Timing]) -> list[dict[str, str]]:
    """Make one row of text per case: medians and lowest and highest rounds, in microseconds and as ratios."""
    of = {timing.case.name: timing.rounds for timing in timings}
    rows = []
    for timing in timings:
        raw = of[timing.case.baseline]
        ratios, above = raw / timing.rounds, (timing.rounds - raw) * 1e6
        row = {"kind": kind, "shape": shape, "bytes": str(inputs.nbytes), "arrays": str(inputs.count)}
        row |= {"case": timing.case.name, "baseline": timing.case.baseline}
        row |= {"rounds": str(len(raw)), "steps": str(timing.steps), "first_us": f"{timing.first * 1e6:.1f}"}
        row |= _spread("us", timing.rounds * 1e6, 2) | _spread("ratio", ratios, 3) | _spread("above_us", above, 2)
        if kind == "list":
            bucket = of[BUCKET if timing.case.baseline == RAW else BUCKET_IN_PLACE]
            row["ratio_to_bucket"] = f"{np.median(bucket / timing.rounds):.3f}"
        rows.append(row)
    return rows


def _spread(name: str, rounds: np.ndarray[Any, Any], digits: int) -> dict[str, str]:
    numbers = {name: np.median(rounds), f"{name}_low": rounds.min(), f"{name}_high": rounds.max()}
    return {key: f"{number:.{digits}f}" for key, number in numbers.items()}


def _print_row(shape: str, rows: Sequence[dict[str, str]]) -> None:
    cells = [f"{text_of(float(row['us'])):>8} {float(row['ratio']):>6.2f}" for row in rows]
    print(f"{shape:>10} | " + " | ".join(cells), flush=True)
    notes = ["" for _ in rows]
    if rows[0]["kind"] == "list":
        notes = [f"to bucket {float(row['ratio_to_bucket']):.2f}" for row in rows]
    elif int(rows[0]["bytes"]) <= _SMALL_BYTES:
        notes = [f"{float(row['above_us']):+.3g} us" * (row["case"] != row["baseline"]) for row in rows]
    if any(notes):
        print(f"{'':>10} | " + " | ".join(f"{note:>15}" for note in notes), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ", ".join(sorted(path.stem for path in SHAPES.glob("*.json")))
    parser.add_argument("--sizes", default=_SIZES, help="bytes: %(default)s; '' for none")
    parser.add_argument("--lists", default=_LISTS, help=f"of {known}: %(default)s; '' for none")
    parser.add_argument("--rounds", type=int, default=5, help="medians to take: %(default)s")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one round of one size, about: %(default)s")
    parser.add_argument("--out", type=Path, help="folder for the CSV file; without, none is written")
    parser.add_argument("--quick", action="store_true", help="in place of the above, few of each: does it run?")
    given = parser.parse_args()
    if given.quick:
        given.sizes, given.lists, given.rounds, given.seconds = _QUICK
    return given


def _runs(arguments: argparse.Namespace) -> Iterator[tuple[str, str, list[tuple[int, ...]]]]:
    for text in filter(None, arguments.sizes.split(",")):
        yield "size", text, [(parse_size(text) // 4,)]
    for name in filter(None, arguments.lists.split(",")):
        yield "list", name, shapes_of_list(name)


def main() -> None:
    """Measure, print and save. Collective."""
    arguments, comm = _arguments(), MPI.COMM_WORLD
    strategies = _strategies()
    ours = [mpidist_case(name, strategy) for name, strategy in strategies.items()]
    ours.append(mpidist_case("Collective out=", strategies["Collective"], in_place=True))
    where, stolen = provenance(comm, strategies["ring"]), stolen_seconds()
    is_first = comm.Get_rank() == 0
    if is_first:
        print(", ".join(f"{name} {text}" for name, text in where.items()))
    rows: list[dict[str, str]] = []
    for kind, shape, shapes in _runs(arguments):
        inputs = Inputs(shapes, kind == "list", comm)
        timings = measure(comm, raw_cases(comm, inputs) + ours, inputs, arguments.rounds, arguments.seconds)
        new = rows_of(kind, shape, inputs, timings)
        rows += [where | {"stolen_seconds": f"{stolen_seconds() - stolen:.2f}"} | row for row in new]
        if is_first:
            if len(rows) == len(new) or kind != rows[-len(new) - 1]["kind"]:
                print(f"\n{'':>10} | " + " | ".join(f"{row['case'][:15]:>15}" for row in new))
            _print_row(shape, new)
    if is_first and arguments.out:
        name = "-".join(["all-reduce", where["mpi"], where["ranks"], "ranks", where["placement"]])
        write_rows(arguments.out / f"{name.lower().replace(' ', '-')}.csv", rows)
    for strategy in strategies.values():
        strategy.close()


if __name__ == "__main__":
    main()
