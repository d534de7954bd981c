"""PyTorch over MPI's ranks: process groups of gloo and of mpidist, which the cases of torch compare."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist

import mpidist.torch  # noqa: F401  the backend
from backends.mpi import Mpi, mpi_versions


class Torch(Mpi):
    """All ranks with one thread each, and a process group of each backend. Collective."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        torch.set_num_threads(1)
        warnings.simplefilter("ignore", FutureWarning)  # some calls are being renamed
        dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=self.rank, world_size=self.size)
        self.groups = {"gloo": dist.group.WORLD, "mpidist": dist.new_group(backend="mpidist")}
        self.versions = mpi_versions("torch")

    def close(self) -> None:
        dist.destroy_process_group()
