"""Assigning to variables and reading them: synchronization x aggregation x operation x number of replicas."""

import operator
import tracemalloc
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from support.everywhere import raises_everywhere, same_everywhere
from support.replicas import context, ids_here, local, replica_id
from support.replicas import make_variable as make

from mpidist import Mirrored, OneDeviceStrategy, PerReplica, Variable
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.errors import InvalidArgumentError

pytestmark = pytest.mark.ranks(1, 3)

# What becomes of the values of all replicas.
COMBINED = {
    "SUM": sum,
    "MEAN": lambda values: sum(values) / len(values),
    "ONLY_FIRST_REPLICA": lambda values: values[0],
}
AGGREGATIONS = ["NONE", *COMBINED]
SYNCHRONIZATIONS = ["ON_WRITE", "ON_READ"]
METHODS = {"assign": lambda old, new: new, "assign_add": operator.add, "assign_sub": operator.sub}

every_synchronization = pytest.mark.parametrize("synchronization", SYNCHRONIZATIONS)
every_combining = pytest.mark.parametrize("aggregation", COMBINED)
every_method = pytest.mark.parametrize("method", METHODS)


@pytest.fixture
def strategy(comm, replicas):
    with Strategy(comm=comm, replicas=replicas) as made:
        yield made


def combined(aggregation, strategy):
    """Aggregate the ids of all replicas."""
    return COMBINED[aggregation](list(range(strategy.num_replicas_in_sync)))


# --- In run ---


@pytest.mark.core
@pytest.mark.parametrize("per_node", [False, True])
def test_assignment_in_run_is_aggregated_over_replicas_and_written_once(comm, replicas, per_node):
    with Strategy(comm=comm, replicas=replicas, per_node_variables=per_node) as strategy:
        for aggregation, method in product(COMBINED, METHODS):
            variable = make(strategy, [10.0, 20.0], aggregation)
            expected, change = np.array([10.0, 20.0]), getattr(variable, method)
            for _ in range(2):
                assert strategy.run(lambda by=change: by(np.array([1.0, 2.0]) * replica_id())) is variable
                expected = METHODS[method](expected, np.array([1.0, 2.0]) * combined(aggregation, strategy))
            assert variable.numpy().tolist() == expected.tolist(), (aggregation, method)
            assert local(strategy, strategy.run(variable.read_value)) == [expected.tolist()] * len(ids_here(strategy))
            assert same_everywhere(comm, variable.local_value())


def test_replicas_come_to_the_same_on_any_nodes(comm, placement):
    """The first replica is that of all nodes; also where a node has one copy."""
    for (replicas, first), per_node in product(((8, 0.0), (None, 7.0)), (False, True)):
        with Strategy(comm=comm, replicas=replicas, per_node_variables=per_node) as strategy:
            for aggregation, expected in (("SUM", 28.0), ("MEAN", 3.5), ("ONLY_FIRST_REPLICA", first)):
                for synchronization in SYNCHRONIZATIONS:
                    if replicas or aggregation == "ONLY_FIRST_REPLICA":
                        variable = make(strategy, 5.0, aggregation, synchronization)
                        strategy.run(lambda v=variable, by=first: v.assign(np.float64(replica_id() + by)))
                        strategy.run(lambda v=variable, by=first: v.assign_add(np.float64(replica_id() + by)))
                        assert float(variable) == 2 * expected
                        assert same_everywhere(comm, np.asarray(variable))


@pytest.mark.ranks(3)
def test_number_assigned_in_run_is_assigned_once_and_refused_where_it_would_be_summed(comm, strategy):
    total, num_here = strategy.num_replicas_in_sync, len(ids_here(strategy))
    for synchronization, aggregation, method in product(SYNCHRONIZATIONS, AGGREGATIONS, METHODS):
        variable = make(strategy, 1.0, aggregation, synchronization)
        change = getattr(variable, method)
        if (synchronization, aggregation) == ("ON_WRITE", "SUM"):
            with raises_everywhere(comm, ValueError, rf"Values value 5\.0 cannot be reduced.* {total} times"):
                strategy.run(change, (5.0,))
            with raises_everywhere(comm, ValueError, "is no replica's contribution"):
                strategy.run(lambda by=change: by(Mirrored((np.float64(5),))))
            assert variable.local_value() == 1
        else:
            strategy.run(change, (5.0,))
            assert local(strategy, strategy.run(lambda var=variable: +var)) == [METHODS[method](1.0, 5.0)] * num_here


