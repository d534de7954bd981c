"""Variables where a rank may carry several replicas: one copy of mirrored ones, a copy for each replica of metrics."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.everywhere import raises_everywhere, same_everywhere

import mpidist
from mpidist import IndexedSlices, Mirrored, MirroredStrategy, PerReplica, Strategy, Variable
from mpidist import MultiWorkerMirroredStrategy as WorldStrategy
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

TOTALS: dict[str, Callable[[int], int]] = {"P": lambda size: size, "2P": lambda size: 2 * size, "8": lambda _: 8}
COMBINED: dict[str, Callable[[int], float]] = {
    "SUM": lambda total: total * (total - 1) / 2,
    "MEAN": lambda total: (total - 1) / 2,
    "ONLY_FIRST_REPLICA": lambda _: 0.0,
}  # of the replicas' ids

every_total = pytest.mark.parametrize("replicas", TOTALS)
every_combining = pytest.mark.parametrize("aggregation", COMBINED)
every_synchronization = pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])


def strategy_of(comm: Intracomm, replicas: str, **named: Any) -> WorldStrategy:
    return WorldStrategy(comm=comm, replicas=TOTALS[replicas](comm.size), **named)


def make(strategy: Strategy, value: Any, **named: Any) -> Variable:
    with strategy.scope():
        return Variable(value, **named)


def context() -> mpidist.ReplicaContext:
    found = mpidist.get_replica_context()
    assert found is not None
    return found


def replica_id() -> int:
    return context().replica_id_in_sync_group


def local(strategy: Strategy, value: Any) -> list[Any]:
    return [np.asarray(part).tolist() for part in strategy.experimental_local_results(value)]


# --- What is aggregated when it is written ---


@every_total
@every_combining
@pytest.mark.parametrize("per_node", [False, True])
@pytest.mark.parametrize(("method", "sign"), [("assign", 0), ("assign_add", 1), ("assign_sub", -1)])
def test_assignment_in_run_is_aggregated_over_replicas_and_written_once(
    comm: Intracomm, replicas: str, aggregation: str, per_node: bool, method: str, sign: int
) -> None:
    with strategy_of(comm, replicas, per_node_variables=per_node) as strategy:
        variable = make(strategy, [10.0, 20.0], aggregation=aggregation)
        result = strategy.run(lambda: getattr(variable, method)(np.array([1.0, 2.0]) * replica_id()))
        assert result is variable
        combined = COMBINED[aggregation](strategy.num_replicas_in_sync)
        start = np.array([10.0, 20.0]) if sign else np.zeros(2)
        assert variable.numpy().tolist() == (start + (sign or 1) * np.array([1.0, 2.0]) * combined).tolist()
        assert same_everywhere(comm, variable.local_value())


@pytest.mark.parametrize(("aggregation", "expected"), [("SUM", 28.0), ("MEAN", 3.5), ("ONLY_FIRST_REPLICA", 0.0)])
@every_synchronization
def test_eight_replicas_on_any_number_of_ranks(
    comm: Intracomm, placement: tuple[int, ...], aggregation: str, expected: float, synchronization: str
) -> None:
    with strategy_of(comm, "8") as strategy:
        variable = make(strategy, 5.0, aggregation=aggregation, synchronization=synchronization)
        strategy.run(lambda: variable.assign(np.float64(replica_id())))
        assert float(variable) == expected


@every_total
def test_number_or_mirrored_value_is_no_contribution_to_a_sum(comm: Intracomm, replicas: str) -> None:
    with strategy_of(comm, replicas) as strategy:
        total = strategy.num_replicas_in_sync
        variable = make(strategy, 1.0, aggregation="SUM")
        if total == 1:
            strategy.run(lambda: variable.assign(5.0))
            assert float(variable) == 5
            return
        with raises_everywhere(comm, ValueError, rf"5\.0 cannot be reduced.*would count {total} times"):
            strategy.run(lambda: variable.assign(5.0))
        with raises_everywhere(comm, ValueError, "is no replica's contribution"):
            strategy.run(lambda: variable.assign_add(Mirrored((np.float64(2),))))
        assert float(variable) == 1


@every_total
@every_combining
def test_what_one_replica_cannot_assign_is_everyones_error(comm: Intracomm, replicas: str, aggregation: str) -> None:
    with strategy_of(comm, replicas) as strategy:
        last = strategy.num_replicas_in_sync - 1
        variable = make(strategy, np.zeros(2), aggregation=aggregation)
        with raises_everywhere(comm, (ValueError, InvalidArgumentError), "shape"):
            strategy.run(lambda: variable.assign(np.ones(3 if replica_id() == last else 2)))
        assert variable.numpy().tolist() == [0, 0]
        strategy.run(lambda: variable.assign(np.ones(2)))
        assert variable.numpy().tolist() == [strategy.num_replicas_in_sync if aggregation == "SUM" else 1] * 2


@pytest.mark.ranks(1)
def test_replicas_that_assign_by_other_methods_are_told(comm: Intracomm) -> None:
    with strategy_of(comm, "8") as strategy:
        variable = make(strategy, 0.0, aggregation="SUM", name="v")
        with pytest.raises(InvalidArgumentError, match="replica 1 called assignment to variable 'v' by add, while"):
            strategy.run(lambda: (variable.assign_add if replica_id() else variable.assign)(np.float64(1)))


# --- What each replica writes by itself ---


@every_total
def test_what_all_replicas_assign_is_applied_once(comm: Intracomm, replicas: str) -> None:
    with strategy_of(comm, replicas) as strategy:
        weight = make(strategy, 1.0)
        seen = strategy.run(lambda: (weight.assign_sub(0.1), float(weight), weight.local_value(), +weight)[1:])
        assert float(weight) == 0.9
        for part in seen:
            assert local(strategy, part) == [0.9] * parts_of(strategy).replicas.num_here


@every_total
def test_step_of_training(comm: Intracomm, replicas: str) -> None:
    """NumPy's expressions of variables, several writes between two calls, a second run."""

    def step(x: Any) -> Any:
        gradient, loss = context().all_reduce("mean", (x * (weights @ x), (weights * x).sum()))
        momentum.assign(0.5 * momentum + gradient)
        momentum.assign(np.clip(momentum, -1, 1))
        weights.assign_sub(0.25 * momentum)
        count.assign_add(1)
        return np.sum(weights) + loss + count

    with strategy_of(comm, replicas) as strategy:
        total = strategy.num_replicas_in_sync
        weights, momentum = make(strategy, np.array([1.0, 2.0])), make(strategy, np.zeros(2))
        count = make(strategy, 0)
        xs = strategy.experimental_distribute_values_from_function(
            lambda c: np.array([1.0, c.replica_id_in_sync_group])
        )
        plain, velocity = np.array([1.0, 2.0]), np.zeros(2)
        for number in (1, 2, 3):
            results = strategy.run(step, (xs,))
            own = [np.array([1.0, at]) for at in range(total)]
            loss = np.mean([(plain * x).sum() for x in own])
            velocity = np.clip(0.5 * velocity + np.mean([x * (plain @ x) for x in own], axis=0), -1, 1)
            plain = plain - 0.25 * velocity
            assert np.allclose(weights.numpy(), plain)
            assert np.allclose(local(strategy, results), plain.sum() + loss + number)
        assert int(count) == 3
        assert same_everywhere(comm, weights.numpy())


