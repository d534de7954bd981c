"""Mirrored variables of which each node has one copy."""

from typing import Any

import numpy as np
import pytest
from support.everywhere import raises_everywhere, same_everywhere
from support.ranks import Intracomm

import mpidist
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError

pytestmark = pytest.mark.core


def variable(strategy: Strategy, value: Any, **named: Any) -> mpidist.Variable:
    with strategy.scope():
        return mpidist.Variable(value, **named)


def test_ranks_of_a_node_read_one_memory(comm: Intracomm, placement: tuple[int, ...]) -> None:
    with Strategy(comm=comm, per_node_variables=True) as strategy:
        weights = variable(strategy, np.full((3, 2), 1.0 + comm.rank))
        assert (weights.numpy() == 1).all()  # rank 0's
        parts_of(strategy).agree("all have looked", {})
        topology = strategy.topology
        if topology.is_leader:
            parts_of(strategy).group.shared.place(weights._value).arrays[0][:] = 7 + topology.node
        parts_of(strategy).agree("look", {})
        assert (weights.local_value() == 7 + topology.node).all()


def test_training_comes_to_the_same_weights(comm: Intracomm, placement: tuple[int, ...]) -> None:
    def step(weights: mpidist.Variable, count: mpidist.Variable) -> None:
        replica = mpidist.get_replica_context().replica_id_in_sync_group
        weights.assign_sub(np.full(1000, 0.5 * (replica + 1), np.float32))
        count.assign_add(np.int64(1))

    with Strategy(comm=comm, per_node_variables=True) as strategy:
        weights = variable(strategy, np.zeros(1000, np.float32), aggregation="MEAN")
        count = variable(strategy, np.int64(0), aggregation="SUM")
        for _ in range(20):
            strategy.run(step, (weights, count))
        weights.assign_add(np.float32(1))
        strategy.extended.update(weights, lambda var, by: var.assign_add(by), (np.float32(2),))
        expected = 3 - 20 * 0.5 * np.mean(np.arange(1, comm.size + 1))
        assert np.allclose(weights.numpy(), expected)
        assert int(count) == 20 * comm.size
        assert same_everywhere(comm, weights.numpy())


@pytest.mark.ranks(3)
def test_what_one_rank_cannot_assign_is_everyones_error(comm: Intracomm) -> None:
    """In `run`, across replicas and in updates, where all ranks write one memory and wait for each other."""
    with Strategy(comm=comm, per_node_variables=True) as strategy:
        count = variable(strategy, np.zeros(2, np.int64), aggregation="SUM")
        wrong = np.full(2, 0.5) if comm.rank == comm.size - 1 else np.ones(2, np.int64)
        ways = (
            count.assign,
            lambda x: strategy.extended.update(count, lambda var: var.assign_add(x)),
            lambda x: strategy.run(count.assign, (x,)),
        )
        for assign in ways:
            with raises_everywhere(comm, InvalidArgumentError, f"rank {comm.size - 1}: .*another kind of number"):
                assign(wrong)
        assert count.numpy().tolist() == [0, 0]
        assert count.assign(np.ones(2, np.int64)).local_value().tolist() == [1, 1]
        metric = variable(strategy, 0.0, synchronization="ON_READ", aggregation="SUM")
        strategy.run(lambda: metric.assign_add(1.0))
        assert float(metric) == comm.size
