"""What the parts with several ranks share: who they are, and clocks of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

from gpu.measuring import Call, Sample

__all__ = ["Ranks"]


class Ranks:
    """The ranks of a part.

    Args:
        comm: mpi4py's communicator of all.
        synchronize: Waits for the GPU.
    """

    def __init__(self, comm: Any, synchronize: Call) -> None:
        self.comm = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._synchronize = synchronize

    def times(self, ways: Mapping[str, Call], turns: int) -> dict[str, Sample]:
        """Time ways in turns: a barrier, the way, its end on the GPU; what the slowest rank takes. Collective."""
        values: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(turns + 1):
            for name, way in ways.items():
                self._synchronize()
                self.comm.Barrier()
                start = perf_counter()
                way()
                self._synchronize()
                took = max(self.comm.allgather(perf_counter() - start))
                if turn:
                    values[name].append(took)
        return {name: Sample(tuple(its)) for name, its in values.items()}