@every_total
@pytest.mark.parametrize("meets", [False, True])
def test_replicas_must_assign_the_same(comm: Intracomm, replicas: str, meets: bool) -> None:
    """At their next call on every rank that makes it; else at the end of `run`, on their own rank."""

    def step() -> None:
        weight.assign(np.full(2, 7.0 if replica_id() == 1 else 5.0))
        if meets:
            context().all_reduce("sum", 1.0)

    with strategy_of(comm, replicas) as strategy:
        weight = make(strategy, np.zeros(2), name="w")
        shares = parts_of(strategy).replicas
        text = "copies would differ: replica 0 assigned a value to variable 'w', and replica 1 another value"
        has_both = 1 in shares.ids_here and 0 in shares.ids_here
        is_refused_by_all = comm.bcast(has_both) and meets
        if is_refused_by_all:
            with raises_everywhere(comm, (ValueError, InvalidArgumentError), text):
                strategy.run(step)
        elif has_both:
            with pytest.raises(ValueError, match=text):
                strategy.run(step)
        else:
            strategy.run(step)
            assert weight.local_value().tolist() == [7.0 if shares.ids_here[0] == 1 else 5.0] * 2
        if has_both or is_refused_by_all:  # what one rank refuses in a call is kept on none
            assert weight.numpy().tolist() == [0, 0]
        strategy.run(lambda: weight.assign(np.ones(2)))  # what was refused is forgotten
        assert weight.numpy().tolist() == [1, 1]


