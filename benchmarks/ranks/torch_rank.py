"""One rank that trains in PyTorch: it sleeps until it is told to make a step of one way.

python -m ranks.torch_rank KIND FOLDER WIDTH BATCH

KIND `all` has every way, `mpidist` those of mpidist alone. The folder is that of `ranks.rank`.
"""

from __future__ import annotations

import platform
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from mpi4py import MPI

import mpidist.torch  # noqa: F401  the backend
from ranks.meeting import Meeting
from ranks.rank import Rank, connect, die_with_parent, obey
from ranks.torch_steps import Training, trainings_of
from ranks.way import Library

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_STEPS_OF_MEMORY = 3


class _TorchRank(Rank):
    """Prepares the trainings of a model, makes steps of one, and says what memory such steps take."""

    def __init__(self, groups: dict[str, Any], meet: Callable[[], object], width: int, batch: int) -> None:
        super().__init__(Library(), meet)
        self._groups, self._width, self._batch = groups, width, batch
        self._trainings: dict[str, Training] = {}

    @property
    def commands(self) -> dict[str, Callable[..., dict[str, Any]]]:
        return {"prepare": self._prepare_model, "step": self._one_step, "memory": self._memory}

    def _prepare_model(self, shapes: Sequence[Sequence[int]], dtype: str) -> dict[str, Any]:
        self._trainings.clear()  # before there are others
        self._trainings = trainings_of(self._groups, shapes, self._width, self._batch, dtype)
        return {"ways": list(self._trainings)}

    def _one_step(self, way: str) -> dict[str, Any]:
        return {"times": self._trainings[way].seconds(self._meet)}

    def _memory(self, way: str) -> dict[str, Any]:
        steps = [self._trainings[way].memory() for _ in range(_STEPS_OF_MEMORY)]
        return {"mib": [statistics.median(column) for column in zip(*steps, strict=True)]}


def _versions() -> dict[str, str]:
    name, version = MPI.get_vendor()
    mpi = f"{name} {'.'.join(map(str, version))}"
    return {"torch": torch.__version__, "mpi": mpi, "python": platform.python_version()}


def main() -> None:
    """Make the process groups, and serve."""
    die_with_parent()
    kind, folder, width, batch = sys.argv[1:]
    torch.set_num_threads(1)
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=size)
    groups = {"gloo": dist.group.WORLD} if kind == "all" else {}
    groups |= {"mpidist": dist.new_group(backend="mpidist")}
    meet = Meeting(Path(folder, "counters"), rank, size).wait
    obey(connect(folder), _TorchRank(groups, meet, int(width), int(batch)), {"rank": rank, "versions": _versions()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
