"""What does a checkpoint cost, in the foreground and in the background, beside `numpy.save` of the same bytes?

python benchmarks checkpoints --out results             # 1 GiB, 2 ranks: three minutes
python benchmarks checkpoints --size 64M --rounds 3     # seconds
python benchmarks checkpoints --folder /scratch/me      # on another file system

One variable of float32 that is equal on all ranks. All ways write to the disk before they are done (`fsync`), and take
turns in one run; all ranks wait for the slowest one.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from record import commit_of, parse_size, text_of, text_of_bytes, write_rows

from mpidist import MirroredStrategy, Variable
from mpidist.checkpoint import Checkpoint, CheckpointManager

__all__ = ["main"]

_ROOT: Final = Path(__file__).resolve().parent.parent
_BASELINE: Final = "numpy.save"

_Way = tuple[str, Callable[[], list[float]]]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmarks checkpoints", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=parse_size, default="1G", help="of the variable, as 64M: %(default)s")
    parser.add_argument("--ranks", type=int, default=2, help="%(default)s")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each way: %(default)s")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary one is made in it")
    parser.add_argument("--out", type=Path, help="folder for the CSV file; without, none is written")
    parser.add_argument("--in-job", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _ways(variable: Variable, folder: Path, is_chief: bool) -> dict[str, Callable[[], list[float]]]:
    """Return what is measured: each way returns when the program could go on, and when the bytes were written."""
    plain = variable.numpy()
    managers = {
        name: CheckpointManager(Checkpoint(variable=variable), folder / name, max_to_keep=1, background=name != "save")
        for name in ("save", "background")
    }

    def save_plain() -> list[float]:
        if is_chief:
            with (folder / "plain.npy").open("wb") as file:
                np.save(file, plain)
                file.flush()
                os.fsync(file.fileno())
        return [time.perf_counter()] * 2

    def copy() -> list[float]:
        plain.copy()
        return [time.perf_counter()] * 2

    def save_with(name: str) -> Callable[[], list[float]]:
        def save() -> list[float]:
            managers[name].save()
            goes_on = time.perf_counter()
            managers[name].wait()
            return [goes_on, time.perf_counter()]

        return save

    return {
        _BASELINE: save_plain,
        "copy in memory": copy,
        "save": save_with("save"),
        "save, background=True": save_with("background"),
    }


def _measure(given: argparse.Namespace) -> None:
    """Measure, and print and save on rank 0. Collective."""
    with MirroredStrategy() as strategy:
        with strategy.scope():
            variable = Variable(np.arange(given.size // 4, dtype=np.float32))
        ways = _ways(variable, given.folder, strategy.is_chief)
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for at in range(given.rounds + 1):
            for name, way in _from(at, list(ways.items())):
                strategy.reduce("sum", 0)
                began = time.perf_counter()
                ends = strategy.reduce("max", np.array(way()) - began)
                if at:  # the first turn allocates
                    seconds[name].append((float(ends[0]), float(ends[1])))
        if strategy.is_chief:
            _tell(given, seconds)


def _from(at: int, ways: list[_Way]) -> list[_Way]:
    """Begin each round with another way: a disk writes faster after a pause."""
    at %= len(ways)
    return ways[at:] + ways[:at]


def _tell(given: argparse.Namespace, seconds: dict[str, list[tuple[float, float]]]) -> None:
    where = {
        "date": datetime.date.today().isoformat(),
        "commit": commit_of(_ROOT),
        "cpus": str(len(os.sched_getaffinity(0))),
        "ranks": str(given.ranks),
        "bytes": str(given.size),
    }
    print(f"a variable of {text_of_bytes(given.size)}: {', '.join(f'{name} {text}' for name, text in where.items())}")
    print(f"{'way':<24}{'goes on after':>16}{'written after':>16}{'written / ' + _BASELINE:>24}")
    rows, base = [], [whole for _, whole in seconds[_BASELINE]]
    for name, times in seconds.items():
        goes_on, whole = (statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(own / its for (_, own), its in zip(times, base, strict=True))
        print(f"{name:<24}{text_of(goes_on * 1e6):>16}{text_of(whole * 1e6):>16}{ratio:>24.2f}")
        rounds = " ".join(f"{own:.4f}" for _, own in times)
        measured = {"goes_on": f"{goes_on:.4f}", "written": f"{whole:.4f}", "ratio": f"{ratio:.3f}", "rounds": rounds}
        rows.append({**where, "way": name, **measured})
    if given.out:
        write_rows(given.out / "checkpoints.csv", rows)


def main() -> int:
    """Start the ranks, or be one of them."""
    given = _parse()
    if given.in_job:
        _measure(given)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="mpidist-checkpoints-", dir=given.folder))
    command = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(given.ranks), sys.executable]
    own = [str(Path(__file__).parent), "checkpoints", *sys.argv[1:], "--in-job", "--folder", str(folder)]
    try:
        return subprocess.run([*command, *own], check=False).returncode
    finally:
        shutil.rmtree(folder)