@every_total
def test_replica_that_assigns_nothing_differs(comm: Intracomm, replicas: str) -> None:
    with strategy_of(comm, replicas) as strategy:
        counts = [make(strategy, 3) for _ in range(2)]

        def step(by: int) -> None:
            if replica_id() % 2 == 0:
                for count in counts:
                    count.assign_add(by)

        strategy.run(step, (0,))  # the same bits as those of who assigns nothing
        ids = parts_of(strategy).replicas.ids_here
        if len(ids) == 1:
            strategy.run(step, (1,))
            assert [int(count) for count in counts] == [3 + (ids[0] % 2 == 0)] * 2
        else:
            first = next(at for at in ids if at % 2 == 0)
            with pytest.raises(ValueError, match=rf"replica {first} assigned .* replica \d nothing"):
                strategy.run(step, (1,))
            assert [int(count) for count in counts] == [3, 3]


@every_total
def test_replica_sees_what_it_assigned_itself(comm: Intracomm, replicas: str) -> None:
    """And no other replica does; also where it assigns twice, and others in two steps what one did at once."""

    def step() -> Any:
        before = float(weight)
        for by in [3.0] if replica_id() % 2 else [1.0, 2.0]:
            weight.assign_add(by)
        after = float(weight)
        context().all_reduce("sum", 1.0)
        weight.assign_add(1.0)
        return before, after, float(weight.local_value())

    with strategy_of(comm, replicas) as strategy:
        weight = make(strategy, 10.0)
        assert parts_of(strategy).replicas.num_here == len(parts_of(strategy).replicas.ids_here)
        for part, expected in zip(strategy.run(step), (10.0, 13.0, 14.0), strict=True):
            assert local(strategy, part) == [expected] * parts_of(strategy).replicas.num_here
        assert float(weight) == 14


@every_total
def test_bits_decide_what_is_the_same(comm: Intracomm, replicas: str) -> None:
    """A NaN is the same as itself, 0.0 is not the same as -0.0; any dtype and shape."""
    with strategy_of(comm, replicas) as strategy:
        for value in (np.array([np.nan, 1]), np.arange(3, dtype=np.int8), np.zeros((0, 2)), np.full((2, 3), 1j), True):
            variable = make(strategy, np.zeros_like(value))
            strategy.run(variable.assign, (value,))
            assert np.array_equal(variable.numpy(), value, equal_nan=np.asarray(value).dtype.kind == "f")
        zero = make(strategy, 1.0)
        if parts_of(strategy).replicas.num_here > 1:
            with pytest.raises(ValueError, match="copies would differ"):
                strategy.run(lambda: zero.assign(0.0 if replica_id() % 2 else -0.0))