@pytest.mark.ranks(3)
def test_components_and_numbers_assigned_in_run_are_aggregated(comm):
    with Strategy(comm=comm) as strategy:
        for aggregation, expected in (("SUM", 3.0), ("MEAN", 1.0), ("ONLY_FIRST_REPLICA", 1.0)):
            variable = make(strategy, [5.0, 1.0], aggregation)
            strategy.run(lambda v=variable: v.assign(PerReplica((np.ones(2),))))
            assert variable.read_value().tolist() == [expected] * 2
            strategy.run(lambda v=variable: v.assign(np.ones(2) if comm.rank else np.float64(1)))
            assert variable.read_value().tolist() == [expected] * 2
            if aggregation != "SUM":
                strategy.run(lambda v=variable: v.assign(Mirrored((np.full(2, 3.0),))))
                assert variable.read_value().tolist() == [3.0] * 2
        total = make(strategy, 0.0, "SUM")
        strategy.run(lambda: total.assign(PerReplica((2.0,))))
        assert total.local_value() == 2 * comm.size
        strategy.extended.update(total, lambda var: var.assign(Mirrored((3.0,))))
        assert total.read_value() == 3
        wraps = make(strategy, np.uint8(0), "SUM")
        strategy.run(lambda: wraps.assign_add(np.uint8(200)))
        assert wraps.local_value() == 600 % 256


@pytest.mark.ranks(3)
def test_values_assigned_in_run_take_the_dtype_of_the_variable(strategy):
    for synchronization in SYNCHRONIZATIONS:
        variable = make(strategy, np.float32(0), "MEAN", synchronization)
        for value in (1, np.float64(1), np.int8(1), np.ones((), ">f8"), np.float16(1)):
            variable.assign(0.0)
            strategy.run(variable.assign_add, (value,))
            assert variable.local_value() == 1
            assert variable.local_value().dtype == variable.read_value().dtype == np.float32


# --- What is aggregated when it is read ---


@pytest.mark.core
@every_combining
def test_on_read_metric_has_a_copy_of_each_replica_and_is_aggregated(strategy, aggregation):
    ids, total = ids_here(strategy), strategy.num_replicas_in_sync
    metric = make(strategy, [2.0], aggregation, "ON_READ")
    seen = strategy.run(lambda: (metric.assign_add(np.array([float(replica_id())])), metric[0])[1])
    assert local(strategy, seen) == [2.0 + at for at in ids]
    assert [value.tolist() for value in metric.values] == [[2.0 + at] for at in ids]
    with strategy.scope():
        assert metric.local_value().tolist() == [2.0 + ids[0]]
    assert len(ids) > 1 or f"this rank's copy: array([{2 + ids[0]}.])" in repr(metric)
    expected = combined(aggregation, strategy) + (2 * total if aggregation == "SUM" else 2)
    for read in (metric.read_value, metric.value, metric.numpy, lambda: np.asarray(metric), lambda: metric + 0):
        assert read().tolist() == [expected]
    assert strategy.reduce("sum", metric).tolist() == [combined("SUM", strategy) + 2 * total]
    assert strategy.gather(metric, 0).tolist() == [2.0 + at for at in range(total)]
    largest = strategy.run(lambda: context().all_reduce("max", metric))
    assert local(strategy, largest) == [[total + 1]] * len(ids)


def test_on_read_metric_with_aggregation_none_is_read_in_replicas_alone(strategy):
    metric = make(strategy, 0.0, "NONE", "ON_READ")
    strategy.run(lambda: metric.assign(replica_id()))
    assert [float(value) for value in metric.values] == list(ids_here(strategy))
    for use in (metric.read_value, lambda: np.asarray(metric), lambda: metric + 1, lambda: metric.assign(8.0)):
        with pytest.raises(ValueError, match="could not convert"):
            use()


@pytest.mark.ranks(3)
def test_on_read_metric_after_unlike_numbers_of_steps_is_aggregated(comm):
    """A counter: nothing is sent until it is read."""
    with Strategy(comm=comm) as strategy:
        for aggregation, expected in (("SUM", 10.0), ("MEAN", 10 / 3)):
            metric = make(strategy, 0.0, aggregation, "ON_READ")
            for _ in range(3 + (comm.rank == 0)):
                strategy.run(lambda v=metric: v.assign_add(1.0))
            assert metric.read_value() == pytest.approx(expected)


# --- Across replicas ---


