"""Numbers of replicas: not chosen, as many as ranks, and so many that ranks carry different numbers of them."""

import numpy as np
import pytest

import mpidist
from mpidist import MultiWorkerMirroredStrategy
from mpidist.context_stack import parts_of

__all__ = [
    "context", "ids_here", "inside", "local", "make_variable", "replica_id", "replicas", "shared_ranks", "strategy",
]  # fmt: skip

NUMBERS = {
    "None": lambda size: None,
    "P": lambda size: size,
    "2P+1": lambda size: 2 * size + 1,
}

# For tests of what replicas of one rank do to each other.
shared_ranks = pytest.mark.parametrize("replicas", ["2P+1"], indirect=True)


@pytest.fixture(params=NUMBERS)
def replicas(request, comm):
    """Give a number of replicas for strategies that the test builds."""
    return NUMBERS[request.param](comm.size)


@pytest.fixture
def strategy(comm):
    """Make a strategy of all ranks, for this test alone."""
    with MultiWorkerMirroredStrategy(comm=comm) as made:
        yield made


def context():
    found = mpidist.get_replica_context()
    assert found is not None
    return found


def inside(strategy, method, *args, **named):
    """Call a method of the replica context in `run`."""
    return strategy.run(lambda: getattr(context(), method)(*args, **named))


def replica_id():
    return context().replica_id_in_sync_group


def ids_here(strategy):
    return tuple(parts_of(strategy).replicas.ids_here)


def local(strategy, value):
    """Return the components of this rank's replicas, arrays as lists."""
    return [np.asarray(part).tolist() for part in strategy.experimental_local_results(value)]


def make_variable(strategy, value, aggregation="NONE", synchronization="AUTO", **named):
    with strategy.scope():
        return mpidist.Variable(value, aggregation=aggregation, synchronization=synchronization, **named)
