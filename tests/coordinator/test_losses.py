"""Coordinators whose chief or workers are lost, or late."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from mpidist.errors import PeerFailedError
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
