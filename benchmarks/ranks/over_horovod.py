"""Horovod over MPI, its torch interface: grouped all-reduce, in place."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import horovod
import horovod.torch as hvd
import numpy as np
import torch

from ranks.way import Library, Way

if TYPE_CHECKING:
    from ranks.work import Work

__all__ = ["Horovod"]


class Horovod(Library):
    """Horovod with its own settings, as it is installed. Collective."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()
        self.versions = {
            "horovod": horovod.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        }

    def ways(self, work: Work) -> dict[str, Way]:
        """List the one way: names stay the same, so that Horovod's cache of agreed tensors works."""
        arrays = [work.empty() for _ in range(work.calls)]
        tensors = [[torch.from_numpy(array) for array in of] for of in arrays]

        def call(at: int) -> Any:
            hvd.grouped_allreduce_(tensors[at], op=hvd.Sum, name=f"{work.name}.{at}")
            return arrays[at]

        return {"horovod grouped": Way(arrays, call)}