@every_total
def test_early_return_and_caught_exceptions(comm: Intracomm, replicas: str) -> None:
    def careful(value: Any) -> str:
        try:
            weight.assign(value)
        except ValueError:
            weight.assign_add(1.0)
            return "refused"
        if (weight > 100).all():
            return "large"
        context().all_reduce("sum", 1.0)
        weight.assign_add(1.0)
        return "small"

    with strategy_of(comm, replicas) as strategy:
        weight, num_here = make(strategy, np.zeros(2)), parts_of(strategy).replicas.num_here
        for value, said, held in ((np.zeros(3), "refused", 1), (200.0, "large", 200), (5.0, "small", 6)):
            assert list(strategy.experimental_local_results(strategy.run(careful, (value,)))) == [said] * num_here
            assert weight.numpy().tolist() == [held, held]


@every_total
def test_difference_may_be_caught_in_run(comm: Intracomm, replicas: str) -> None:
    """All ranks have the error of the call; then the replicas go on with the value from before."""

    def step() -> float:
        weight.assign(replica_id())
        try:
            context().all_reduce("sum", 1.0)
        except ValueError:  # also InvalidArgumentError, of ranks that carry one replica
            weight.assign(5.0)
        return float(weight)

    with strategy_of(comm, replicas) as strategy:
        weight, shares = make(strategy, 1.0), parts_of(strategy).replicas
        differs = shares.total > comm.size
        found = local(strategy, strategy.run(step))
        assert found == ([5.0] * shares.num_here if differs else [float(shares.ids_here[0])])
        assert float(weight) == found[0]


@every_total
def test_what_all_replicas_wrote_stays_if_some_raise(comm: Intracomm, replicas: str) -> None:
    """As on a rank of one replica, so that it does not depend on the number of ranks."""

    def step() -> None:
        weight.assign(9.0)
        if replica_id() in (0, last):
            raise KeyError("on purpose")

    with strategy_of(comm, replicas) as strategy:
        weight, shares, last = make(strategy, 1.0), parts_of(strategy).replicas, strategy.num_replicas_in_sync - 1
        if not {0, last}.isdisjoint(shares.ids_here):
            with pytest.raises(KeyError, match="on purpose"):
                strategy.run(step)
        else:
            strategy.run(step)
        assert float(weight) == 9


@every_total
def test_assignment_in_merge_call_and_update(comm: Intracomm, replicas: str) -> None:
    def apply(strategy: Any, gradient: Any) -> None:
        total = strategy.extended.reduce_to("sum", gradient, weight)
        strategy.extended.update(weight, lambda var, by: var.assign_sub(by), (total,))
        weight.assign_add(100.0)

    def step() -> float:
        weight.assign_add(1.0)
        context().merge_call(apply, (np.float64(replica_id()),))
        weight.assign_add(1.0)
        return float(weight)

    with strategy_of(comm, replicas) as strategy:
        weight = make(strategy, 0.0)
        expected = 102 - COMBINED["SUM"](strategy.num_replicas_in_sync)
        assert local(strategy, strategy.run(step)) == [expected] * parts_of(strategy).replicas.num_here
        assert float(weight) == expected
        with pytest.raises(RuntimeError, match="merge_call"):
            strategy.run(lambda: strategy.extended.update(weight, lambda var: var.assign_add(1.0)))


@every_total
def test_second_strategy_reads_and_does_not_write(comm: Intracomm, replicas: str) -> None:
    with strategy_of(comm, replicas) as strategy, strategy_of(comm, "8") as other:
        weight, theirs = make(strategy, 4.0), make(other, 0.0, aggregation="SUM")
        metric = make(strategy, 2.0, synchronization="ON_READ", aggregation="SUM")
        other.run(lambda: theirs.assign_add(np.asarray(weight * metric)))
        assert float(theirs) == 64
        with pytest.raises(RuntimeError, match="mixing different strategies"):
            other.run(lambda: weight.assign(1.0))
        strategy.run(lambda: weight.assign(theirs))
        assert float(weight) == 64


# --- Some rows ---


