"""What does all_reduce of a list of PyTorch's tensors take, beside one of NumPy's arrays, and beside an older commit?

.venv-tensors/bin/python benchmarks torch_lists --out results                    # a minute; needs PyTorch
.venv-tensors/bin/python benchmarks torch_lists --beside COMMIT --out results    # mpidist of an older commit, too

Jobs of the commits take turns, and within a job the ways take turns. A call takes what its slowest rank takes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from contest.environments import ROOT, Peer, environment_of, missing
from record import export, parser_of
from turns import Way, add_arguments, fields_of, measure, spread_of, tell

import mpidist

__all__ = ["main"]

_LISTS: Final = "20x5120,100x256,200x1024,1000x256"  # tensors, and the float32 of each
_TURNS: Final = 30  # of each way in a job
_LIMIT_SECONDS: Final = 300.0  # of a job


def _parse() -> argparse.Namespace:
    parser = parser_of("torch_lists", __doc__)
    parser.add_argument("--lists", default=_LISTS, help="%(default)s")
    parser.add_argument("--beside", metavar="COMMIT", help="mpidist of an older commit, too")
    add_arguments(parser, rounds=5)
    given = parser.parse_args()
    wrong = [name for name in given.lists.split(",") if not re.fullmatch(r"[1-9]\d*x\d+", name)]
    if wrong:
        parser.error(f"--lists: {wrong[0]!r} is no list: give tensors, and the float32 of each, as 100x256")
    return given


def _ways(strategy: mpidist.Strategy, number: int, size: int) -> dict[str, Way]:
    """Make the lists, and the calls that reduce them."""
    import torch  # other benchmarks need none

    torch.set_num_threads(1)
    arrays, tensors = (
        [made(size, dtype=kind) for _ in range(number)] for made, kind in ((np.ones, "f4"), (torch.ones, None))
    )
    kept: list[Any] = [None]

    def timed(prepare: Callable[[], Sequence[Any]], in_place: bool) -> Sequence[float]:
        values = prepare()
        strategy.barrier()
        began = time.perf_counter()
        more = {"out": values} if in_place else {}
        kept[0] = strategy.run(lambda: mpidist.get_replica_context().all_reduce("mean", values, **more))
        return [time.perf_counter() - began]

    return {
        "NumPy, in place": partial(timed, lambda: arrays, True),
        "tensors, in place": partial(timed, lambda: tensors, True),
        "tensors of this step, in place": partial(timed, lambda: [torch.ones(size) for _ in range(number)], True),
        "NumPy, new results": partial(timed, lambda: arrays, False),
        "tensors, new results": partial(timed, lambda: tensors, False),
    }


def _measure(given: argparse.Namespace) -> None:
    """Measure in a job, and print on rank 0."""
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        found = {}
        for name in given.lists.split(","):
            times = measure(strategy, _ways(strategy, *map(int, name.split("x"))), _TURNS)
            found[name] = {way: float(np.median(rows)) for way, rows in times.items()}
        if strategy.topology.rank == 0:
            print(json.dumps(found))


def _job(given: argparse.Namespace, source: Path) -> dict[str, dict[str, float]]:
    """Start a job with mpidist from a folder: seconds of each list and way."""
    modules = "torch", "mpi4py", "mpidist"
    peer = Peer("torch_lists", "lists", modules=modules, folder="", by_mpiexec=True, source=source)
    lack = missing(peer, Path(sys.executable), given.ranks)
    if lack:
        raise SystemExit(f"{peer.name}: {lack}")
    command = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(given.ranks), sys.executable]
    own = ["-c", "import torch_lists; torch_lists.main()", "--in-job", f"--lists={given.lists}"]
    try:
        # In that folder, as a program of a text looks for modules where it starts, first.
        done = subprocess.run(
            [*command, *own], cwd=source, env=environment_of(peer, given.ranks), capture_output=True, text=True,
            timeout=_LIMIT_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise SystemExit(f"a job of {source} did not end within {_LIMIT_SECONDS:g} s") from None
    if done.returncode:
        raise SystemExit(f"a job of {source} failed: {done.stderr}")
    seconds: dict[str, dict[str, float]] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return seconds


def main() -> int:
    """Measure, print and save."""
    given = _parse()
    if given.in_job:
        _measure(given)
        return 0
    with contextlib.ExitStack() as ending:
        sources = {"": ROOT}
        if given.beside:
            into = Path(ending.enter_context(tempfile.TemporaryDirectory()))
            sources[f" @{given.beside}"] = export(ROOT, given.beside, into)
        jobs = [{mark: _job(given, source) for mark, source in sources.items()} for _ in range(given.rounds)]
    works, facts = {}, {}
    for work, ways in jobs[0][""].items():
        works[work] = {
            f"{way}{mark}": np.array([[job[mark][work][way]] for job in jobs]) for way in ways for mark in sources
        }
        for way in ways if given.beside else ():
            old, new = (works[work][f"{way}{mark}"][:, 0] for mark in (f" @{given.beside}", ""))
            facts[work, way] = fields_of("old_by_new", spread_of(old / new), 3)
    tell(
        given,
        "-".join(["torch_lists", *([f"beside-{given.beside}"] if given.beside else [])]),
        ["a call"],
        works,
        facts,
    )
    for (work, way), of in facts.items():
        print(f"{work}, {way}: old / new {of['old_by_new']}")
    return 0
