"""Coordinators whose chief or workers are lost, or late."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from mpidist import CommunicationOptions
from mpidist.errors import DeadlineExceededError, PeerFailedError
from mpidist.experimental import ParameterServerStrategy
from mpidist.experimental.coordinator import ClusterCoordinator, register

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


@register("losses: wait")
def wait(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


class LeavesError(BaseException):
    """What ends a worker, and not its function alone."""


@pytest.mark.core
@pytest.mark.ranks(min=4)
def test_an_error_that_follows_another_one_follows_it_again(comm: Intracomm) -> None:
    """So that its traceback is not printed beside the other one."""
    with suppress(LeavesError, PeerFailedError), ParameterServerStrategy(comm=comm) as strategy:
        if strategy.is_ps:
            strategy.serve()
        coordinator = ClusterCoordinator(strategy)
        if strategy.topology.rank == 2:
            raise LeavesError("tired")
        if not strategy.is_chief:
            coordinator.serve()
        coordinator.schedule(wait, args=(0.3,))
        with pytest.raises(PeerFailedError, match="tired") as first:
            coordinator.join()
        assert "following" in vars(first.value)
        with pytest.raises(PeerFailedError, match="tired") as second:
            coordinator.join()
        assert vars(second.value) == vars(first.value)
        raise second.value


@pytest.mark.core
@pytest.mark.ranks(min=3)
def test_the_strategys_deadline_holds_for_functions(comm: Intracomm) -> None:
    """The chief's error ends the wait of the others."""
    options = CommunicationOptions(timeout_seconds=0.2)
    failures = (DeadlineExceededError, PeerFailedError)
    with suppress(*failures), ParameterServerStrategy(comm=comm, communication_options=options) as strategy:
        if strategy.is_ps:
            strategy.serve()
        coordinator = ClusterCoordinator(strategy)
        if not strategy.is_chief:
            coordinator.serve()
        coordinator.schedule(wait, args=(0.6,))
        with pytest.raises(
            DeadlineExceededError, match=r"join\(\) \(calls: 'losses: wait' on rank 1\).* waited 0.2 s"
        ) as late:
            coordinator.join()
        raise late.value
