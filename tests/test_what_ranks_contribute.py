"""What counts of a value in calls that join ranks: this rank's own copy; and nothing, where all have the same."""

from itertools import product

import numpy as np
import pytest
from support.everywhere import raises_everywhere
from support.replicas import context, inside, make_variable

from mpidist import CollectiveAllReduce, Mirrored, OneDeviceStrategy
from mpidist.errors import InvalidArgumentError

pytestmark = [pytest.mark.core, pytest.mark.ranks(1, 3)]


# Calls that reduce: with an operation and a value, of which a rank gets an array of one element, or a number.
ACROSS = {
    "reduce": lambda s, op, x: s.reduce(op, x),
    "reduce of a nest": lambda s, op, x: s.reduce(op, {"a": [x]})["a"][0],
    "reduce_to": lambda s, op, x: s.extended.reduce_to(op, x, "all"),
    "batch_reduce_to": lambda s, op, x: s.extended.batch_reduce_to(op, [(x, "all")])[0],
    "reduce along an axis": lambda s, op, x: s.reduce(op, x, axis=0),
}
IN_RUN = {
    "all_reduce": lambda s, op, x: inside(s, "all_reduce", op, x),
    "all_reduce of a nest": lambda s, op, x: inside(s, "all_reduce", op, (np.ones(2), x))[1],
    "start_all_reduce": lambda s, op, x: inside(s, "start_all_reduce", op, x).wait(),
    "reduce_scatter": lambda s, op, x: s.gather(inside(s, "reduce_scatter", op, x), 0),
}
REDUCING = ACROSS | IN_RUN


@pytest.mark.parametrize("aggregation", ["SUM", "NONE"])
def test_on_read_metric_contributes_this_ranks_copy(strategy, comm, aggregation):
    """With aggregation NONE it could not be read across replicas, so nothing reads it in secret."""
    rank, size = comm.rank, comm.size
    metric = make_variable(strategy, np.zeros(1), synchronization="ON_READ", aggregation=aggregation)
    strategy.run(lambda: metric.assign(np.full(1, float(rank))))
    for name, reduced in REDUCING.items():
        assert reduced(strategy, "sum", metric) == sum(range(size)), name
        assert reduced(strategy, "mean", metric) == (size - 1) / 2, name
        assert reduced(strategy, "max", metric) == size - 1, name
    assert strategy.gather(metric, 0).tolist() == list(range(size))
    assert inside(strategy, "all_gather", {"m": metric}, 0)["m"].tolist() == list(range(size))
    assert strategy.extended.broadcast_to(metric, "all").tolist() == [0]
    (own,) = strategy.experimental_local_results({"m": metric})
    assert own["m"].tolist() == [rank]
    assert strategy.symmetric_empty_like(metric).shape == (1,)
    assert metric.local_value().tolist() == [rank]


def test_mirrored_value_has_a_mean_and_no_sum(strategy, comm):
    """Of three times 0.1, added and divided, the mean would be another number."""
    held = make_variable(strategy, np.full(1, 0.1), aggregation="SUM")
    mirrored = Mirrored((np.full(1, 0.1),))
    # in a replica a variable is this replica's
    for (name, reduced), value in [*product(REDUCING.items(), [mirrored]), *product(ACROSS.items(), [held])]:
        for op in ("mean", "min", "max"):
            result = reduced(strategy, op, value)
            assert result == 0.1 or (op == "mean" and name in ("reduce_scatter", "reduce along an axis"))
            assert abs(result - 0.1) < 1e-15
            np.asarray(result)[...] = 7
            assert np.asarray(value) == 0.1
        for op in ("sum", "prod"):
            if comm.size == 1:
                assert reduced(strategy, op, value) == 0.1
                continue
            what = "mirrored variable, 'variable'" if value is held else "Mirrored value"
            text = f"{what}.* same on all {comm.size} replicas.* {op.upper()} has no"
            with raises_everywhere(comm, ValueError, text):
                reduced(strategy, op, value)


def test_in_a_replica_a_variable_is_the_replicas(strategy, comm):
    held = make_variable(strategy, 2.0)
    result = strategy.run(lambda: context().all_reduce("SUM", held) + comm.rank)
    assert result == 2 * comm.size + comm.rank
    started = strategy.run(lambda: context().start_all_reduce("SUM", [held, 1.0]))
    assert started.wait() == [2 * comm.size, comm.size]
    merged = strategy.run(lambda: context().merge_call(lambda s: s.reduce("MEAN", held)))
    assert merged == 2


def test_mirrored_variable_of_another_strategy_is_summed(strategy, comm):
    with OneDeviceStrategy() as alone:
        own = make_variable(alone, comm.rank + 1.0)
        assert strategy.reduce("SUM", own) == sum(range(comm.size + 1))
        assert strategy.reduce("MAX", own) == comm.size
    held = make_variable(strategy, 2.0)
    with CollectiveAllReduce().bind(comm) as ops:
        assert ops.reduce("SUM", held, "all") == 2 * comm.size


@pytest.mark.ranks(3)
def test_mirrored_value_on_one_rank_alone_is_refused_on_all(strategy, comm):
    value = Mirrored((1.0,)) if comm.rank == 0 else 1.0
    for reduced in (REDUCING["all_reduce"], REDUCING["reduce"]):
        with raises_everywhere(comm, InvalidArgumentError, "rank 0.*Mirrored value"):
            reduced(strategy, "sum", value)
        with raises_everywhere(comm, InvalidArgumentError, "number of arrays: rank 0: 0"):
            reduced(strategy, "mean", value)
    assert strategy.reduce("SUM", 1) == comm.size


@pytest.mark.ranks(3)
def test_mirrored_value_takes_no_out(strategy, comm):
    with raises_everywhere(comm, InvalidArgumentError, "mirrored values are not reduced: leave them out"):
        inside(strategy, "all_reduce", "MEAN", Mirrored((np.ones(2),)), out=np.zeros(2))


def test_on_read_metric_assigned_to_a_variable_is_read(strategy, comm):
    """Every copy then holds the same."""
    metric = make_variable(strategy, 0.0, synchronization="ON_READ", aggregation="SUM")
    strategy.run(lambda: metric.assign(float(comm.rank)))
    held = make_variable(strategy, 0.0)
    held.assign(metric)
    assert held.local_value() == sum(range(comm.size))
    strategy.run(lambda: held.assign(metric))
    assert held.local_value() == comm.rank
