"""Assigning to variables and reading them: synchronization x aggregation x operation, at any number of ranks."""

from __future__ import annotations

import operator
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from support.everywhere import raises_everywhere, same_everywhere

import mpidist
from mpidist import MultiWorkerMirroredStrategy, OneDeviceStrategy, PerReplica, Strategy, Variable
from mpidist.errors import InvalidArgumentError

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
RANKS = list(range(SIZE))

# What becomes of the ranks' values, in the table of reference 1.4.8.
COMBINED: dict[str, Callable[[list[Any]], Any]] = {
    "SUM": sum,
    "MEAN": lambda values: sum(values) / SIZE,
    "ONLY_FIRST_REPLICA": lambda values: values[0],
}
AGGREGATIONS = ["NONE", *COMBINED]

on_write = pytest.mark.parametrize("synchronization", ["AUTO", "ON_WRITE"])
every_synchronization = pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
every_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS)
every_combining = pytest.mark.parametrize("aggregation", COMBINED)
only_several = pytest.mark.ranks(min=2)


@pytest.fixture
def strategy() -> Iterator[Strategy]:
    with MultiWorkerMirroredStrategy() as made:
        yield made


@pytest.fixture
def make(strategy: Strategy) -> Callable[..., Variable]:
    def create(value: Any, aggregation: str = "NONE", synchronization: str = "AUTO") -> Variable:
        with strategy.scope():
            return Variable(value, aggregation=aggregation, synchronization=synchronization)

    return create


def replica_id() -> float:
    context = mpidist.get_replica_context()
    assert context is not None
    return float(context.replica_id_in_sync_group)


def array_of(number: float) -> Any:
    return np.asarray(number)


# --- The table of reference 1.4.8 ---


@pytest.mark.core
@on_write
@every_aggregation
def test_assigning_in_run_aggregates_what_replicas_write(
    make: Callable[..., Variable], strategy: Strategy, synchronization: str, aggregation: str
) -> None:
    """Rows 1, 3 and 4: NONE lets the copies diverge."""
    variable = make(0.0, aggregation, synchronization)
    assert strategy.run(lambda: variable.assign(array_of(replica_id()))) is variable
    expected = RANK if aggregation == "NONE" else COMBINED[aggregation](RANKS)
    assert variable.local_value() == expected
    assert strategy.run(variable.read_value) == expected
    assert variable.read_value() == expected
    if aggregation != "NONE":
        assert same_everywhere(WORLD, variable.local_value())


@pytest.mark.core
@every_aggregation
def test_assigning_in_run_to_what_is_read_together_is_local(
    make: Callable[..., Variable], strategy: Strategy, aggregation: str
) -> None:
    """Rows 1, 3 and 4; T103, T106: aggregated where it is read across replicas."""
    variable = make(0.0, aggregation, "ON_READ")
    strategy.run(lambda: variable.assign(array_of(replica_id())))
    assert variable.local_value() == RANK
    assert strategy.run(variable.read_value) == RANK
    reads: list[Callable[[], Any]] = [variable.read_value, variable.value, variable.numpy, lambda: np.asarray(variable)]
    for read in reads:
        if aggregation == "NONE":
            with pytest.raises(ValueError, match="could not convert"):
                read()
        else:
            assert read() == COMBINED[aggregation](RANKS)
    assert variable.local_value() == RANK


@every_synchronization
@every_aggregation
@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_python_number_assigned_in_run(
    make: Callable[..., Variable], strategy: Strategy, synchronization: str, aggregation: str, method: str
) -> None:
    """Row 2; T77: refused where every replica would add it."""
    variable = make(1.0, aggregation, synchronization)

    def step() -> Any:
        return getattr(variable, method)(5.0)

    if (synchronization, aggregation) == ("ON_WRITE", "SUM") and SIZE > 1:
        with raises_everywhere(WORLD, ValueError, r"non-DistributedValues value 5\.0 cannot be reduced"):
            strategy.run(step)
        assert variable.local_value() == 1
    else:
        strategy.run(step)
        assert variable.local_value() == {"assign": 5, "assign_add": 6, "assign_sub": -4}[method]


