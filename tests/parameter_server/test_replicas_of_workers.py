"""Workers of several replicas: what those change in `run` is aggregated first, and the server gets one change."""

from functools import partial

import numpy as np
import pytest
from parameter_server.clusters import PATIENT, num_workers, on_workers, worker_test

import mpidist
from mpidist import IndexedSlices, Variable
from mpidist.errors import InvalidArgumentError
from mpidist.experimental import partitioners


def replica_id():
    return mpidist.get_replica_context().replica_id_in_sync_group


@pytest.mark.ranks(3)
@pytest.mark.core
@pytest.mark.parametrize("replicas", [1, 2, 3])
@worker_test()
def test_replicas_add_once_and_the_step_counts_once(strategy, comm, replicas):
    """A worker's own replicas count."""
    assert strategy.num_replicas_in_sync == replicas
    with strategy.scope():
        x = Variable(10.0, aggregation="SUM")
        y = Variable(20.0, aggregation="SUM")
        mean = Variable([0.0, 5.0], aggregation="MEAN")
        z = Variable(30, aggregation="ONLY_FIRST_REPLICA")

    def step():
        x.assign_add(np.ones(()))
        y.assign_add(np.ones(()))
        mean.assign_sub(np.full(2, float(replica_id())))
        z.assign_add(1)
        return float(x)

    seen = strategy.run(step)
    assert len(seen.values) == replicas
    assert min(seen.values) >= 10 + replicas
    strategy.barrier()
    workers = num_workers(comm)
    assert (float(x), float(y), int(z)) == (10 + workers * replicas, 20 + workers * replicas, 30 + workers)
    np.testing.assert_array_equal(mean, np.array([0.0, 5.0]) - workers * (replicas - 1) / 2)


@pytest.mark.ranks(1, 3)
@worker_test(replicas=3, variable_partitioner=partitioners.FixedShardsPartitioner(2))
def test_replicas_push_their_sum(strategy, comm):
    with strategy.scope():
        weights, table = Variable(np.zeros(5)), Variable(np.zeros((8, 2)))

    def step():
        own = replica_id()
        strategy.push([weights, table], [np.full(5, own + 1.0), IndexedSlices(np.ones((own, 2)), np.arange(own))])

    for _ in range(4):
        strategy.run(step)
    strategy.barrier()
    workers = num_workers(comm)
    assert weights.numpy()[0] == 4 * workers * 6
    assert table.numpy()[:3, 0].tolist() == [8.0 * workers, 4.0 * workers, 0.0]


@pytest.mark.ranks(3)
@worker_test(replicas=3, staleness=2, communication_options=PATIENT)
def test_replicas_end_a_step_once(strategy, comm):
    with strategy.scope():
        weights = Variable(np.zeros(2), aggregation="SUM")

    def step():
        weights.assign_add(np.ones(2))
        strategy.step_done()

    if strategy.is_chief:
        for _ in range(2):
            strategy.run(step)
        assert weights.numpy()[0] == 6  # does not wait: the other worker is 2 steps behind
        comm.send(None, 1)
    else:
        comm.recv(source=0)
        strategy.run(step)


@pytest.mark.ranks(3)
@worker_test(replicas=2)
def test_rows_of_replicas(strategy, comm):
    with strategy.scope():
        made = {how: Variable(np.zeros((4, 2)), aggregation=how) for how in ("SUM", "MEAN", "ONLY_FIRST_REPLICA")}

    def step():
        for variable in made.values():
            variable.scatter_add(IndexedSlices(np.full((2, 2), replica_id() + 1.0), [0, replica_id() + 1]))

    strategy.run(step)
    strategy.barrier()
    found = {how: (variable.numpy()[:, 0] / num_workers(comm)).tolist() for how, variable in made.items()}
    assert found == {
        "SUM": [3.0, 1.0, 2.0, 0.0],
        "MEAN": [1.5, 0.5, 1.0, 0.0],
        "ONLY_FIRST_REPLICA": [1.0, 1.0, 0.0, 0.0],
    }


@pytest.mark.ranks(3)
@worker_test(replicas=2)
def test_replicas_refuse_unaggregated_and_unlike_changes(strategy, comm):
    with strategy.scope():
        none, total = Variable(np.zeros(3)), Variable(np.zeros(3), aggregation="SUM")

    def refused(kind, text, fn):
        with pytest.raises(kind, match=text):
            strategy.run(fn)

    rows = IndexedSlices(np.ones(1), [0])
    refused(ValueError, "aggregation NONE by several replicas", lambda: none.assign_add(np.ones(3)))
    refused(ValueError, "would count 2 times", lambda: total.assign_add(1.0))
    refused(ValueError, r"shape \[3\]", lambda: total.assign_add(np.ones(2 + replica_id())))
    refused(NotImplementedError, "scatter_max", lambda: total.scatter_max(rows))
    refused(InvalidArgumentError, "differ", lambda: strategy.push([none, total][replica_id()], np.ones(3)))
    strategy.run(lambda: total.assign_add(np.ones(3)))
    none.assign_add(1.0)  # outside of `run` a worker is one
    strategy.barrier()
    workers = num_workers(comm)
    assert (none.numpy()[0], total.numpy()[0]) == (workers, 2 * workers)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("variable_partitioner", [partitioners.FixedShardsPartitioner(count) for count in (1, 2)])
def test_update_changes_a_variable_once_for_all_replicas(comm, variable_partitioner):
    def work(strategy):
        with strategy.scope():
            weights = Variable(np.zeros(4))

        def merged(strategy, gradients):
            mean = strategy.reduce("MEAN", gradients)
            strategy.extended.update(weights, lambda variable, delta: variable.assign_add(delta), args=(mean,))

        def step():
            mpidist.get_replica_context().merge_call(merged, args=(np.full(4, replica_id() + 1.0),))

        strategy.run(step)
        strategy.extended.update(weights, lambda variable: variable.assign_add(10.0))
        strategy.barrier()
        assert weights.numpy().tolist() == [12.0 * num_workers(comm)] * 4
        gradients = strategy.run(lambda: np.ones(4) * replica_id())
        for change in (
            partial(strategy.extended.update, weights, lambda variable, delta: None, (gradients,)),
            partial(weights.assign, gradients),
            partial(strategy.push, weights, gradients),
        ):
            with pytest.raises(ValueError, match="reduce the PerReplica first"):
                change()

    on_workers(comm, work, replicas=3, variable_partitioner=variable_partitioner)


@pytest.mark.ranks(3)
@worker_test(replicas=2)
def test_replica_assigning_alone_is_named(strategy):
    with strategy.scope():
        total = Variable(np.zeros(2), aggregation="SUM")

    def alone():
        if replica_id() == 0:
            total.assign_add(np.ones(2))

    def fails():
        if replica_id() == 1:
            raise KeyError("mine")
        total.assign_add(np.ones(2))

    with pytest.raises(InvalidArgumentError, match="replica 1 returned from the function, while replica 0 called"):
        strategy.run(alone)
    with pytest.raises(KeyError, match="mine"):
        strategy.run(fails)
    strategy.barrier()
    assert total.numpy().tolist() == [0.0, 0.0]
