"""Workers and parameter servers on the ranks of a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpidist.experimental import ParameterServerStrategy

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["num_workers", "on_workers"]


def num_workers(comm: Intracomm, num_ps: int = 1) -> int:
    """Return how many workers the ranks are, where the last ones are servers."""
    return 1 if comm.size == 1 else comm.size - num_ps


def on_workers(comm: Intracomm, work: Callable[[ParameterServerStrategy], Any], **arguments: Any) -> list[Any]:
    """Let the workers of a strategy work and its servers serve, and return what each worker returned. Collective."""
    result = None
    with ParameterServerStrategy(comm=comm, **arguments) as strategy:
        is_ps = strategy.is_ps
        if is_ps:
            strategy.serve()
        else:
            result = work(strategy)
    return [result for is_ps, result in comm.allgather((is_ps, result)) if not is_ps]
