"""Parameter servers: what every kind must offer to be measured, the check that it adds, and those of mpidist."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness.work import Backend, Way, Work
from mpi4py import MPI

import mpidist
from backends.mpi import mpi_versions
from mpidist.experimental import ParameterServerStrategy, partitioners

_ALONE_BYTES = 32 << 20  # a larger array is cut into a part for each server
_MESSAGE_BYTES = 64 << 10  # larger arrays are sent alone, smaller ones together
_LEAST_SHARD_BYTES = 16 << 20
_LEAST_KEPT_BYTES = 64 << 10  # below, a new array is faster than the checks of a given one


class ServerBackend(Backend):
    """MPI's ranks: workers, which are measured, and servers behind them."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.comm, self.rank, self.size = MPI.COMM_WORLD, MPI.COMM_WORLD.rank, workers
        self.servers, self.serves = self.comm.size - workers, self.rank >= workers
        self.barrier, self.versions = (lambda: None), mpi_versions()

    def pin(self) -> None:
        """Keep this process on its own core, where there are enough: two may share one for long. After all is built."""
        cores = sorted(os.sched_getaffinity(0))
        if self.size + self.servers <= len(cores):
            os.sched_setaffinity(0, {cores[self.rank]})

    def begin(self, work: Work) -> tuple[Callable[[], object], Callable[[], Any]]:
        """Make variables of zeros, and return functions: one adds 1 on the servers, one returns all numbers."""
        raise NotImplementedError

    def ways(self, work: Work) -> dict[str, Way]:
        """Prepare a work on workers, check that every push of every worker counts, and list the ways. Collective."""
        self.pin()
        push, pull = self.begin(work)
        for number in (1, 2):
            push()
            self.barrier()
            _check(pull(), work, number * self.size)
            self.barrier()

        def both() -> None:
            push()
            pull()

        acts: dict[str, Callable[[], object]] = {"push": push, "pull": pull, "push, pull": both}
        return {name: Way([], lambda at, act=act: act(), name) for name, act in acts.items()}


def _check(found: Sequence[Any], work: Work, wanted: int) -> None:
    number = sum(array.size for array in found)
    if 4 * number != work.nbytes:
        raise ArithmeticError(f"{number} numbers came back of {work.nbytes // 4}")
    for array in found:
        if (array != wanted).any():
            raise ArithmeticError(f"{wanted} was expected everywhere, and {array.min()} to {array.max()} came back")


def place_parts(work: Work, servers: int) -> list[list[int]]:
    """Place a work's numbers on servers as a careful user does: round robin; a large array is cut.

    Returns the sizes of each server's messages, in numbers.
    """
    sizes = [int(np.prod(shape)) for shape in work.shapes]
    if len(sizes) == 1 and work.nbytes >= _ALONE_BYTES:
        return [[len(part)] for part in np.array_split(range(sizes[0]), servers)]
    placed: list[list[int]] = []
    for server in range(servers):
        own = sizes[server::servers]
        alone = [size for size in own if 4 * size > _MESSAGE_BYTES]
        rest = sum(own) - sum(alone)
        placed.append([*alone, *([rest] if rest else [])])
    return placed


class Servers(ServerBackend):
    """mpidist's: a list of variables, or one, as a training step reads and changes it. Collective."""

    def __init__(self, folder: Path, workers: int) -> None:
        super().__init__(folder, workers)
        cut = partitioners.MinSizePartitioner(_LEAST_SHARD_BYTES, self.servers)
        self._strategy = ParameterServerStrategy(None, cut, num_ps=self.servers)

    def serve(self) -> None:
        self.pin()
        self._strategy.serve()
        self._strategy.close()

    def begin(self, work: Work) -> tuple[Callable[[], object], Callable[[], Any]]:
        strategy = self._strategy
        with strategy.scope():
            variables = [mpidist.Variable(np.zeros(shape, np.float32)) for shape in work.shapes]
        kept, ones = work.empty(), [np.ones(shape, np.float32) for shape in work.shapes]
        if len(variables) == 1:
            (variable,), (one,) = variables, ones

            def add() -> None:
                variable.assign_add(one, read_value=False)
                strategy.flush()

            is_small = one.nbytes < _LEAST_KEPT_BYTES
            return add, lambda: [variable.read_value() if is_small else strategy.read(variable, kept[0])]

        def push() -> None:
            strategy.push(variables, ones)
            strategy.flush()

        return push, lambda: strategy.read(variables, kept)

    def close(self) -> None:
        self._strategy.close()
