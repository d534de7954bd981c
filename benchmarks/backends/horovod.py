"""Horovod over MPI, its torch interface: grouped all-reduce, in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from harness.work import Backend, Way, Work, versions_of


class Horovod(Backend):
    """Horovod with its own settings, as it is installed. Collective."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()
        self.versions = versions_of("horovod", "torch")

    def ways(self, work: Work) -> dict[str, Way]:
        """List the one way: names stay the same, so that Horovod's cache of agreed tensors works."""
        arrays = [work.empty() for _ in range(work.calls)]
        tensors = [[torch.from_numpy(array) for array in of] for of in arrays]

        def call(at: int) -> Any:
            hvd.grouped_allreduce_(tensors[at], op=hvd.Sum, name=f"{work.name}.{at}")
            return arrays[at]

        return {"horovod grouped": Way(arrays, call)}
