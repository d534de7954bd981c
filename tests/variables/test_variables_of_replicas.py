"""What is special where a rank carries several replicas: what each of them writes by itself, and what they share."""

import tracemalloc

import numpy as np
import pytest
from support.everywhere import raises_everywhere, same_everywhere
from support.replicas import context, ids_here, local, replica_id, shared_ranks
from support.replicas import make_variable as make

from mpidist import IndexedSlices, MirroredStrategy, Variable
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError

pytestmark = pytest.mark.ranks(1, 3)


@pytest.fixture
def strategy(comm, replicas):
    with Strategy(comm=comm, replicas=replicas) as made:
        yield made


# --- What each replica writes by itself ---


def test_step_of_training(comm, strategy):
    """NumPy's expressions of variables, several writes between two calls, a second run."""

    def step(x):
        gradient, loss = context().all_reduce("mean", (x * (weights @ x), (weights * x).sum()))
        momentum.assign(0.5 * momentum + gradient)
        momentum.assign(np.clip(momentum, -1, 1))
        weights.assign_sub(0.25 * momentum)
        count.assign_add(1)
        return np.sum(weights) + loss + count

    total = strategy.num_replicas_in_sync
    weights, momentum = make(strategy, np.array([1.0, 2.0])), make(strategy, np.zeros(2))
    count = make(strategy, 0)
    xs = strategy.experimental_distribute_values_from_function(lambda c: np.array([1.0, c.replica_id_in_sync_group]))
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


@pytest.mark.parametrize("meets", [False, True])
def test_replicas_must_assign_the_same(comm, strategy, meets):
    """At their next call on every rank that makes it; else at the end of `run`, on their own rank."""

    def step():
        weight.assign(np.full(2, 7.0 if replica_id() == 1 else 5.0))
        if meets:
            context().all_reduce("sum", 1.0)

    weight, ids = make(strategy, np.zeros(2), name="w"), ids_here(strategy)
    text = "copies would differ: replica 0 assigned a value to variable 'w', and replica 1 another value"
    has_both = 1 in ids and 0 in ids
    is_refused_by_all = comm.bcast(has_both) and meets
    if is_refused_by_all:
        with raises_everywhere(comm, (ValueError, InvalidArgumentError), text):
            strategy.run(step)
    elif has_both:
        with pytest.raises(
            ValueError, match=rf"{text}.* Other ranks may .* after strategy.reset\(\) on all ranks, assign"
        ):
            strategy.run(step)
    else:
        strategy.run(step)
        assert weight.local_value().tolist() == [7.0 if ids[0] == 1 else 5.0] * 2
    if has_both or is_refused_by_all:  # what one rank refuses in a call is kept on none
        assert weight.numpy().tolist() == [0, 0]
    strategy.run(lambda: weight.assign(np.ones(2)))  # what was refused is forgotten
    assert weight.numpy().tolist() == [1, 1]


@shared_ranks
def test_replica_that_assigns_nothing_differs(strategy):
    counts, ids = [make(strategy, 3) for _ in range(2)], ids_here(strategy)

    def step(by):
        if replica_id() % 2 == 0:
            for count in counts:
                count.assign_add(by)

    strategy.run(step, (0,))  # the same bits as those of who assigns nothing
    first = next(at for at in ids if at % 2 == 0)
    with pytest.raises(ValueError, match=rf"replica {first} assigned .* replica \d nothing"):
        strategy.run(step, (1,))
    assert [int(count) for count in counts] == [3, 3]


