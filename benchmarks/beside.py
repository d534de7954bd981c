"""Is this commit faster or slower than an older one? The same calls, of both, in one run.

python benchmarks/beside.py COMMIT --out results

The older commit is taken from git's history into a folder of its own. Both are started in turn, many times, so that
what disturbs the machine disturbs both alike; README.md beside this file says what the rows mean.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from record import commit_of, parse_size, shapes_of_list, stolen_seconds, text_of, text_of_bytes, write_rows

ROOT: Final = Path(__file__).resolve().parents[1]
RAW: Final = "raw Allreduce in place"
_BLOCK_SECONDS: Final = 0.02
_SMALL: Final = 1 << 20  # bytes: a list of more than that is one of a model's gradients

Work = Callable[[], Any]


def sizes_cases(strategy: Any, sizes: Sequence[int], lists: Sequence[str]) -> Iterator[tuple[str, Work]]:
    """Name reductions of arrays and of lists of gradients, and what does them inside of `strategy.run`."""
    import mpidist

    works = [(text_of_bytes(size), [np.ones(size // 4, np.float32)], False) for size in sizes]
    works += [(name, [np.ones(shape, np.float32) for shape in shapes_of_list(name)], True) for name in lists]
    context, op = mpidist.get_replica_context(), mpidist.ReduceOp.SUM
    assert context is not None
    for name, arrays, is_list in works:
        value = arrays if is_list else arrays[0]
        symmetric = strategy.symmetric_empty_like(value)
        for array, own in zip(symmetric if is_list else [symmetric], arrays, strict=True):
            array[...] = own
        yield f"{name}, new results", lambda value=value: context.all_reduce(op, value)  # type: ignore[misc]
        yield f"{name}, in place", lambda value=value: context.all_reduce(op, value, out=value)  # type: ignore[misc]
        yield f"{name}, symmetric", lambda value=symmetric: context.all_reduce(op, value, out=value)  # type: ignore[misc]


def other_cases(variable: Any) -> Iterator[tuple[str, Work]]:
    """Name small calls of other kinds inside of `strategy.run`."""
    import mpidist

    context, one = mpidist.get_replica_context(), np.ones(4, np.float32)
    assert context is not None
    many = [np.ones(4, np.float32) for _ in range(161)]
    named = {f"layer {number}": array for number, array in enumerate(many)}
    yield "161 small arrays", lambda: context.all_reduce("sum", many)
    yield "dict of 161 small arrays", lambda: context.all_reduce("sum", named)
    yield "a float, by name of op", lambda: context.all_reduce("mean", 1.5)
    yield "all_gather of 16 B", lambda: context.all_gather(one, 0)
    yield "reduce_scatter of 16 B", lambda: context.reduce_scatter("sum", one)
    yield "aggregated assign_add of 16 B", lambda: variable.assign_add(one)
    yield "merge_call", lambda: context.merge_call(lambda strategy: None)
    yield "start_all_reduce and wait of 16 B", lambda: context.start_all_reduce("sum", one).wait()


def outer_cases(strategy: Any) -> Iterator[tuple[str, Work]]:
    """Name small calls in cross-replica context."""
    one = np.ones(4, np.float32)
    dataset = strategy.experimental_distribute_dataset([np.ones((8, 4), np.float32)] * 100_000)
    steps = iter(dataset)
    yield "strategy.run of nothing", lambda: strategy.run(lambda: None)
    yield "strategy.reduce of a float", lambda: strategy.reduce("sum", 1.0)
    yield "strategy.reduce along an axis", lambda: strategy.reduce("mean", one, axis=0)
    yield "strategy.gather of 16 B", lambda: strategy.gather(one, 0)
    yield "step of a data set", lambda: next(steps)


def raw_cases(comm: Any, sizes: Sequence[int], lists: Sequence[str]) -> Iterator[tuple[str, Work]]:
    """Name what mpi4py does by itself: one call a tensor, in place."""
    from mpi4py import MPI

    works = [(text_of_bytes(size), [(size // 4,)]) for size in sizes]
    works += [(name, shapes_of_list(name)) for name in lists]
    for name, shapes in works:
        arrays = [np.ones(shape, np.float32) for shape in shapes]

        def reduce_all(arrays: list[Any] = arrays) -> None:
            for array in arrays:
                comm.Allreduce(MPI.IN_PLACE, array, MPI.MAX)

        yield f"{name}, {RAW}", reduce_all


def measure(work: Work, comm: Any, seconds: float) -> float:
    """Time a call on all ranks together: the median of blocks, in microseconds a call. Collective."""
    work()
    number = 1
    while True:
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(number):
            work()
        took = comm.allreduce(time.perf_counter() - start)
        if took >= _BLOCK_SECONDS * comm.size / 2 or number >= 100_000:
            break
        number *= 2
    blocks = []
    for _ in range(max(3, round(seconds / (took / comm.size)))):
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(number):
            work()
        blocks.append((time.perf_counter() - start) / number * 1e6)
    return median(blocks)


def work_here(arguments: argparse.Namespace) -> None:
    """Measure the version of mpidist that this process finds, and print it. Collective."""
    from mpi4py import MPI

    import mpidist

    comm, found = MPI.COMM_WORLD, {}

    def take(cases: Iterator[tuple[str, Work]]) -> None:
        for name, work in cases:
            found[name] = measure(work, comm, arguments.seconds)

    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            variable = mpidist.Variable(np.zeros(4, np.float32), aggregation="sum")
        take(raw_cases(comm, arguments.sizes, arguments.lists))
        strategy.run(lambda: take(sizes_cases(strategy, arguments.sizes, arguments.lists)))
        strategy.run(lambda: take(other_cases(variable)))
        take(outer_cases(strategy))
    if comm.rank == 0:
        print(json.dumps(found), flush=True)


def run_once(folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Start a job that measures the version of mpidist in a folder."""
    here = [sys.executable, str(Path(__file__).resolve()), "--work", f"--seconds={arguments.seconds}"]
    here += [f"--sizes={','.join(map(str, arguments.sizes))}", f"--lists={','.join(arguments.lists)}"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "MPIDIST_FLIGHT_DIR": "off"}
    command = [*arguments.mpiexec.split(), "-n", str(arguments.ranks), *here]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} with {folder} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows_of(found: dict[str, list[dict[str, float]]]) -> list[dict[str, str]]:
    """Make a row of each case that both versions have: medians over rounds, and the ratio round by round."""
    rows = []
    for name in found["new"][0]:
        if name not in found["old"][0]:
            continue
        old, new = ([one[name] for one in found[version]] for version in ("old", "new"))
        ratios = sorted(after / before for before, after in zip(old, new, strict=True))
        row = {"case": name, "old_us": f"{median(old):.3f}", "new_us": f"{median(new):.3f}"}
        row["new_by_old"] = f"{median(ratios):.3f}"
        row |= {"low": f"{ratios[len(ratios) // 4]:.3f}", "high": f"{ratios[-1 - len(ratios) // 4]:.3f}"}
        raw = f"{name.rpartition(', ')[0]}, {RAW}"
        if name != raw and raw in found["new"][0]:
            raws = [one[raw] for one in found["new"]]
            row["raw_by_new"] = f"{median(before / after for before, after in zip(raws, new, strict=True)):.3f}"
            row["above_raw_us"] = f"{median(after - before for before, after in zip(raws, new, strict=True)):.2f}"
        rows.append(row)
    return rows


