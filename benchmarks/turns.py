"""A job of its own whose ranks measure a few ways in turn, and a table of what each way took beside the first one."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
from record import facts_now, text_of, write_rows

from mpidist import Strategy

__all__ = ["Times", "Way", "add_arguments", "fields_of", "measure", "spread_of", "start_ranks", "tell"]

Way = Callable[[], Sequence[float]]  # returns seconds, one number for each column of the table
Times = dict[str, np.ndarray]  # of each way: a row for each round


def add_arguments(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Declare what all such benchmarks can be told."""
    parser.add_argument("--ranks", type=int, default=2, help="%(default)s")
    parser.add_argument("--rounds", type=int, default=rounds, help="turns of each way: %(default)s")
    parser.add_argument("--out", type=Path, help="folder for the CSV file; without, none is written")
    parser.add_argument("--in-job", action="store_true", help=argparse.SUPPRESS)


def start_ranks(name: str, given: argparse.Namespace, *more: str) -> int:
    """Start this benchmark's ranks, with the arguments of this command and more. Returns the job's exit status."""
    command = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(given.ranks), sys.executable]
    own = [str(Path(__file__).parent), name, *sys.argv[1:], "--in-job", *more]
    return subprocess.run([*command, *own], check=False).returncode


def measure(strategy: Strategy, ways: Mapping[str, Way], rounds: int) -> Times:
    """Let all ranks go each way in turn; a way takes what its slowest rank takes. Collective.

    Each round goes through the ways in another order: a disk writes slower after a way that wrote. The first round, in
    which memory is allocated, does not count.
    """
    times: dict[str, list[np.ndarray]] = {name: [] for name in ways}
    names = list(ways)
    for at in range(rounds + 1):
        for name in (names[place] for place in np.random.default_rng(at).permutation(len(names))):
            strategy.barrier()
            seconds = strategy.reduce("max", np.array(ways[name](), np.float64))
            if at:
                times[name].append(seconds)
    return {name: np.array(rows) for name, rows in times.items()}


def tell(
    given: argparse.Namespace,
    name: str,
    columns: Sequence[str],
    works: Mapping[str, Times],
    more: Mapping[tuple[str, str], Mapping[str, str]] = MappingProxyType({}),
) -> None:
    """Print a table for each work, and write all of them into a file: medians, and ratios within a round. On one rank.

    Args:
        given: The command's arguments.
        name: Of the benchmark and its file.
        columns: What the seconds of a way are. Ratios are of the last column, to that of the first way.
        works: The times, by what was measured.
        more: Fields of the file, by work and way, for the row of the last column.
    """
    where = facts_now(ranks=str(given.ranks))
    print(", ".join(f"{fact} {text}" for fact, text in where.items()))
    rows = []
    for work, times in works.items():
        first = next(iter(times))
        print(f"\n{work:<28}" + "".join(f"{column:>24}" for column in columns) + f"{'/ ' + first:>26}")
        base = times[first][:, -1]
        for way, seconds in times.items():
            print(f"{way:<28}", end="")
            for column, taken in zip(columns, seconds.T, strict=True):
                us = spread_of(taken * 1e6)
                print(f"{f'{text_of(us[0])} ({text_of(us[1])} to {text_of(us[2])})':>34}", end="")
                row = {**where, "work": work, "way": way, "column": column, "rounds": str(len(taken))}
                rows.append(row | fields_of("us", us, 2) | {"us_rounds": " ".join(f"{one * 1e6:.2f}" for one in taken)})
            ratio = spread_of(seconds[:, -1] / base)
            print(f"{f'{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})':>26}")
            rows[-1] |= {"baseline": first} | fields_of("ratio", ratio, 3) | dict(more.get((work, way), {}))
    if given.out:
        write_rows(given.out / f"{name}.csv", rows)


def spread_of(numbers: np.ndarray) -> tuple[float, float, float]:
    """Return the median, the lowest and the highest."""
    return statistics.median(numbers), float(numbers.min()), float(numbers.max())


def fields_of(name: str, spread: tuple[float, float, float], digits: int) -> dict[str, str]:
    """Name the numbers of a spread, as fields of a file."""
    return {f"{name}{end}": f"{one:.{digits}f}" for end, one in zip(("", "_low", "_high"), spread, strict=True)}