@every_total
@pytest.mark.parametrize("aggregation", ["NONE", *COMBINED])
def test_rows_are_changed_once_for_all_replicas(comm: Intracomm, replicas: str, aggregation: str) -> None:
    with strategy_of(comm, replicas) as strategy:
        total = strategy.num_replicas_in_sync
        table = make(strategy, np.zeros((total + 1, 2)), aggregation=aggregation)

        def step() -> Any:
            row = 0 if aggregation == "NONE" else replica_id()
            table.scatter_add(IndexedSlices(np.ones((2, 2)), [row, total]))
            return table[total, 0]

        seen = strategy.run(step)
        expected = {"NONE": [1, 1], "SUM": [1, total], "MEAN": [1 / total, 1], "ONLY_FIRST_REPLICA": [1, 1]}[
            aggregation
        ]
        assert np.allclose([table[0, 0], table[total, 1]], expected)
        assert np.allclose(local(strategy, seen), expected[1])
        with raises_everywhere(comm, (ValueError, InvalidArgumentError), "rows 0 to"):
            strategy.run(lambda: table.scatter_sub(IndexedSlices(np.ones((1, 2)), [total + 1])))
        if aggregation in ("NONE", "ONLY_FIRST_REPLICA"):
            strategy.run(lambda: table.scatter_update(IndexedSlices(np.full((1, 2), 7.0), [0])))
            assert table[0].tolist() == [7, 7]


# --- What is aggregated when it is read ---


@every_total
@every_combining
def test_each_replica_has_its_own_copy_of_a_metric(comm: Intracomm, replicas: str, aggregation: str) -> None:
    with strategy_of(comm, replicas) as strategy:
        shares = parts_of(strategy).replicas
        metric = make(strategy, [2.0], synchronization="ON_READ", aggregation=aggregation)
        seen = strategy.run(lambda: (metric.assign_add(np.array([float(replica_id())])), metric[0])[1])
        assert local(strategy, seen) == [2.0 + at for at in shares.ids_here]
        assert local(strategy, metric) == [[2.0 + at] for at in shares.ids_here]
        assert metric.local_value().tolist() == [2.0 + shares.ids_here[0]]
        added = COMBINED[aggregation](shares.total)
        expected = added + (2 * shares.total if aggregation == "SUM" else 2)
        for read in (metric.read_value, metric.numpy, lambda: np.asarray(metric), lambda: metric + 0):
            assert read().tolist() == [expected]
        assert strategy.reduce("sum", metric).tolist() == [COMBINED["SUM"](shares.total) + 2 * shares.total]
        assert strategy.gather(metric, 0).tolist() == [2.0 + at for at in range(shares.total)]
        largest = strategy.run(lambda: context().all_reduce("max", metric))
        assert local(strategy, largest) == [[shares.total + 1]] * shares.num_here


@every_total
def test_metric_with_aggregation_none_is_read_by_replicas_alone(comm: Intracomm, replicas: str) -> None:
    with strategy_of(comm, replicas) as strategy:
        metric = make(strategy, 0.0, synchronization="ON_READ")
        strategy.run(lambda: metric.assign(replica_id()))
        assert local(strategy, metric) == [float(at) for at in parts_of(strategy).replicas.ids_here]
        with pytest.raises(ValueError, match="could not convert"):
            metric.read_value()


@every_total
@pytest.mark.parametrize(("start", "value"), [(0, 10), (0, -10), (0.0, 10.0)])
def test_sum_is_dealt_out_to_replicas(comm: Intracomm, replicas: str, start: Any, value: Any) -> None:
    with strategy_of(comm, replicas) as strategy:
        shares = parts_of(strategy).replicas
        metric = make(strategy, start, synchronization="ON_READ", aggregation="SUM")
        metric.assign(value)
        assert metric.read_value() == pytest.approx(value)
        share = int(value / shares.total) if isinstance(start, int) else value / shares.total
        first = value - share * (shares.total - 1) if isinstance(start, int) else share
        assert local(strategy, metric) == [share if at else first for at in shares.ids_here]
        with pytest.raises(ValueError, match="aggregation SUM"):
            metric.assign_add(1)


