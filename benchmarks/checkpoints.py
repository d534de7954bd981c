"""What does a checkpoint cost, in the foreground and in the background, beside `numpy.save` of the same bytes?

python benchmarks checkpoints --out results             # 1 GiB, 2 ranks: three minutes
python benchmarks checkpoints --size 64M --rounds 3     # seconds
python benchmarks checkpoints --folder /scratch/me      # on another file system
python benchmarks checkpoints --dcp                     # also torch.distributed.checkpoint, over mpidist

One variable of float32 that is equal on all ranks. All ways but `numpy.save` alone write to the disk before they are
done (`fsync`). They take turns in one run; all ranks wait for the slowest one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
from record import parse_size, parser_of, text_of_bytes
from turns import Way, add_arguments, measure, start_ranks, tell

from mpidist import MirroredStrategy, Variable
from mpidist.checkpoint import Checkpoint, CheckpointManager

__all__ = ["main"]


def _parse() -> argparse.Namespace:
    parser = parser_of("checkpoints", __doc__)
    parser.add_argument("--size", type=parse_size, default="1G", help="of the variable, as 64M: %(default)s")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary one is made in it")
    parser.add_argument("--dcp", action="store_true", help="also torch.distributed.checkpoint")
    add_arguments(parser, rounds=8)
    return parser.parse_args()


def _ways(variable: Variable, folder: Path, is_chief: bool) -> dict[str, Way]:
    """Return what is measured: each way returns when the program could go on, and when the bytes were written."""
    plain = variable.numpy()
    managers = {
        name: CheckpointManager(Checkpoint(variable=variable), folder / name, max_to_keep=1, background=name != "save")
        for name in ("save", "background")
    }

    def save_plain(syncs: bool) -> list[float]:
        began = time.perf_counter()
        if not is_chief:
            return [0.0] * 2
        with (folder / "plain.npy").open("wb") as file:
            np.save(file, plain)
            file.flush()
            in_memory = time.perf_counter() - began
            os.fsync(file.fileno())  # also if it is not measured: the next way finds nothing left to write
        return [time.perf_counter() - began if syncs else in_memory] * 2

    def copy() -> list[float]:
        began = time.perf_counter()
        plain.copy()
        return [time.perf_counter() - began] * 2

    def save_with(name: str) -> list[float]:
        began = time.perf_counter()
        managers[name].save()
        goes_on = time.perf_counter()
        managers[name].wait()
        return [goes_on - began, time.perf_counter() - began]

    return {
        "numpy.save, fsync": partial(save_plain, syncs=True),
        "numpy.save": partial(save_plain, syncs=False),
        "copy in memory": copy,
        "save": partial(save_with, "save"),
        "save, background=True": partial(save_with, "background"),
    }


def _ways_of_torch(variable: Variable, folder: Path) -> dict[str, Way]:
    """Return those of torch.distributed.checkpoint, which syncs its files, too."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch import from_numpy

    import mpidist.torch  # noqa: F401  the backend

    warnings.simplefilter("ignore", UserWarning)  # that each turn replaces the files of the last one
    dist.init_process_group("mpidist")
    state = {"variable": from_numpy(variable.numpy())}

    def save() -> list[float]:
        began = time.perf_counter()
        dcp.save(state, checkpoint_id=folder / "dcp")
        return [time.perf_counter() - began] * 2

    def save_later() -> list[float]:
        began = time.perf_counter()
        future = dcp.async_save(state, checkpoint_id=folder / "later")
        goes_on = time.perf_counter()
        future.result()
        return [goes_on - began, time.perf_counter() - began]

    return {"DCP save": save, "DCP async_save": save_later}


def _measure(given: argparse.Namespace) -> None:
    """Measure, and print and save on rank 0. Collective."""
    with MirroredStrategy() as strategy:
        with strategy.scope():
            variable = Variable(np.arange(given.size // 4, dtype=np.float32))
        ways = _ways(variable, given.folder, strategy.is_chief)
        ways |= _ways_of_torch(variable, given.folder) if given.dcp else {}
        times = measure(strategy, ways, given.rounds)
        if strategy.is_chief:
            work = f"a variable of {text_of_bytes(given.size)}"
            tell(given, "checkpoints", ["goes on after", "written after"], {work: times})


def main() -> int:
    """Start the ranks, or be one of them."""
    given = _parse()
    if given.in_job:
        _measure(given)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="mpidist-checkpoints-", dir=given.folder))
    try:
        return start_ranks("checkpoints", given, "--folder", str(folder))
    finally:
        shutil.rmtree(folder)
