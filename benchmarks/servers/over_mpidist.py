"""mpidist's parameter servers: a list of variables, or one, as a training step reads and changes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

import mpidist
from mpidist.experimental import ParameterServerStrategy, partitioners
from servers.contestant import Contestant, mpi_versions

if TYPE_CHECKING:
    from collections.abc import Callable

    from ranks.work import Work

__all__ = ["Servers"]

_LEAST_SHARD_BYTES = 16 << 20
_LEAST_KEPT_BYTES = 64 << 10  # below, a new array is made sooner than an old one is checked


class Servers(Contestant):
    """The ranks of MPI's world. Collective."""

    def __init__(self, place: int, workers: int, servers: int) -> None:
        super().__init__(MPI.COMM_WORLD.rank, workers, servers)
        cut = partitioners.MinSizePartitioner(_LEAST_SHARD_BYTES, servers)
        self._strategy = ParameterServerStrategy(None, cut, num_ps=servers)
        self.versions = mpi_versions()

    def serve(self) -> None:
        self._strategy.serve()
        self._strategy.close()

    def begin(self, work: Work) -> tuple[Callable[[], object], Callable[[], Any]]:
        strategy = self._strategy
        with strategy.scope():
            variables = [mpidist.Variable(np.zeros(shape, np.float32)) for shape in work.shapes]
        kept = [np.empty(shape, np.float32) for shape in work.shapes]
        ones = [np.ones(shape, np.float32) for shape in work.shapes]
        if len(variables) == 1:
            (variable,), (one,) = variables, ones

            def add() -> None:
                variable.assign_add(one, read_value=False)
                strategy.flush()

            is_small = one.nbytes < _LEAST_KEPT_BYTES
            return add, variable.read_value if is_small else lambda: strategy.read(variable, kept[0])

        def push() -> None:
            strategy.push(variables, ones)
            strategy.flush()

        return push, lambda: strategy.read(variables, kept)

    def close(self) -> None:
        self._strategy.close()
