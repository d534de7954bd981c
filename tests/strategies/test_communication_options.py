"""Options of all calls of a strategy: every strategy keeps them, and a call's own win."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.everywhere import raises_everywhere
from support.placements import one_and_two_nodes
from support.ranks import Intracomm

import mpidist
from mpidist import (
    CentralStorageStrategy,
    CollectiveAllReduce,
    CommunicationOptions,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    Strategy,
)
from mpidist.errors import DeadlineExceededError

SOON = CommunicationOptions(timeout_seconds=0.3)
MAKE: dict[str, Callable[..., Strategy]] = {
    "mirrored": lambda comm: MirroredStrategy(communication_options=SOON, comm=comm),
    "mirrored, by its algorithm": lambda comm: MirroredStrategy(None, CollectiveAllReduce(SOON), comm=comm),
    "mirrored, per node": lambda comm: MirroredStrategy(communication_options=SOON, per_node_variables=True, comm=comm),
    "central storage": lambda comm: CentralStorageStrategy(communication_options=SOON, comm=comm),
    "multi-worker": lambda comm: MultiWorkerMirroredStrategy(None, SOON, comm=comm),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", MAKE)
def test_communication_options_deadline_holds_for_every_strategy(comm: Intracomm, make: str) -> None:
    strategy = MAKE[make](comm)

    def variable() -> None:
        with strategy.scope():
            mpidist.Variable(np.zeros(2))

    for call in (strategy.barrier, variable, strategy.close):
        if comm.rank == 0:
            comm.barrier()  # late, until the other has given up
        with pytest.raises(DeadlineExceededError):
            call()
        if comm.rank:
            comm.barrier()
        comm.barrier()
        if call != strategy.close:
            strategy.reset()


@pytest.mark.ranks(2)
def test_communication_options_of_another_type_are_refused(comm: Intracomm) -> None:
    wrong: Any = 3
    for make in (MirroredStrategy, CentralStorageStrategy, MultiWorkerMirroredStrategy):
        with raises_everywhere(comm, TypeError, "communication_options must be CommunicationOptions, got int"):
            make(communication_options=wrong, comm=comm)


@one_and_two_nodes
@pytest.mark.core
def test_communication_options_of_a_call_win_also_false(comm: Intracomm, placement: tuple[int, ...]) -> None:
    """Numbers between two of bfloat16 show whether they were compressed."""
    options = CommunicationOptions(compression="bf16", compress_everywhere=True)
    value = np.full(3, 1 + 2**-12, np.float32)
    with MultiWorkerMirroredStrategy(None, options, comm=comm) as strategy:
        compressed, exact = (strategy.reduce("mean", value, options=its) for its in (None, _exact()))
        assert (exact == value).all()
        assert (compressed == (1 if comm.size > 1 else value)).all()


def _exact() -> CommunicationOptions:
    return CommunicationOptions(compression="none")


@pytest.mark.ranks(2)
def test_communication_options_of_an_algorithm_in_a_scope_are_those_of_the_strategy(comm: Intracomm) -> None:
    options = CommunicationOptions(implementation="ring")
    with MultiWorkerMirroredStrategy(None, options, comm=comm) as strategy, strategy.scope():
        refusing = mpidist.ReductionToOneDevice(accumulation_fn=sum)
        with pytest.raises(ValueError, match="which a ring cannot call"):
            refusing.reduce("sum", 1.0, "all")
