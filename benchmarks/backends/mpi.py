"""Raw mpi4py and mpidist, over whatever MPI the environment has. Their ways are in `cases`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.work import Backend, Way, Work, versions_of
from mpi4py import MPI

import mpidist


def mpi_versions(*packages: str) -> dict[str, str]:
    """Return the versions of MPI, of mpi4py and of what is used with it."""
    name, version = MPI.get_vendor()
    return {"mpi": f"{name} {'.'.join(map(str, version))}", **versions_of("mpi4py", *packages)}


class Mpi(Backend):
    """All ranks, and the strategies that the ways of a work need. Collective."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.comm = folder, MPI.COMM_WORLD
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self._endings: list[Callable[[], object]] = []
        placement = "+".join(map(str, self.strategy().topology.node_sizes))
        self.forget()
        pretended = " pretended" * ("MPIDIST_PRETEND_NODES" in os.environ)
        self.versions = mpi_versions() | {"placement": placement + pretended}

    def ways(self, work: Work) -> dict[str, Way]:
        module, _, name = work.ways.partition(":")
        ways: dict[str, Way] = getattr(importlib.import_module(f"cases.{module}"), name)(self, work)
        return ways

    def strategy(self, settings: dict[str, str] | None = None, **parts: Any) -> mpidist.Strategy:
        """Build a strategy that is closed with the work; it reads settings of its environment. Collective."""
        with _environment(settings or {}):
            made = mpidist.MultiWorkerMirroredStrategy(**parts)
        self.at_end(made.close)
        return made

    def at_end(self, ending: Callable[[], object]) -> None:
        """Call a function when the work is forgotten, before earlier ones. Collective."""
        self._endings.append(ending)

    def forget(self) -> None:
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


def context() -> mpidist.ReplicaContext:
    """Return the replica context inside of `strategy.run`."""
    found = mpidist.get_replica_context()
    assert found is not None
    return found


def reduce(op: Any, value: Any, out: Any = None, options: Any = None) -> Any:
    """All-reduce inside of `strategy.run`, as a training step does."""
    return context().all_reduce(op, value, options, out=out)