@pytest.mark.core
@every_synchronization
@every_aggregation
def test_assigning_across_replicas_writes_every_copy(
    make: Callable[..., Variable], synchronization: str, aggregation: str
) -> None:
    """Row 5; T79, T101: a copy of what is summed when it is read gets its share."""
    variable = make(0.0, aggregation, synchronization)
    if (synchronization, aggregation) == ("ON_READ", "NONE"):
        with pytest.raises(ValueError, match="could not convert"):
            variable.assign(8.0)
        return
    assert variable.assign(8.0) is variable
    share = 8.0 / SIZE if (synchronization, aggregation) == ("ON_READ", "SUM") else 8.0
    assert variable.local_value() == share
    assert variable.read_value() == pytest.approx(8)


@every_synchronization
@every_aggregation
@pytest.mark.parametrize(("method", "expected"), [("assign_add", 3.0), ("assign_sub", 1.0)])
def test_adding_across_replicas_changes_every_copy(
    make: Callable[..., Variable], synchronization: str, aggregation: str, method: str, expected: float
) -> None:
    """Row 6."""
    variable = make(2.0, aggregation, synchronization)
    if synchronization == "ON_READ" and aggregation in ("NONE", "SUM"):
        with pytest.raises(ValueError, match=f"aggregation {aggregation}"):
            getattr(variable, method)(1.0)
        expected = 2.0
    else:
        assert getattr(variable, method)(1.0) is variable
    assert variable.local_value() == expected


@every_aggregation
def test_distributed_value_assigned_across_replicas_goes_component_by_component(
    make: Callable[..., Variable], aggregation: str
) -> None:
    """Row 7."""
    variable = make(0.0, aggregation)
    variable.assign(PerReplica((RANK + 1,)))
    assert variable.local_value() == RANK + 1


@every_synchronization
@every_aggregation
def test_update_works_on_every_copy(
    make: Callable[..., Variable], strategy: Strategy, synchronization: str, aggregation: str
) -> None:
    """Row 8; T73."""
    variable = make(0.0, aggregation, synchronization)
    value, update = PerReplica((RANK + 1.0,)), strategy.extended.update
    steps: list[tuple[Callable[..., Any], tuple[Any, ...], int]] = [
        (lambda var, x: var.assign(x), (value,), 1),
        (lambda var, x: var.assign_add(x), (value,), 2),
        (lambda var, x: var.assign_sub(x), (value,), 1),
        (lambda var: var.assign_add(var + var), (), 3),
    ]
    for change, args, factor in steps:
        assert update(variable, change, args) is variable
        assert variable.local_value() == factor * (RANK + 1)
    results = update(variable, lambda var, x, k: var + x + k, (value,), {"k": 1}, group=False)
    assert isinstance(results, tuple)
    assert results == (4 * (RANK + 1) + 1,)


@every_synchronization
@every_aggregation
def test_arithmetic_reads_as_the_context_does(
    make: Callable[..., Variable], strategy: Strategy, synchronization: str, aggregation: str
) -> None:
    """Row 9; T107."""
    variable = make(0.0, aggregation, synchronization)
    strategy.run(lambda: variable.assign(array_of(replica_id())))
    own = RANK if aggregation == "NONE" or synchronization == "ON_READ" else COMBINED[aggregation](RANKS)
    assert strategy.run(lambda: variable + 1) == own + 1
    if (synchronization, aggregation) == ("ON_READ", "NONE"):
        with pytest.raises(ValueError, match="could not convert"):
            variable + 1
    else:
        assert variable + 1 == (own if aggregation == "NONE" else COMBINED[aggregation](RANKS)) + 1


# --- Cases of the reference beside the table ---


@every_aggregation
@pytest.mark.parametrize(("method", "value"), [("assign", 1.0), ("assign_add", 1.0), ("assign_sub", -1.0)])
def test_every_way_of_assigning_gives_one(
    make: Callable[..., Variable], strategy: Strategy, aggregation: str, method: str, value: float
) -> None:
    """T74, T88: outside any scope, in the scope, and (but for SUM) in run."""
    outside, inside, in_run = (make(0.0, aggregation) for _ in range(3))
    getattr(outside, method)(value)
    with strategy.scope():
        getattr(inside, method)(value)
    if aggregation != "SUM":
        strategy.run(lambda: getattr(in_run, method)(value))
        assert in_run.local_value() == 1
    assert (outside.local_value(), inside.local_value()) == (1, 1)


