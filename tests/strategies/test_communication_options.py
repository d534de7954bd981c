"""Options of all calls of a strategy: every strategy keeps them, and a call's own win."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.everywhere import raises_everywhere

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

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

SOON = CommunicationOptions(timeout_seconds=0.3)
MAKE: dict[str, Callable[..., Strategy]] = {
    "mirrored": lambda comm: MirroredStrategy(communication_options=SOON, comm=comm),
    "mirrored, by its algorithm": lambda comm: MirroredStrategy(None, CollectiveAllReduce(SOON), comm=comm),
    "mirrored, per node": lambda comm: MirroredStrategy(communication_options=SOON, per_node_variables=True, comm=comm),
    "central storage": lambda comm: CentralStorageStrategy(communication_options=SOON, comm=comm),
    "multi-worker": lambda comm: MultiWorkerMirroredStrategy(None, SOON, comm=comm),
}
CALLS: dict[str, Callable[[Strategy], Any]] = {
    "barrier": lambda strategy: strategy.barrier(),
    "gather": lambda strategy: strategy.gather(np.ones(2), 0),
    "gather_object": lambda strategy: strategy.gather_object("a"),
    "broadcast": lambda strategy: strategy.broadcast(1.0),
    "symmetric_empty": lambda strategy: strategy.symmetric_empty(3, "f8"),
    "data": lambda strategy: next(iter(strategy.experimental_distribute_dataset([np.ones(4)]))),
    "close": lambda strategy: strategy.close(),
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("make", MAKE)
def test_communication_options_deadline_holds_in_every_call(comm: Intracomm, make: str, call: str) -> None:
    strategy = MAKE[make](comm)
    if comm.rank == 0:
        comm.barrier()  # late, until all others have given up
    with pytest.raises(DeadlineExceededError):
        CALLS[call](strategy)
    if comm.rank:
        comm.barrier()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("make", ["mirrored", "mirrored, per node", "central storage", "multi-worker"])
def test_communication_options_deadline_holds_for_variables(comm: Intracomm, make: str) -> None:
    strategy = MAKE[make](comm)
    if comm.rank == 0:
        comm.barrier()
    with strategy.scope(), pytest.raises(DeadlineExceededError):
        mpidist.Variable(np.zeros(2))
    if comm.rank:
        comm.barrier()


@pytest.mark.parametrize("make", [MirroredStrategy, CentralStorageStrategy, MultiWorkerMirroredStrategy])
def test_communication_options_of_another_type_are_refused(comm: Intracomm, make: Callable[..., Strategy]) -> None:
    with raises_everywhere(comm, TypeError, "communication_options must be CommunicationOptions, got int"):
        make(communication_options=3, comm=comm)


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


def test_communication_options_of_an_algorithm_in_a_scope_are_those_of_the_strategy(comm: Intracomm) -> None:
    options = CommunicationOptions(implementation="ring")
    with MultiWorkerMirroredStrategy(None, options, comm=comm) as strategy, strategy.scope():
        refusing = mpidist.ReductionToOneDevice(accumulation_fn=sum)
        with pytest.raises(ValueError, match="which a ring cannot call"):
            refusing.reduce("sum", 1.0, "all")


@pytest.mark.usefixtures("placement")
def test_ranks_of_a_strategy_are_those_of_its_topology(comm: Intracomm) -> None:
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        own, topology = strategy, strategy.topology
        assert (own.rank, own.size) == (comm.rank, comm.size)
        assert (own.local_rank, own.local_size, own.node) == (
            topology.local_rank,
            topology.local_size,
            topology.node,
        )
