"""Workers and parameter servers on the ranks of a test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpidist import CommunicationOptions
from mpidist.experimental import ParameterServerStrategy
from mpidist.parameter_server import Role

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["PATIENT", "deadline_of", "meet", "num_workers", "on_workers"]

PATIENT = CommunicationOptions(timeout_seconds=60)  # of strategies that a busy machine must not end


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


@contextmanager
def deadline_of(strategy: ParameterServerStrategy, seconds: float) -> Iterator[None]:
    """Give the waits of this rank another deadline: the strategy's holds for what all ranks do together, too."""
    role = strategy.extended.service
    assert isinstance(role, Role)
    assert role.group is not None
    usual = role.group.timeout_seconds
    assert usual == PATIENT.timeout_seconds
    role.group.timeout_seconds = seconds
    try:
        yield
    finally:
        role.group.timeout_seconds = usual


def meet(ranks: Intracomm) -> None:
    """Wait for all ranks of a communicator, however long they take, and leave the cores to them. Collective."""
    request = ranks.Ibarrier()
    while not request.Test():
        time.sleep(0.01)
