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

__all__ = ["ServerBackend", "Servers", "place_parts"]

_ALONE_BYTES = 32 << 20  # a larger array is cut into a part for each server
_MESSAGE_BYTES = 64 << 10  # larger arrays are sent alone, smaller ones together
_LEAST_SHARD_BYTES = 16 << 20
_LEAST_KEPT_BYTES = 64 << 10  # below, a new array is faster than the checks of a given one


class ServerBackend(Backend):
    """Workers, which are the first ranks and are measured, and servers behind them.

    Args:
        rank: The number of this process, among workers and servers.
        workers: Number of workers.
        servers: Number of servers.
    """

    def __init__(self, rank: int, workers: int, servers: int) -> None:
        self.rank, self.size, self.servers = rank, workers, servers
        self.serves = rank >= workers
        self.barrier = lambda: None

    def pin(self) -> None:
        """Keep this process on its own core, where there are enough: two may else share one for long."""
        cores = sorted(os.sched_getaffinity(0))
        if self.size + self.servers <= len(cores):
            os.sched_setaffinity(0, {cores[self.rank]})

    def begin(self, work: Work) -> tuple[Callable[[], object], Callable[[], Any]]:
        """Make variables of zeros for a work.

        Returns:
            A function that adds 1 to all numbers, and returns when the servers have added; one that returns all
            numbers.
        """
        raise NotImplementedError

    def more_ways(self, work: Work) -> dict[str, Way]:
        """List ways in addition to push and pull."""
        return {}

    def ways(self, work: Work) -> dict[str, Way]:
        """Prepare a work on workers, check that every push of every worker counts, and list the ways. Collective."""
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
        found = {name: Way([], lambda at, act=act: act(), name) for name, act in acts.items()}
        return {**found, **self.more_ways(work)}


def _check(found: Sequence[Any], work: Work, wanted: int) -> None:
    number = sum(array.size for array in found)
    if 4 * number != work.nbytes:
        raise ArithmeticError(f"{number} numbers came back of {work.nbytes // 4}")
    for array in found:
        if (array != wanted).any():
            raise ArithmeticError(f"{wanted} was expected everywhere, and {array.min()} to {array.max()} came back")


def place_parts(work: Work, servers: int) -> list[list[int]]:
    """Place a work's numbers on servers as a careful user does: round robin; a large array is cut.

    Args:
        work: The work.
        servers: How many.

    Returns:
        The sizes of each server's messages, in numbers.
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
        servers = MPI.COMM_WORLD.size - workers
        super().__init__(MPI.COMM_WORLD.rank, workers, servers)
        cut = partitioners.MinSizePartitioner(_LEAST_SHARD_BYTES, servers)
        self._strategy = ParameterServerStrategy(None, cut, num_ps=servers)
        self.versions = mpi_versions()
        self.pin()  # after the strategy has counted the cores

    def serve(self) -> None:
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