@shared_ranks
def test_replica_reads_its_own_assignments_before_others(strategy):
    """And no other replica does; also where it assigns twice, and others in two steps what one did at once."""

    def step():
        before = float(weight)
        for by in [3.0] if replica_id() % 2 else [1.0, 2.0]:
            weight.assign_add(by)
        after = float(weight)
        context().all_reduce("sum", 1.0)
        weight.assign_add(1.0)
        started = context().start_all_reduce("sum", 1.0)  # here the replicas meet, and commit nothing
        between = float(weight)
        weight.assign_add(1.0)
        started.wait()
        return before, after, between, float(weight.local_value())

    weight = make(strategy, 10.0)
    for part, expected in zip(strategy.run(step), (10.0, 13.0, 14.0, 15.0), strict=True):
        assert local(strategy, part) == [expected] * len(ids_here(strategy))
    assert float(weight) == 15


@shared_ranks
def test_assign_compares_replicas_by_bits(strategy):
    """A NaN is the same as itself, 0.0 is not the same as -0.0; any dtype and shape."""
    for value in (np.array([np.nan, 1]), np.arange(3, dtype=np.int8), np.zeros((0, 2)), np.full((2, 3), 1j), True):
        variable = make(strategy, np.zeros_like(value))
        strategy.run(variable.assign, (value,))
        assert np.array_equal(variable.numpy(), value, equal_nan=np.asarray(value).dtype.kind == "f")
    zero = make(strategy, 1.0)
    with pytest.raises(ValueError, match="copies would differ"):
        strategy.run(lambda: zero.assign(0.0 if replica_id() % 2 else -0.0))


def test_early_return_and_caught_exceptions(strategy):
    def careful(value):
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

    weight = make(strategy, np.zeros(2))
    for value, outcome, held in ((np.zeros(3), "refused", 1), (200.0, "large", 200), (5.0, "small", 6)):
        assert local(strategy, strategy.run(careful, (value,))) == [outcome] * len(ids_here(strategy))
        assert weight.numpy().tolist() == [held, held]


@pytest.mark.ranks(3)
def test_difference_may_be_caught_in_run(strategy, replicas):
    """All ranks have the error of the call; then the replicas go on with the value from before."""

    def step():
        weight.assign(replica_id())
        try:
            context().all_reduce("sum", 1.0)
        except ValueError:  # also InvalidArgumentError, of ranks that carry one replica
            weight.assign(5.0)
        return float(weight)

    weight, ids = make(strategy, 1.0), ids_here(strategy)
    found = local(strategy, strategy.run(step))
    assert found == [5.0 if replicas == 7 else float(ids[0])] * len(ids)
    assert float(weight) == found[0]


def test_assign_of_all_replicas_stays_if_some_raise(strategy):
    """As on a rank of one replica, so that it does not depend on the number of ranks."""

    def step():
        weight.assign(9.0)
        if replica_id() in (0, last):
            raise StopIteration("on purpose")

    weight, last = make(strategy, 1.0), strategy.num_replicas_in_sync - 1
    if not {0, last}.isdisjoint(ids_here(strategy)):
        with pytest.raises(StopIteration, match="on purpose"):
            strategy.run(step)
    else:
        strategy.run(step)
    assert float(weight) == 9


def test_assignment_in_merge_call_and_update(strategy):
    def apply(strategy, gradient):
        total = strategy.extended.reduce_to("sum", gradient, weight)
        strategy.extended.update(weight, lambda var, by: var.assign_sub(by), (total,))
        weight.assign_add(100.0)

    def step():
        weight.assign_add(1.0)
        context().merge_call(apply, (np.float64(replica_id()),))
        weight.assign_add(1.0)
        return float(weight)

    weight = make(strategy, 0.0)
    expected = 102 - sum(range(strategy.num_replicas_in_sync))
    assert local(strategy, strategy.run(step)) == [expected] * len(ids_here(strategy))
    assert float(weight) == expected


