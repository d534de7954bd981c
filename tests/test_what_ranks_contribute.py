"""What counts of a value in calls that join ranks: this rank's own copy; and nothing, where all have the same."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.everywhere import raises_everywhere, same_everywhere
from support.ranks import Intracomm

import mpidist
from mpidist import CollectiveAllReduce, Mirrored, OneDeviceStrategy, PerReplica, Variable
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.errors import InvalidArgumentError

pytestmark = pytest.mark.core


def in_run(strategy: Strategy, call: str, *args: Any, **named: Any) -> Any:
    def step() -> Any:
        result = getattr(mpidist.get_replica_context(), call)(*args, **named)
        return result.wait() if call == "start_all_reduce" else result

    return strategy.run(step)


def variable(strategy: Strategy, value: Any, **rules: Any) -> Variable:
    with strategy.scope():
        return Variable(value, **rules)


# Calls that reduce: with an operation and a value, of which a rank gets an array of one element, or a number.
ACROSS: dict[str, Callable[[Strategy, str, Any], Any]] = {
    "reduce": lambda s, op, x: s.reduce(op, x),
    "reduce of a nest": lambda s, op, x: s.reduce(op, {"a": [x]})["a"][0],
    "reduce_to": lambda s, op, x: s.extended.reduce_to(op, x, "all"),
    "batch_reduce_to": lambda s, op, x: s.extended.batch_reduce_to(op, [(x, "all")])[0],
    "reduce along an axis": lambda s, op, x: s.reduce(op, x, axis=0),
}
IN_RUN: dict[str, Callable[[Strategy, str, Any], Any]] = {
    "all_reduce": lambda s, op, x: in_run(s, "all_reduce", op, x),
    "all_reduce of a nest": lambda s, op, x: in_run(s, "all_reduce", op, (np.ones(2), x))[1],
    "start_all_reduce": lambda s, op, x: in_run(s, "start_all_reduce", op, x),
    "reduce_scatter": lambda s, op, x: s.gather(in_run(s, "reduce_scatter", op, x), 0),
}
REDUCING = ACROSS | IN_RUN


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("aggregation", ["SUM", "NONE"])
def test_a_metric_counts_with_this_ranks_copy(strategy: Strategy, comm: Intracomm, aggregation: str) -> None:
    """With aggregation NONE it could not be read across replicas, so nothing reads it in secret."""
    rank, size = comm.rank, comm.size
    metric = variable(strategy, np.zeros(1), synchronization="ON_READ", aggregation=aggregation)
    strategy.run(lambda: metric.assign(np.full(1, float(rank))))
    for name, reduced in REDUCING.items():
        assert reduced(strategy, "sum", metric) == sum(range(size)), name
        assert reduced(strategy, "mean", metric) == (size - 1) / 2, name
        assert reduced(strategy, "max", metric) == size - 1, name
    assert strategy.gather(metric, 0).tolist() == list(range(size))
    assert in_run(strategy, "all_gather", {"m": metric}, 0)["m"].tolist() == list(range(size))
    assert strategy.extended.broadcast_to(metric, "all").tolist() == [0]
    (own,) = strategy.experimental_local_results({"m": metric})
    assert own["m"].tolist() == [rank]
    assert strategy.symmetric_empty_like(metric).shape == (1,)
    assert metric.local_value().tolist() == [rank]


@pytest.mark.ranks(1, 3)
def test_what_is_mirrored_has_a_mean_and_no_sum(strategy: Strategy, comm: Intracomm) -> None:
    """Of three times 0.1, added and divided, the mean would be another number."""
    held = variable(strategy, np.full(1, 0.1), aggregation="SUM")
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


@pytest.mark.ranks(1, 3)
def test_in_a_replica_a_variable_is_the_replicas(strategy: Strategy, comm: Intracomm) -> None:
    held = variable(strategy, 2.0)
    result = strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", held) + comm.rank)
    assert result == 2 * comm.size + comm.rank
    started = strategy.run(lambda: mpidist.get_replica_context().start_all_reduce("SUM", [held, 1.0]))
    assert started.wait() == [2 * comm.size, comm.size]
    merged = strategy.run(lambda: mpidist.get_replica_context().merge_call(lambda s: s.reduce("MEAN", held)))
    assert merged == 2


@pytest.mark.ranks(1, 3)
def test_a_variable_is_mirrored_over_its_own_strategys_ranks_alone(strategy: Strategy, comm: Intracomm) -> None:
    with OneDeviceStrategy() as alone:
        own = variable(alone, comm.rank + 1.0)
        assert strategy.reduce("SUM", own) == sum(range(comm.size + 1))
        assert strategy.reduce("MAX", own) == comm.size
    held = variable(strategy, 2.0)
    with CollectiveAllReduce().bind(comm) as ops:
        assert ops.reduce("SUM", held, "all") == 2 * comm.size


@pytest.mark.ranks(3)
def test_what_is_mirrored_on_one_rank_alone_is_refused_on_all(strategy: Strategy, comm: Intracomm) -> None:
    value = Mirrored((1.0,)) if comm.rank == 0 else 1.0
    for reduced in (REDUCING["all_reduce"], REDUCING["reduce"]):
        with raises_everywhere(comm, InvalidArgumentError, "rank 0.*Mirrored value"):
            reduced(strategy, "sum", value)
        with raises_everywhere(comm, InvalidArgumentError, "number of arrays: rank 0: 0"):
            reduced(strategy, "mean", value)
    assert strategy.reduce("SUM", 1) == comm.size


@pytest.mark.ranks(2)
def test_what_is_mirrored_has_no_out(strategy: Strategy, comm: Intracomm) -> None:
    with raises_everywhere(comm, InvalidArgumentError, "mirrored values are not: leave them out"):
        in_run(strategy, "all_reduce", "MEAN", Mirrored((np.ones(2),)), out=np.zeros(2))


@pytest.mark.ranks(1, 3)
def test_assigning_what_is_mirrored_with_sum_is_refused(strategy: Strategy, comm: Intracomm) -> None:
    """A `PerReplica` says itself that it is a contribution, also of a Python number."""
    total = variable(strategy, 0.0, aggregation="SUM")
    strategy.run(lambda: total.assign(PerReplica((2.0,)) if comm.size > 1 else 2.0))
    assert total.local_value() == 2 * comm.size
    if comm.size > 1:
        with raises_everywhere(comm, ValueError, "a Mirrored value is the same on all"):
            strategy.run(lambda: total.assign_add(Mirrored((np.float64(2),))))
    strategy.extended.update(total, lambda var: var.assign(Mirrored((3.0,))))
    assert total.read_value() == 3
    mean = variable(strategy, 0.0, aggregation="MEAN")
    strategy.run(lambda: mean.assign(Mirrored((3.0,))))
    assert mean.read_value() == 3
    assert same_everywhere(comm, mean.local_value())


@pytest.mark.ranks(1, 3)
def test_a_metric_assigned_across_replicas_is_read(strategy: Strategy, comm: Intracomm) -> None:
    """Every copy then holds the same."""
    metric = variable(strategy, 0.0, synchronization="ON_READ", aggregation="SUM")
    strategy.run(lambda: metric.assign(float(comm.rank)))
    held = variable(strategy, 0.0)
    held.assign(metric)
    assert held.local_value() == sum(range(comm.size))
    strategy.run(lambda: held.assign(metric))
    assert held.local_value() == comm.rank