@every_total
@pytest.mark.parametrize("aggregation", ["MEAN", "ONLY_FIRST_REPLICA"])
def test_metric_set_across_replicas_is_set_on_each(comm: Intracomm, replicas: str, aggregation: str) -> None:
    with strategy_of(comm, replicas) as strategy:
        metric = make(strategy, 1.0, synchronization="ON_READ", aggregation=aggregation)
        metric.assign(6.0)
        metric.assign_add(1.0)
        assert local(strategy, metric) == [7.0] * parts_of(strategy).replicas.num_here
        assert metric.read_value() == 7


@every_total
def test_update_is_called_for_each_copy(comm: Intracomm, replicas: str) -> None:
    with strategy_of(comm, replicas) as strategy:
        shares, update, calls = parts_of(strategy).replicas, strategy.extended.update, []
        ids = PerReplica(tuple(float(at) for at in shares.ids_here))

        def add(var: Variable, by: Any) -> Any:
            calls.append(by)
            var.assign_add(by)
            return var + by

        metric = make(strategy, 1.0, synchronization="ON_READ", aggregation="MEAN")
        assert local(strategy, update(metric, add, (ids,))) == [1.0 + 2 * at for at in shares.ids_here]
        assert local(strategy, metric) == [1.0 + at for at in shares.ids_here]
        assert calls == list(ids.values)
        calls.clear()
        weight = make(strategy, 1.0)
        assert update(weight, add, (2.0,)) == 5
        assert update(weight, add, (Mirrored((2.0,)),), group=False) == (7,)
        assert calls == [2.0, 2.0]
        with pytest.raises(ValueError, match="reduce the PerReplica first"):
            update(weight, add, (ids,))
        assert float(weight) == 5


@every_total
@pytest.mark.parametrize(
    ("synchronization", "aggregation"),
    [
        ("ON_WRITE", "NONE"),
        *((synchronization, name) for synchronization in ("ON_WRITE", "ON_READ") for name in COMBINED),
    ],
)
def test_per_replica_value_must_be_reduced_before_it_is_assigned(
    comm: Intracomm, replicas: str, synchronization: str, aggregation: str
) -> None:
    with strategy_of(comm, replicas) as strategy:
        variable = make(strategy, 1.0, synchronization=synchronization, aggregation=aggregation)
        ids = strategy.experimental_distribute_values_from_function(lambda c: float(c.replica_id_in_sync_group))
        with pytest.raises(ValueError, match=r"reduce the PerReplica first, as with strategy\.reduce"):
            variable.assign(ids)
        with pytest.raises(ValueError, match="reduce the PerReplica first"):
            strategy.extended.update(variable, lambda var: var.assign(ids))
        variable.assign(strategy.reduce("mean", ids))
        variable.assign(Mirrored((4.0,)))
        assert variable.read_value() == pytest.approx(4)
        if synchronization == "ON_WRITE" and aggregation != "NONE":
            strategy.run(lambda x: variable.assign(np.asarray(x)), (ids,))
            assert float(variable) == COMBINED[aggregation](strategy.num_replicas_in_sync)


# --- Variables as such ---


@every_total
def test_mirrored_variable_is_a_value_of_all_replicas(comm: Intracomm, replicas: str) -> None:
    with strategy_of(comm, replicas) as strategy:
        num_here = parts_of(strategy).replicas.num_here
        weight = make(strategy, [1.0, 2.0])
        assert len(weight.values) == num_here
        assert all(np.shares_memory(value, weight.local_value()) for value in weight.values)
        assert not any(value.flags.writeable for value in weight.values)
        assert strategy.reduce("mean", weight).tolist() == [1, 2]
        if strategy.num_replicas_in_sync > 1:
            with pytest.raises(ValueError, match="is no replica's contribution"):
                strategy.reduce("sum", weight)
        sums = strategy.run(lambda: context().all_reduce("sum", weight))
        assert local(strategy, sums) == [[strategy.num_replicas_in_sync * x for x in (1.0, 2.0)]] * num_here
        assert strategy.run(lambda x: x, (weight,)) is weight
        copy = weight.read_value()
        copy[:] = 0
        weight.values[0].copy()[:] = 0
        assert weight.numpy().tolist() == [1, 2]
        assert strategy.run(lambda: weight.read_value().flags.writeable).values == (True,) * num_here