@every_combining
def test_distributed_value_assigned_in_run_is_aggregated(
    make: Callable[..., Variable], strategy: Strategy, aggregation: str
) -> None:
    """T76."""
    variable = make(0.0, aggregation)
    strategy.run(lambda: variable.assign(PerReplica((np.float64(2),))))
    assert variable.local_value() == {"SUM": 2 * SIZE}.get(aggregation, 2)


@every_combining
@pytest.mark.parametrize(("method", "combine"), [("assign_add", operator.add), ("assign_sub", operator.sub)])
def test_what_is_added_in_run_is_aggregated(
    make: Callable[..., Variable], strategy: Strategy, aggregation: str, method: str, combine: Any
) -> None:
    """T80, T83, T85, T86."""
    variable = make([5.0, 1.0], aggregation)
    for _ in range(2):
        strategy.run(lambda: getattr(variable, method)(np.array([replica_id(), 2 * replica_id()])))
    total = COMBINED[aggregation](RANKS)
    assert variable.read_value().tolist() == [combine(5, 2 * total), combine(1, 4 * total)]


@every_combining
def test_number_of_one_replica_meets_the_array_of_another(
    make: Callable[..., Variable], strategy: Strategy, aggregation: str
) -> None:
    variable = make([5.0, 1.0], aggregation)
    strategy.run(lambda: variable.assign(np.float64(1) if RANK == 0 else np.ones(2)))
    assert variable.read_value().tolist() == [{"SUM": SIZE}.get(aggregation, 1)] * 2


def test_changes_across_replicas_add_up(make: Callable[..., Variable]) -> None:
    """T82, T85."""
    variable = make(1.0)
    assert variable.assign_add(6.0).read_value() == 7
    variable.assign_add(2.0)
    assert variable.local_value() == 9
    variable.assign_sub(2.0)
    assert variable.local_value() == 7


def test_elements_of_a_summed_variable_are_added_once_across_replicas(make: Callable[..., Variable]) -> None:
    """T98, without scatter."""
    variable = make([1.0, 1.0, 1.0], "SUM")
    variable.assign_add([2.0, 0.0, 0.0])
    assert variable.local_value().tolist() == [3, 1, 1]


@pytest.mark.parametrize(("aggregation", "before"), [("SUM", SIZE), ("MEAN", 1.0)])
def test_what_is_read_together_may_be_set_together(
    make: Callable[..., Variable], aggregation: str, before: float
) -> None:
    """T110."""
    variable = make(1.0, aggregation, "ON_READ")
    assert variable.read_value() == before
    variable.assign(6.0)
    assert variable.read_value() == pytest.approx(6)
    assert variable.local_value() == {"SUM": 6.0 / SIZE}.get(aggregation, 6.0)


def test_first_replica_is_that_of_all_nodes(placement: tuple[int, ...]) -> None:
    """X29; section 7, fault 3."""
    with MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        written = Variable(15.0, aggregation="ONLY_FIRST_REPLICA")
        read = Variable(15.0, aggregation="ONLY_FIRST_REPLICA", synchronization="ON_READ")
        strategy.run(lambda: (written.assign(replica_id() + 7), read.assign(replica_id() + 7)))
        assert written.local_value() == 7
        assert read.local_value() == 7 + RANK
        assert read.read_value() == 7


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
def test_metric_of_all_steps_is_read_once(make: Callable[..., Variable], strategy: Strategy, aggregation: str) -> None:
    """A counter: nothing is sent until it is read."""
    variable = make(0.0, aggregation, "ON_READ")
    if RANK == 0:  # ranks may differ in their number of steps
        strategy.run(lambda: variable.assign_add(1.0))
    for _ in range(3):
        strategy.run(lambda: variable.assign_add(1.0))
    assert variable.read_value() == pytest.approx(COMBINED[aggregation]([3 + (rank == 0) for rank in RANKS]))


# --- What must not be assigned ---


@every_combining
@only_several
def test_wrong_shape_on_one_rank_is_an_error_on_all(
    make: Callable[..., Variable], strategy: Strategy, aggregation: str
) -> None:
    variable = make([1.0, 2.0], aggregation)
    with raises_everywhere(WORLD, InvalidArgumentError, "rank 0.*shape"):
        strategy.run(lambda: variable.assign(np.ones(3 if RANK == 0 else 2)))
    assert variable.local_value().tolist() == [1, 2]
    strategy.run(lambda: variable.assign_add(np.zeros(2)))


