"""Numbers of replicas: not chosen, as many as ranks, and so many that ranks carry different numbers of them."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import MultiWorkerMirroredStrategy, Strategy, Variable
from mpidist.context_stack import parts_of
from support.ranks import Intracomm

__all__ = [
    "context", "ids_here", "inside", "local", "make_variable", "replica_id", "replicas", "shared_ranks", "strategy",
]  # fmt: skip

NUMBERS: dict[str, Callable[[int], int | None]] = {
    "None": lambda size: None,
    "P": lambda size: size,
    "2P+1": lambda size: 2 * size + 1,
}

# For tests of what replicas of one rank do to each other.
shared_ranks = pytest.mark.parametrize("replicas", ["2P+1"], indirect=True)


@pytest.fixture(params=NUMBERS)
def replicas(request: pytest.FixtureRequest, comm: Intracomm) -> int | None:
    """Give a number of replicas for strategies that the test builds."""
    return NUMBERS[request.param](comm.size)


@pytest.fixture
def strategy(comm: Intracomm) -> Iterator[Strategy]:
    """Make a strategy of all ranks, for this test alone."""
    with MultiWorkerMirroredStrategy(comm=comm) as made:
        yield made


def context() -> mpidist.ReplicaContext:
    found = mpidist.get_replica_context()
    assert found is not None
    return found


def inside(strategy: Strategy, method: str, *args: Any, **named: Any) -> Any:
    """Call a method of the replica context in `run`."""
    return strategy.run(lambda: getattr(context(), method)(*args, **named))


def replica_id() -> int:
    return context().replica_id_in_sync_group


def ids_here(strategy: Strategy) -> tuple[int, ...]:
    return tuple(parts_of(strategy).replicas.ids_here)


def local(strategy: Strategy, value: Any) -> list[Any]:
    """Return the components of this rank's replicas, arrays as lists."""
    return [np.asarray(part).tolist() for part in strategy.experimental_local_results(value)]


def make_variable(
    strategy: Strategy, value: Any, aggregation: str = "NONE", synchronization: str = "AUTO", **named: Any
) -> Variable:
    with strategy.scope():
        return mpidist.Variable(value, aggregation=aggregation, synchronization=synchronization, **named)