def print_table(rows: Sequence[dict[str, str]]) -> None:
    """Print the rows for people."""
    width = max(len(row["case"]) for row in rows)
    print(f"{'':>{width}} | {'old':>8} | {'new':>8} | {'new / old':>23} | {'raw / new':>9} | {'new - raw':>10}")
    for row in rows:
        times = [text_of(float(row[name])) for name in ("old_us", "new_us")]
        ratio = f"{row['new_by_old']} ({row['low']} to {row['high']})"
        above = f"{row['above_raw_us']} us" if "above_raw_us" in row else ""
        print(
            f"{row['case']:>{width}} | {times[0]:>8} | {times[1]:>8} | {ratio:>23} | {row.get('raw_by_new', ''):>9} | "
            f"{above:>10}"
        )


def _exported(commit: str, into: Path) -> Path:
    """Write mpidist as it was at a commit into a folder."""
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit, "mpidist"], capture_output=True, check=False)
    if archive.returncode:
        raise SystemExit(f"git has no {commit}: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(into)
    return into


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD", help="the older one")
    parser.add_argument("--ranks", type=int, default=2, help="of a job: %(default)s")
    parser.add_argument("--rounds", type=int, default=9, help="jobs of each version: %(default)s")
    parser.add_argument("--seconds", type=float, default=0.15, help="that a case takes in a job, about: %(default)s")
    sizes = "4,64K,256K,1M,16M,64M"
    parser.add_argument("--sizes", default=sizes, help="of float32 arrays: %(default)s")
    parser.add_argument("--lists", default="resnet50,tiny1000", help="of gradients: %(default)s")
    parser.add_argument("--mpiexec", default=str(Path(sys.executable).parent / "mpiexec"), help="with its options")
    parser.add_argument("--out", type=Path, help="folder for the CSV file; without, none is written")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.sizes = [parse_size(text) for text in arguments.sizes.split(",") if text]
    arguments.lists = [name for name in arguments.lists.split(",") if name]
    return arguments


def main() -> None:
    """Measure both versions in turn."""
    arguments = _arguments()
    if arguments.work:
        work_here(arguments)
        return
    found: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
    load, stolen = os.getloadavg()[0], stolen_seconds()
    with tempfile.TemporaryDirectory() as folder:
        places = {"old": _exported(arguments.commit, Path(folder)), "new": ROOT}
        for number in range(arguments.rounds):
            for version in ("old", "new") if number % 2 else ("new", "old"):
                found[version].append(run_once(places[version], arguments))
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
    rows = rows_of(found)
    print(f"{arguments.ranks} ranks, {arguments.commit} (old) and {commit_of(ROOT)} (new), load {load:.1f} before")
    print_table(rows)
    if arguments.out:
        where = {"date": date.today().isoformat(), "old": arguments.commit, "new": commit_of(ROOT)}
        where |= {"ranks": str(arguments.ranks), "cpus": str(os.cpu_count()), "load": f"{load:.2f}"}
        where["stolen_seconds"] = f"{stolen_seconds() - stolen:.2f}"
        write_rows(arguments.out / f"beside-{arguments.commit}.csv", [where | row for row in rows])


if __name__ == "__main__":
    main()