@every_total
def test_a_refused_write_waits_for_the_call_in_which_replicas_meet(comm: Intracomm, replicas: str) -> None:
    """A started call is none: the ranks may agree on it later."""

    def step() -> list[float]:
        weight.assign(replica_id())
        started, seen = context().start_all_reduce("sum", 1.0), [float(weight)]
        weight.assign(7.0)
        context().all_reduce("sum", 1.0)
        return [started.wait(), *seen, float(weight)]

    with strategy_of(comm, replicas) as strategy:
        weight, ids = make(strategy, 1.0), parts_of(strategy).replicas.ids_here
        found = strategy.experimental_local_results(strategy.run(step))
        assert [list(of_replica) for of_replica in found] == [[strategy.num_replicas_in_sync, at, 7] for at in ids]
        assert float(weight) == 7


@every_total
def test_a_variable_made_in_run_is_one_for_all_replicas(comm: Intracomm, replicas: str) -> None:
    """T89, T139: with the value of replica 0, and a name that all have."""
    made = []

    def step() -> Any:
        own = Variable(lambda: np.full(2, 10.0 + replica_id()), name="foo")
        made.append(own)
        metric = Variable(0.0, synchronization="on_read", aggregation="sum")
        metric.assign_add(replica_id())
        own.assign_add(context().all_reduce("sum", np.ones(2)))
        return context().merge_call(lambda _, var: var.read_value(), (metric,))

    with strategy_of(comm, replicas) as strategy:
        total = strategy.num_replicas_in_sync
        assert local(strategy, strategy.run(step)) == [sum(range(total))] * len(made)
        assert len(set(map(id, made))) == 1
        assert (made[0].name, made[0].numpy().tolist()) == ("foo", [10.0 + total] * 2)
        if total > 1:
            with raises_everywhere(comm, InvalidArgumentError, "foo.*bar|bar.*foo"):
                strategy.run(lambda: Variable(1.0, name="foo" if replica_id() else "bar"))
        assert float(make(strategy, 1.0)) == 1


@every_total
def test_replica_cannot_assign_by_itself_to_the_variable_of_a_node(comm: Intracomm, replicas: str) -> None:
    with strategy_of(comm, replicas, per_node_variables=True) as strategy:
        weight = make(strategy, np.zeros(2))
        with pytest.raises(ValueError, match="aggregation NONE and is one for all ranks of a node"):
            strategy.run(lambda: weight.assign(np.ones(2)))
        with pytest.raises(ValueError, match="aggregation NONE and is one for all ranks of a node"):
            strategy.run(lambda: weight.scatter_add(IndexedSlices(np.ones(1), [0])))
        weight.assign(np.ones(2))
        assert local(strategy, strategy.run(lambda: weight + 1)) == [[2, 2]] * parts_of(strategy).replicas.num_here


@pytest.mark.ranks(1)
def test_replicas_that_write_the_same_take_the_memory_of_one_copy(comm: Intracomm) -> None:
    """And of one more array while a replica writes."""
    nbytes, count = 1 << 20, 8

    def step() -> None:
        for weight in weights:
            weight.assign_add(1.0)

    with MirroredStrategy(replicas=4, comm=comm) as strategy:
        weights = [make(strategy, np.zeros(nbytes // 8)) for _ in range(count)]
        strategy.run(step)
        tracemalloc.start()
        strategy.run(step)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert all((weight == 2.0).all() for weight in weights)
        assert count * nbytes <= peak < (count + 1.5) * nbytes