@shared_ranks
def test_second_strategy_reads_and_does_not_write(comm, strategy):
    weight, metric = make(strategy, 4.0), make(strategy, 2.0, "SUM", "ON_READ")
    with pytest.raises(RuntimeError, match="merge_call"):
        strategy.run(lambda: strategy.extended.update(weight, lambda var: var.assign_add(1.0)))
    with Strategy(comm=comm, replicas=8) as other:
        theirs = make(other, 0.0, "SUM")
        other.run(lambda: theirs.assign_add(np.asarray(weight * metric)))
        assert float(theirs) == 8 * 4 * 2
        with pytest.raises(RuntimeError, match="mixing different strategies"):
            other.run(lambda: weight.assign(1.0))
        strategy.run(lambda: weight.assign(theirs))
        assert float(weight) == float(theirs)


# --- Some rows ---


@pytest.mark.parametrize("aggregation", ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_rows_are_changed_once_for_all_replicas(comm, strategy, aggregation):
    total = strategy.num_replicas_in_sync
    table = make(strategy, np.zeros((total + 1, 2)), aggregation)

    def step():
        row = 0 if aggregation == "NONE" else replica_id()
        table.scatter_add(IndexedSlices(np.ones((2, 2)), [row, total]))
        return table[total, 0]

    seen = strategy.run(step)
    expected = {"SUM": [1, total], "MEAN": [1 / total, 1]}.get(aggregation, [1, 1])
    assert np.allclose([table[0, 0], table[total, 1]], expected)
    assert np.allclose(local(strategy, seen), expected[1])
    with raises_everywhere(comm, (ValueError, InvalidArgumentError), "rows 0 to"):
        strategy.run(lambda: table.scatter_sub(IndexedSlices(np.ones((1, 2)), [total + 1])))
    if aggregation in ("NONE", "ONLY_FIRST_REPLICA"):
        strategy.run(lambda: table.scatter_update(IndexedSlices(np.full((1, 2), 7.0), [0])))
        assert table[0].tolist() == [7, 7]


# --- Variables as such ---


@pytest.mark.ranks(3)
def test_mirrored_variable_is_a_value_of_all_replicas(strategy):
    num_here = len(ids_here(strategy))
    weight = make(strategy, [1.0, 2.0])
    assert len(weight.values) == num_here
    assert all(np.shares_memory(value, weight.local_value()) for value in weight.values)
    assert not any(value.flags.writeable for value in weight.values)
    assert strategy.reduce("mean", weight).tolist() == [1, 2]
    with pytest.raises(ValueError, match="is no replica's contribution"):
        strategy.reduce("sum", weight)
    sums = strategy.run(lambda: context().all_reduce("sum", weight))
    assert local(strategy, sums) == [[strategy.num_replicas_in_sync * x for x in (1.0, 2.0)]] * num_here
    assert strategy.run(lambda x: x, (weight,)) is weight
    copy = weight.read_value()
    copy[:] = 0
    weight.values[0].copy()[:] = 0
    assert weight.numpy().tolist() == [1, 2]
    assert local(strategy, strategy.run(lambda: weight.read_value().flags.writeable)) == [True] * num_here


@shared_ranks
def test_assign_unlike_in_replicas_is_not_refused_before_they_meet(strategy):
    """A started call is none: the ranks may agree on it later."""

    def step():
        weight.assign(replica_id())
        started, seen = context().start_all_reduce("sum", 1.0), [float(weight)]
        weight.assign(7.0)
        context().all_reduce("sum", 1.0)
        return [started.wait(), *seen, float(weight)]

    weight = make(strategy, 1.0)
    found = strategy.experimental_local_results(strategy.run(step))
    assert [list(own) for own in found] == [[strategy.num_replicas_in_sync, at, 7] for at in ids_here(strategy)]
    assert float(weight) == 7


@pytest.mark.ranks(3)
def test_variable_created_in_run_is_shared_by_replicas(comm, strategy):
    """With the value of replica 0, and a name that all have."""
    made = []

    def step():
        own = Variable(lambda: np.full(2, 10.0 + replica_id()), name="foo")
        made.append(own)
        metric = Variable(0.0, synchronization="on_read", aggregation="sum")
        metric.assign_add(replica_id())
        own.assign_add(context().all_reduce("sum", np.ones(2)))
        return context().merge_call(lambda _, var: var.read_value(), (metric,))

    total = strategy.num_replicas_in_sync
    assert local(strategy, strategy.run(step)) == [sum(range(total))] * len(made)
    assert len(set(map(id, made))) == 1
    assert (made[0].name, made[0].strategy, made[0].numpy().tolist()) == ("foo", strategy, [10.0 + total] * 2)
    with raises_everywhere(comm, InvalidArgumentError, "foo.*bar|bar.*foo"):
        strategy.run(lambda: Variable(1.0, name="foo" if replica_id() else "bar"))
    assert float(make(strategy, 1.0)) == 1


@pytest.mark.ranks(3)
def test_variables_of_one_name_are_not_mixed(comm, strategy):
    """By the order in which they were made: replicas fill dicts in any order, and assign and read in one."""
    made, total = [make(strategy, [0.0], "SUM", name="w")], strategy.num_replicas_in_sync
    strategy.run(lambda: made.append(Variable([0.0], name="w", aggregation="sum")))
    metrics = [make(strategy, 0.0, "SUM", "ON_READ", name="w") for _ in range(2)]

    def in_some_order():
        return made[:2] if replica_id() else made[1::-1]

    def step():
        sums = context().all_reduce("sum", {one: 1.0 if one is made[0] else 5.0 for one in in_some_order()})
        return [sums[one] for one in made[:2]]

    assert local(strategy, strategy.run(step)) == [[total, 5 * total]] * len(ids_here(strategy))
    for call in (
        lambda: strategy.run(lambda: [one.assign_add(np.ones(1)) for one in in_some_order()]),
        lambda: strategy.run(lambda: [one.scatter_add(IndexedSlices(np.ones(1), [0])) for one in in_some_order()]),
        lambda: strategy.run(lambda: context().all_reduce("sum", {in_some_order()[0]: 1.0})),
        lambda: [one.numpy() for one in (metrics if comm.rank else metrics[::-1])],
    ):
        with raises_everywhere(comm, (InvalidArgumentError, ValueError), r"variable 'w' \(\d\)"):
            call()
    assert [one.numpy().tolist() for one in made[:2]] == [[0], [0]]


@pytest.mark.ranks(3)
def test_variables_of_one_name_agree_after_a_reset(comm):
    """Though some ranks have counted one that failed on the others."""
    with Strategy(comm=comm) as strategy:
        for _ in range(1 + comm.rank):
            parts_of(strategy).variable_suffix("w")
        strategy.reset()
        variable = make(strategy, 0.0, "SUM", name="w")
        strategy.run(lambda: variable.assign(np.ones(())))
        assert float(variable) == 3


def test_replica_cannot_assign_by_itself_to_the_variable_of_a_node(comm, replicas):
    with Strategy(comm=comm, replicas=replicas, per_node_variables=True) as strategy:
        weight = make(strategy, np.zeros(2))
        for change in (lambda: weight.assign(np.ones(2)), lambda: weight.scatter_add(IndexedSlices(np.ones(1), [0]))):
            with pytest.raises(ValueError, match="aggregation NONE and is one for all ranks of a node"):
                strategy.run(change)
        weight.assign(np.ones(2))
        assert local(strategy, strategy.run(lambda: weight + 1)) == [[2, 2]] * len(ids_here(strategy))


@pytest.mark.no_mpi
def test_replicas_that_write_the_same_take_the_memory_of_one_copy():
    """And of one more array while a replica writes."""
    nbytes, count = 1 << 20, 8

    def step():
        for weight in weights:
            weight.assign_add(1.0)

    with MirroredStrategy(replicas=4) as strategy:
        weights = [make(strategy, np.zeros(nbytes // 8)) for _ in range(count)]
        strategy.run(step)
        tracemalloc.start()
        strategy.run(step)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert all((weight == 2.0).all() for weight in weights)
        assert count * nbytes <= peak < (count + 1.5) * nbytes
