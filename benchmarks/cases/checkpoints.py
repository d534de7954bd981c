"""Checkpoints in the foreground and in the background, compared with `numpy.save` of the same bytes.

One variable of float32 that is equal on all ranks, in a folder of TMPDIR. All ways but `numpy.save` alone write to the
disk before they are done (`fsync`). A way with "goes on" ends when the program could go on.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from backends.mpi import Mpi
from harness.work import Way, Work

import mpidist
from mpidist.checkpoint import Checkpoint, CheckpointManager


def checkpoints(mpi: Mpi, work: Work) -> dict[str, Way]:
    """List the ways to write a variable; with torch, those of torch.distributed.checkpoint, too."""
    folder = Path(mpi.comm.bcast(tempfile.mkdtemp(prefix="mpidist-checkpoints-") if mpi.rank == 0 else None))
    if mpi.rank == 0:
        mpi.at_end(lambda: shutil.rmtree(folder))
    mpi.at_end(mpi.comm.Barrier)  # after all have written, and before the folder is removed
    strategy = mpi.strategy()
    with strategy.scope():
        variable = mpidist.Variable(np.arange(work.nbytes // 4, dtype=np.float32))
    plain = variable.numpy()

    def save_plain() -> None:
        if mpi.rank == 0:
            np.save(folder / "plain.npy", plain)

    def sync_plain() -> None:
        if mpi.rank == 0:
            with (folder / "plain.npy").open("rb") as file:
                os.fsync(file.fileno())

    found = {
        "numpy.save, fsync": _way(lambda: (save_plain(), sync_plain())),
        "numpy.save": _way(save_plain, finish=sync_plain),
        "copy in memory": _way(plain.copy),
    }
    for name, background in (("save", False), ("save, background=True", True)):
        manager = CheckpointManager(Checkpoint(variable=variable), folder / name, max_to_keep=1, background=background)
        found[name] = _way(lambda its=manager: (its.save(), its.wait()))  # type: ignore[misc]
        if background:
            found[f"{name}, goes on"] = _way(manager.save, finish=manager.wait)
    return found | (_ways_of_torch(mpi, plain, folder) if hasattr(mpi, "groups") else {})


def _way(act: Callable[[], object], finish: Callable[[], object] = lambda: None) -> Way:
    def within(timed: Callable[[], Any]) -> Any:
        found = timed()
        finish()
        return found

    return Way([], lambda at: act(), "numpy.save, fsync", within=within)


def _ways_of_torch(mpi: Any, plain: Any, folder: Path) -> dict[str, Way]:
    import torch.distributed.checkpoint as dcp  # other environments have none
    from torch import from_numpy

    warnings.simplefilter("ignore", UserWarning)  # each step replaces the files of the last one
    state, options = {"variable": from_numpy(plain)}, {"process_group": mpi.groups["mpidist"]}
    running: list[Any] = []

    def start() -> None:
        running.append(dcp.async_save(state, checkpoint_id=folder / "later", **options))

    def wait() -> None:
        running.pop().result()

    return {
        "DCP save": _way(lambda: dcp.save(state, checkpoint_id=folder / "dcp", **options)),
        "DCP async_save": _way(lambda: (start(), wait())),
        "DCP async_save, goes on": _way(start, finish=wait),
    }