@every_combining
@only_several
def test_assignment_of_another_kind_on_one_rank_is_an_error_on_all(
    make: Callable[..., Variable], strategy: Strategy, aggregation: str
) -> None:
    """The copies would differ from then on."""
    variable = make([1.0, 2.0], aggregation)
    with raises_everywhere(WORLD, InvalidArgumentError, r"rank 0: assignment to variable '\w+' by add; rank"):
        strategy.run(lambda: (variable.assign_sub if RANK else variable.assign_add)(np.ones(2)))
    with raises_everywhere(WORLD, InvalidArgumentError, r"rank 0: assignment to variable '\w+'; rank.* by add"):
        strategy.run(lambda: (variable.assign_add if RANK else variable.assign)(np.ones(2)))
    assert variable.local_value().tolist() == [1, 2]


@every_synchronization
@every_aggregation
@pytest.mark.parametrize("value", [np.ones(3), np.ones((1, 2)), np.ones((2, 1)), [1.0], object(), None])
def test_value_that_does_not_fit_changes_nothing(
    make: Callable[..., Variable], strategy: Strategy, synchronization: str, aggregation: str, value: Any
) -> None:
    variable = make([1.0, 2.0], aggregation, synchronization)
    kind = ValueError if isinstance(value, (np.ndarray, list)) else TypeError
    with raises_everywhere(WORLD, kind):
        strategy.run(lambda: variable.assign(value))
    with raises_everywhere(WORLD, kind):
        strategy.extended.update(variable, lambda var: var.assign_add(value))
    with raises_everywhere(WORLD, (ValueError, TypeError)):
        variable.assign(value)
    assert variable.local_value().tolist() == [1, 2]


# dtype of the variable, what is assigned, and what the error says
UNFIT: list[tuple[str, Any, str]] = [
    ("int64", 2.7, "int64 and cannot take a value of dtype float64, which is another kind of number"),
    ("int64", 2.0, "another kind"),
    ("int64", np.nan, "another kind"),
    ("int64", np.float32(2.5), "dtype float32"),
    ("int64", np.full(2, 0.5), "dtype float64"),
    ("int64", [1.5, 2], "another kind"),
    ("float64", 1j, "dtype complex128"),
    ("float32", np.ones(2, np.complex64), "dtype complex64"),
    ("bfloat16", np.ones(2, np.complex64), "dtype complex64"),
    ("uint8", 300, "300 does not fit in variable '.*', which is of dtype uint8 and takes 0 to 255"),
    ("uint8", -1, "-1 does not fit"),
    ("uint8", [255, 256], "256 does not fit"),
    ("uint8", np.full(2, -1), "dtype int64"),
    ("int32", 2**40, "takes -2147483648 to 2147483647"),
    ("uint64", [2**64 - 1, -1], "object|float64|does not fit"),
    ("float32", 10**400, "does not fit in variable '.*', which is of dtype float32"),
    ("bool", 1, "dtype int64"),
    ("int64", "5", "str"),
    ("float64", [[1], [1, 2]], "variable '.*' takes lists of equal lengths: .*inhomogeneous shape"),
]


def assignments(strategy: Strategy, variable: Variable, value: Any) -> list[Callable[[], Any]]:
    return [
        lambda: strategy.run(lambda: variable.assign(value)),
        lambda: strategy.run(lambda: variable.assign_add(value)),
        lambda: variable.assign(value),
        lambda: strategy.extended.update(variable, lambda var: var.assign_sub(value)),
    ]