@pytest.mark.core
def test_assignment_across_replicas_changes_every_copy(strategy):
    """A copy of what is summed when it is read gets its share."""
    total, num_here = strategy.num_replicas_in_sync, len(ids_here(strategy))
    for synchronization, aggregation, method in product(SYNCHRONIZATIONS, AGGREGATIONS, METHODS):
        variable = make(strategy, 2.0, aggregation, synchronization)
        change = getattr(variable, method)
        if synchronization == "ON_READ" and aggregation in ("NONE", "SUM") and method != "assign":
            with pytest.raises(ValueError, match=f"aggregation {aggregation}"):
                change(1.0)
            assert variable.local_value() == 2
        elif (synchronization, aggregation) != ("ON_READ", "NONE"):
            assert change(1.0) is variable
            expected = METHODS[method](2.0, 1.0)
            share = expected / (total if (synchronization, aggregation) == ("ON_READ", "SUM") else 1)
            assert [float(value) for value in variable.values] == pytest.approx([share] * num_here)
            assert variable.read_value() == pytest.approx(expected)
            with strategy.scope():
                assert change(1.0) is variable


def test_on_read_float_sum_reads_back_the_assigned_total(strategy):
    """Also the least numbers and the largest ones."""
    numbers = np.arange(-150, 150)
    for dtype in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        least, largest = (float(getattr(ml_dtypes.finfo(dtype), name)) for name in ("smallest_subnormal", "max"))
        totals = np.concatenate([numbers, numbers / 3, numbers * least, [largest, np.inf, -np.inf, np.nan]])
        totals = totals.astype(dtype)
        metric = make(strategy, np.zeros_like(totals), "SUM", "ON_READ")
        metric.assign(totals)
        np.testing.assert_array_equal(metric.read_value().astype(float), totals.astype(float))
    for value in (7, 0.1, complex(0.1, -7), np.inf, complex(1, np.inf)):  # also the parts of complex ones
        metric = make(strategy, np.complex64(0), "SUM", "ON_READ")
        assert metric.assign(np.complex64(value)).read_value() == np.complex64(value)


def test_on_read_integer_sum_divides_on_assign(strategy):
    """What does not divide by the number of replicas is the first one's."""
    for dtype in ("int64", "int8", "uint8"):
        metric = make(strategy, np.zeros(2, dtype), "SUM", "ON_READ")
        signed = [-10, -1, [-128, 127]] if dtype[0] == "i" else []
        for total in (1, 0, 127, [7, 3], np.array([1, 100], dtype), *signed, 10):
            metric.assign(total)
            assert metric.read_value().tolist() == np.broadcast_to(total, 2).tolist()
        share, rest = divmod(10, strategy.num_replicas_in_sync)
        assert [value.tolist() for value in metric.values] == [
            [share + (0 if at else rest)] * 2 for at in ids_here(strategy)
        ]
    assert make(strategy, False, "SUM", "ON_READ").assign(True).local_value().dtype == np.bool_


@every_synchronization
def test_update_is_called_for_each_copy(strategy, replicas, synchronization):
    ids, update = ids_here(strategy), strategy.extended.update
    variable = make(strategy, 1.0, "MEAN", synchronization)
    own = PerReplica(tuple(float(at) for at in ids))

    def add(var, by, factor=1.0):
        calls.append(by)
        var.assign_add(by)
        return var + by * factor

    calls = []
    if synchronization == "ON_WRITE" and replicas is not None:
        with pytest.raises(ValueError, match="reduce the PerReplica first"):
            update(variable, add, (own,))
        assert update(variable, add, (Mirrored((2.0,)),), group=False) == (5,)
        assert update(variable, add, (2.0,), {"factor": 2.0}) == 9
        assert (calls, float(variable)) == ([2.0, 2.0], 5)
        return
    assert local(strategy, update(variable, add, (own,))) == [1.0 + 2 * at for at in ids]
    assert [float(value) for value in variable.values] == [1.0 + at for at in ids]
    assert calls == list(own.values)
    assert local(strategy, update(variable, add, (own,), {"factor": 2.0})) == [1.0 + 4 * at for at in ids]
    if replicas is None:
        assert update(variable, add, (own,), group=False) == (1.0 + 4 * ids[0],)


@pytest.mark.parametrize(
    ("synchronization", "aggregation"), [("ON_WRITE", "NONE"), *product(SYNCHRONIZATIONS, COMBINED)]
)
def test_per_replica_value_must_be_reduced_before_it_is_assigned(strategy, replicas, synchronization, aggregation):
    variable = make(strategy, 1.0, aggregation, synchronization)
    ids = strategy.experimental_distribute_values_from_function(lambda own: float(own.replica_id_in_sync_group))
    if replicas is None:  # one component is this rank's
        variable.assign(PerReplica((3.0,)))
        assert variable.read_value() == pytest.approx(3)
    else:
        for assign in (
            variable.assign,
            lambda value: strategy.extended.update(variable, lambda var: var.assign(value)),
        ):
            with pytest.raises(ValueError, match=r"reduce the PerReplica first, as with strategy\.reduce"):
                assign(ids)
    variable.assign(strategy.reduce("mean", ids))
    variable.assign(Mirrored((4.0,)))
    assert variable.read_value() == pytest.approx(4)
    if synchronization == "ON_WRITE" and aggregation != "NONE":
        strategy.run(lambda x: variable.assign(np.asarray(x)), (ids,))
        assert float(variable) == combined(aggregation, strategy)


