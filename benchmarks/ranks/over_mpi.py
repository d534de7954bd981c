"""Raw mpi4py and mpidist, over whatever MPI the environment has. The ways of a benchmark are in `mpi_ways`."""

from __future__ import annotations

import importlib
import os
import platform
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import mpi4py
import numpy as np
from mpi4py import MPI

import mpidist
from ranks.way import Library, Way

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ranks.work import Work

__all__ = ["Mpi", "reduce"]


class Mpi(Library):
    """All ranks, and the strategies that the ways of a work need. Collective."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self._endings: list[Callable[[], None]] = []
        name, version = MPI.get_vendor()
        placement = "+".join(map(str, self.strategy().topology.node_sizes))
        self.forget()
        self.versions = {
            "mpi": f"{name} {'.'.join(map(str, version))}",
            "mpi4py": mpi4py.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "placement": placement + " pretended" * ("MPIDIST_PRETEND_NODES" in os.environ),
        }

    def ways(self, work: Work) -> dict[str, Way]:
        """List the ways of the work's benchmark."""
        ways: dict[str, Way] = importlib.import_module(f"mpi_ways.{work.benchmark}").ways(self, work)
        return ways

    def strategy(self, settings: dict[str, str] | None = None, **parts: Any) -> mpidist.Strategy:
        """Build a strategy over all ranks that is closed with the work. Collective.

        Args:
            settings: Environment variables that it reads as it is built.
            **parts: Arguments of the strategy.
        """
        with _environment(settings or {}):
            made = mpidist.MultiWorkerMirroredStrategy(**parts)
        self._endings.append(made.close)
        return made

    def at_end(self, ending: Callable[[], None]) -> None:
        """Call a function when the work is forgotten, before what was registered earlier. Collective."""
        self._endings.append(ending)

    def forget(self) -> None:
        """Close the strategies: symmetric arrays live as long as they do."""
        while self._endings:
            self._endings.pop()()


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def reduce(op: str, value: Any, out: Any = None, options: Any = None) -> Any:
    """All-reduce inside of `strategy.run`, as a training step does."""
    context = mpidist.get_replica_context()
    assert context is not None  # inside strategy.run
    return context.all_reduce(op, value, options, out=out)