@pytest.mark.parametrize(("dtype", "value", "text"), UNFIT, ids=lambda it: str(it)[:20])
def test_number_of_another_kind_or_size_is_an_error_on_all_ranks(
    make: Callable[..., Variable], strategy: Strategy, dtype: str, value: Any, text: str
) -> None:
    """And changes nothing, wherever it is assigned, and whatever is aggregated."""
    before = np.ones(2, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for rules in (("NONE",), ("SUM",), ("ONLY_FIRST_REPLICA",), ("SUM", "ON_READ")):
        variable = make(before, *rules)
        # A bare Python number would be refused for another reason.
        for assignment in assignments(strategy, variable, PerReplica((value,)) if rules == ("SUM",) else value):
            with raises_everywhere(WORLD, (TypeError, ValueError), text):
                assignment()
        assert variable.local_value().tolist() == [1, 1]


@pytest.mark.parametrize(
    ("dtype", "value", "held"),
    [
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
    ],
    ids=str,
)
def test_number_of_the_same_kind_is_cast(make: Callable[..., Variable], dtype: str, value: Any, held: Any) -> None:
    count = 0 if held is None else 2
    variable = make(np.zeros(count, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
    assert variable.assign(value) is variable
    assert variable.dtype.name == dtype
    assert (variable.local_value() == (np.zeros(0) if held is None else held)).all()


@only_several
def test_one_ranks_fraction_is_everyones_error(make: Callable[..., Variable], strategy: Strategy) -> None:
    variable = make(0, "SUM")
    with raises_everywhere(WORLD, InvalidArgumentError, "rank 0.*another kind of number"):
        strategy.run(lambda: variable.assign_add(np.float64(0.5) if RANK == 0 else np.int64(1)))
    assert variable.local_value() == 0


@pytest.mark.parametrize("dtype", ["int64", "int8", "uint8", "uint64"])
def test_sum_of_integers_that_was_assigned_is_read_again(make: Callable[..., Variable], dtype: str) -> None:
    """What does not divide by the number of ranks is rank 0's."""
    variable = make(np.zeros(2, dtype), "SUM", "ON_READ")
    for total in (
        10,
        1,
        0,
        127,
        [7, 3],
        np.array([1, 100], dtype),
        *([-10, -1, [-128, 127]] if dtype[0] == "i" else []),
    ):
        variable.assign(total)
        assert variable.read_value().tolist() == np.broadcast_to(total, 2).tolist()
    variable.assign(10)
    assert variable.local_value().tolist() == [10 // SIZE + (10 % SIZE if RANK == 0 else 0)] * 2


def test_sums_of_small_integers_wrap(make: Callable[..., Variable], strategy: Strategy) -> None:
    """As NumPy's do, when they are added in the same dtype."""
    variable = make(np.uint8(0), "SUM")
    strategy.run(lambda: variable.assign_add(np.uint8(200)))
    assert variable.local_value() == 200 * SIZE % 256


@every_synchronization
@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_arguments_of_tensorflow_are_taken(
    make: Callable[..., Variable], strategy: Strategy, synchronization: str, method: str
) -> None:
    """T82: without `read_value` nothing is returned; of the others, which would change nothing, the defaults."""
    variable = make(1.0, "MEAN", synchronization)
    with pytest.raises(ValueError, match=f"{method}: use_locking must be False: .*; leave it out"):
        getattr(variable, method)(2.0, True)
    with pytest.raises(ValueError, match=f"{method}: name must be None: .*; leave it out"):
        getattr(variable, method)(2.0, name="name")
    assert getattr(variable, method)(2.0, False, None) is variable
    assert getattr(variable, method)(2.0, use_locking=False, name=None, read_value=True) is variable
    assert getattr(variable, method)(2.0, read_value=False) is None
    assert strategy.run(lambda: getattr(variable, method)(2.0, read_value=False)) is None
    assert variable.local_value() == {"assign": 2, "assign_add": 9, "assign_sub": -7}[method]


def test_changes_in_place_make_no_copies(make: Callable[..., Variable]) -> None:
    """Of the variable, and of a value of the same dtype."""
    variable, value = make(np.ones(1 << 20, np.float32)), np.ones(1 << 20, np.float32)
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


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_other_strategys_variable_cannot_be_assigned(make: Callable[..., Variable], method: str) -> None:
    """Table of misuse 1.4.2; T49."""
    variable = make(1.0, "MEAN")
    with OneDeviceStrategy() as other:
        with pytest.raises(RuntimeError, match="mixing different strategies"):
            other.run(lambda: getattr(variable, method)(2.0))
        with other.scope(), pytest.raises(RuntimeError, match="mixing different strategies"):
            getattr(variable, method)(2.0)
        with pytest.raises(ValueError, match="not a variable that was created in this strategy's scope"):
            other.extended.update(variable, lambda var: var.assign(2.0))
        assert other.run(lambda: variable + 1) == 2
    assert variable.local_value() == 1


def test_flag_that_is_read_together_can_be_assigned_across_replicas(strategy: Strategy) -> None:
    with strategy.scope():
        flag = mpidist.Variable(False, synchronization="ON_READ", aggregation="SUM")
    flag.assign(True)
    assert flag.local_value().dtype == np.bool_