# --- What must not be assigned ---


@pytest.mark.ranks(3)
@every_combining
def test_assign_failed_in_one_replica_raises_everywhere(comm, strategy, aggregation):
    variable, total = make(strategy, np.zeros(2), aggregation), strategy.num_replicas_in_sync
    with raises_everywhere(comm, (ValueError, InvalidArgumentError), "shape"):
        strategy.run(lambda: variable.assign(np.ones(3 if replica_id() == total - 1 else 2)))
    with raises_everywhere(comm, InvalidArgumentError, r"(rank|replica) \d.* assignment to variable '\w+' by add"):
        strategy.run(lambda: (variable.assign_add if replica_id() else variable.assign)(np.ones(2)))
    with raises_everywhere(comm, InvalidArgumentError, "by subtract"):
        strategy.run(lambda: (variable.assign_add if replica_id() else variable.assign_sub)(np.ones(2)))
    assert variable.numpy().tolist() == [0, 0]
    strategy.run(lambda: variable.assign(np.ones(2)))
    assert variable.numpy().tolist() == [total if aggregation == "SUM" else 1] * 2
    count = make(strategy, 0, "SUM")
    with raises_everywhere(comm, (ValueError, InvalidArgumentError), "another kind of number"):
        strategy.run(lambda: count.assign_add(np.int64(1) if replica_id() else np.float64(0.5)))
    assert count.local_value() == 0


# dtype of the variable, what is assigned, and what the error says
UNFIT = [
    ("int64", 2.7, "int64 and cannot take a value of dtype float64, which is another kind of number"),
    ("int64", 2.0, "another kind"),
    ("int64", np.nan, "another kind"),
    ("int64", np.float32(2.5), "dtype float32"),
    ("int64", np.full(2, 0.5), "dtype float64"),
    ("int64", [1.5, 2], "another kind"),
    ("float64", 1j, "dtype complex128"),
    ("bfloat16", np.ones(2, np.complex64), "dtype complex64"),
    ("uint8", 300, "300 does not fit in variable '.*', which is of dtype uint8 and takes 0 to 255"),
    ("uint8", -1, "-1 does not fit"),
    ("uint8", [255, 256], "256 does not fit"),
    ("uint8", np.full(2, -1), "dtype int64"),
    ("int8", np.int64(300), "300 does not fit"),
    ("int32", np.full(2, -(2**40)), "-1099511627776 does not fit"),
    ("int64", np.full(2, 2**63, np.uint64), "9223372036854775808 does not fit"),
    ("int32", 2**40, "takes -2147483648 to 2147483647"),
    ("uint64", [2**64 - 1, -1], "object|float64|does not fit"),
    ("float32", 10**400, "does not fit in variable '.*', which is of dtype float32"),
    ("bool", 1, "dtype int64"),
    ("int64", "5", "str"),
    ("float64", [[1], [1, 2]], "variable '.*' takes lists of equal lengths: .*inhomogeneous shape"),
    ("float64", np.ones(3), "shape"),
    ("float64", np.ones((1, 2)), "shape"),
    ("float64", np.ones((2, 1)), "shape"),
    ("float64", [1.0], "shape"),
    ("float64", object(), "object"),
    ("float64", None, "NoneType"),
]


@pytest.mark.parametrize("rules", [("NONE",), ("SUM",), ("ONLY_FIRST_REPLICA",), ("SUM", "ON_READ")], ids=" ".join)
def test_value_that_does_not_fit_is_refused_on_all_and_changes_nothing(comm, rules):
    with Strategy(comm=comm) as strategy:
        for dtype, value, text in UNFIT:
            variable = make(strategy, np.ones(2, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype), *rules)
            # A bare Python number would be refused for another reason.
            given = PerReplica((value,)) if rules == ("SUM",) else value
            changes = [
                lambda given=given, to=variable: strategy.run(lambda: to.assign(given)),
                lambda given=given, to=variable: strategy.run(lambda: to.assign_add(given)),
                lambda given=given, to=variable: to.assign(given),
                lambda given=given, to=variable: strategy.extended.update(to, lambda var: var.assign_sub(given)),
            ]
            for change in changes:
                with raises_everywhere(comm, (TypeError, ValueError), text):
                    change()
            assert variable.local_value().tolist() == [1, 1]


@pytest.mark.no_mpi
def test_number_of_the_same_kind_is_cast():
    for dtype, value, held in (
        ("int64", True, 1),
        ("int8", np.int64(3), 3),
        ("int64", np.uint8(3), 3),
        ("uint64", 2**64 - 1, 2**64 - 1),
        ("uint8", [255, 0], [255, 0]),
        ("uint8", [], None),
        ("float32", 2**70, 2.0**70),
        ("float16", np.float64(0.5), 0.5),
        ("bfloat16", 2.5, 2.5),
        ("bfloat16", 2**70, 2.0**70),
        ("complex64", 2, 2),
        ("complex64", np.float64(2), 2),
        ("bool", np.array([True, False]), [True, False]),
        ("float32", np.arange(2, dtype=">i2"), [0, 1]),
        ("float32", np.ones((), ">f8"), 1),
    ):
        count = 0 if held is None else 2
        variable = Variable(np.zeros(count, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
        assert variable.assign(value) is variable
        assert variable.dtype.name == dtype
        assert (variable.local_value() == (np.zeros(0) if held is None else held)).all(), (dtype, value)


@every_synchronization
@every_method
def test_arguments_of_tensorflow_are_taken(comm, synchronization, method):
    """Without `read_value` nothing is returned; of the others, which would change nothing, the defaults."""
    with Strategy(comm=comm) as strategy:
        variable = make(strategy, 1.0, "MEAN", synchronization)
        change = getattr(variable, method)
        with pytest.raises(ValueError, match=f"{method}: use_locking must be False: .*; leave it out"):
            change(2.0, True)
        with pytest.raises(ValueError, match=f"{method}: name must be None: .*; leave it out"):
            change(2.0, name="name")
        assert change(2.0, False, None) is variable
        assert change(2.0, use_locking=False, name=None, read_value=True) is variable
        assert change(2.0, read_value=False) is None
        assert strategy.run(lambda: change(2.0, read_value=False)) is None
        assert variable.local_value() == {"assign": 2, "assign_add": 9, "assign_sub": -7}[method]


@pytest.mark.no_mpi
def test_changes_in_place_make_no_copies():
    """Of the variable, and of a value of the same dtype."""
    with OneDeviceStrategy() as strategy:
        variable, value = make(strategy, np.ones(1 << 20, np.float32)), np.ones(1 << 20, np.float32)
        for method in (variable.assign, variable.assign_add, variable.assign_sub):
            method(value)
            tracemalloc.start()
            try:
                method(value)
                assert tracemalloc.get_traced_memory()[1] < 100_000
            finally:
                tracemalloc.stop()
        variable.assign(variable.local_value()[::-1])
        assert (variable.local_value() == 1).all()


@every_method
def test_other_strategys_variable_is_read_and_not_assigned(strategy, method):
    variable = make(strategy, 1.0, "MEAN")
    with OneDeviceStrategy() as other:
        change = getattr(variable, method)
        with pytest.raises(RuntimeError, match="mixing different strategies"):
            other.run(lambda: change(2.0))
        with other.scope(), pytest.raises(RuntimeError, match="mixing different strategies"):
            change(2.0)
        with pytest.raises(ValueError, match="not a variable that was created in this strategy's scope"):
            other.extended.update(variable, lambda var: var.assign(2.0))
        assert other.run(lambda: variable + 1) == 2
    assert variable.local_value() == 1


# --- One copy of each node ---


@pytest.mark.core
@pytest.mark.ranks(3)
def test_assign_per_node_failed_on_one_rank_raises_everywhere(comm):
    """In `run`, across replicas and in updates, where all ranks write one memory and wait for each other."""
    with Strategy(comm=comm, per_node_variables=True) as strategy:
        count = make(strategy, np.zeros(2, np.int64), "SUM")
        wrong = np.full(2, 0.5) if comm.rank == comm.size - 1 else np.ones(2, np.int64)
        for assign in (
            count.assign,
            lambda x: strategy.extended.update(count, lambda var: var.assign_add(x)),
            lambda x: strategy.run(count.assign, (x,)),
        ):
            with raises_everywhere(comm, InvalidArgumentError, f"rank {comm.size - 1}: .*another kind of number"):
                assign(wrong)
        assert count.numpy().tolist() == [0, 0]
        assert count.assign(np.ones(2, np.int64)).local_value().tolist() == [1, 1]
        metric = make(strategy, 0.0, "SUM", "ON_READ")
        strategy.run(lambda: metric.assign_add(1.0))
        assert float(metric) == comm.size
