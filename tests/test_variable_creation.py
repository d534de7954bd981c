"""Making variables, and computing with them as with arrays."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from everywhere import raises_everywhere, same_everywhere
from mpi4py import MPI

import mpidist
from mpidist import MultiWorkerMirroredStrategy, Strategy, Variable
from mpidist.errors import InvalidArgumentError

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size

only_several = pytest.mark.ranks(min=2)
every_synchronization = pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])


@pytest.fixture
def strategy() -> Iterator[Strategy]:
    with MultiWorkerMirroredStrategy() as made:
        yield made


@pytest.fixture
def _in_scope(strategy: Strategy) -> Iterator[None]:
    with strategy.scope():
        yield


in_scope = pytest.mark.usefixtures("_in_scope")


# --- Where it comes from ---


@pytest.mark.core
@every_synchronization
def test_initial_value_is_that_of_rank_0(placement: tuple[int, ...], synchronization: str) -> None:
    """Reference 1.4.8; X30: random initialisers, seeded by rank."""
    rng = np.random.default_rng(RANK)
    with MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        given = Variable(np.full(3, RANK + 1.0), synchronization=synchronization)
        called = Variable(lambda: rng.normal(size=(2, 3)), synchronization=synchronization)
    assert given.local_value().tolist() == [1, 1, 1]
    assert np.array_equal(called.local_value(), np.random.default_rng(0).normal(size=(2, 3)))
    assert same_everywhere(WORLD, called.local_value())


def test_variable_made_in_run_is_mirrored(strategy: Strategy) -> None:
    """T89, T139."""
    rng = np.random.default_rng(RANK)

    def step() -> Variable:
        variable = Variable(lambda: rng.normal(), name="foo")
        context = mpidist.get_replica_context()
        assert context is not None
        same = context.merge_call(lambda merged, var: var, (variable,))
        assert same is variable
        return variable

    variable = strategy.run(step)
    assert (variable.name, variable.strategy) == ("foo", strategy)
    assert same_everywhere(WORLD, variable.local_value())


def test_variable_outside_of_any_scope_is_this_process_own() -> None:
    variable = Variable(RANK + 1.0, aggregation="SUM")
    assert variable.strategy is mpidist.get_strategy()
    assert variable.read_value() == RANK + 1
    assert variable.assign_add(1.0).read_value() == RANK + 2
    metric = Variable(RANK + 1.0, synchronization="ON_READ")
    assert metric.assign_add(1.0).read_value() == RANK + 2


def test_initial_value_is_copied(strategy: Strategy) -> None:
    initial = np.ones(2)
    with strategy.scope():
        variable = Variable(initial)
    initial[...] = 7
    assert variable.local_value().tolist() == [1, 1]


@only_several
@pytest.mark.parametrize(
    ("mine", "theirs", "text"),
    [
        ({"name": "a"}, {"name": "b"}, "name: rank 0: a; ranks? 1.*: b"),
        ({"initial_value": np.ones(2)}, {"initial_value": np.ones(3)}, r"float64\[2\].*float64\[3\]"),
        ({"initial_value": 1}, {"initial_value": 1.0}, "int64.*float64"),
        ({"dtype": "f4"}, {"dtype": "f8"}, "float32.*float64"),
        ({"aggregation": "SUM"}, {"aggregation": "MEAN"}, "aggregation: rank 0: SUM"),
        ({"synchronization": "ON_READ"}, {"synchronization": "ON_WRITE"}, "synchronization"),
        ({"synchronization": "bogus"}, {}, "bogus"),
        ({"aggregation": "bogus"}, {}, "bogus"),
        ({"initial_value": object()}, {}, "object"),
        ({"initial_value": lambda: 1 / 0}, {}, "division by zero"),
        ({"dtype": "bogus"}, {}, "bogus"),
    ],
)
@in_scope
def test_ranks_that_make_different_variables_are_refused(
    strategy: Strategy, mine: dict[str, Any], theirs: dict[str, Any], text: str
) -> None:
    """Reference 1.4.8: "mismatching name"; on every rank."""
    with raises_everywhere(WORLD, InvalidArgumentError, text):
        Variable(**{"initial_value": 1.0, **(mine if RANK == 0 else theirs)})
    assert Variable(1.0).strategy is strategy


@in_scope
def test_rules_that_mean_the_same_agree() -> None:
    names = ["AUTO", "on_write", mpidist.VariableSynchronization.ON_WRITE]
    aggregations = ["sum", mpidist.VariableAggregation.SUM]
    variable = Variable(1.0, synchronization=names[RANK % 3], aggregation=aggregations[RANK % 2])
    assert variable.synchronization is mpidist.VariableSynchronization.ON_WRITE
    assert variable.aggregation is mpidist.VariableAggregation.SUM


@in_scope
@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"synchronization": "NONE"}, ValueError, "synchronization NONE"),
        ({"synchronization": "bogus"}, ValueError, "bogus"),
        ({"aggregation": "bogus"}, ValueError, "bogus"),
        ({"aggregation": "MEAN", "initial_value": 1}, ValueError, "int64 cannot have aggregation MEAN"),
        ({"aggregation": "MEAN", "dtype": np.int8}, ValueError, "int8 cannot have aggregation MEAN"),
        ({"aggregation": "MEAN", "initial_value": 1, "synchronization": "ON_READ"}, ValueError, "MEAN"),
        ({"initial_value": None}, TypeError, "NoneType"),
        ({"initial_value": object()}, TypeError, "object"),
        ({"initial_value": "text"}, TypeError, "str"),
        ({"dtype": "bogus"}, TypeError, "bogus"),
        ({"initial_value": lambda: 1 / 0}, ZeroDivisionError, "division"),
    ],
)
def test_variable_that_cannot_be_is_refused(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    """T112, T113."""
    with raises_everywhere(WORLD, kind, text):
        Variable(**{"initial_value": 1.0, **arguments})


# --- What it is ---


@in_scope
def test_names_are_given_alike_on_all_ranks() -> None:
    named = Variable(1.0, name="kernel")
    others = [Variable(1.0).name for _ in range(3)]
    assert named.name == "kernel"
    assert len(set(others)) == 3
    assert set(WORLD.allgather(tuple(others))) == {tuple(others)}


@in_scope
def test_what_is_read_together_is_not_trained() -> None:
    """Reference 1.4.8."""
    assert Variable(1.0).trainable
    assert Variable(1.0, synchronization="ON_WRITE").trainable
    assert not Variable(1.0, synchronization="ON_READ").trainable
    assert Variable(1.0, synchronization="ON_READ", trainable=True).trainable
    assert not Variable(1.0, trainable=False).trainable


@in_scope
@pytest.mark.parametrize(
    ("initial", "dtype", "expected"),
    [
        (1, None, np.int64),
        (1.0, None, np.float64),
        (True, None, np.bool_),
        (1j, None, np.complex128),
        ([1, 2], None, np.int64),
        (np.float32(1), None, np.float32),
        (np.ones(2, np.float16), None, np.float16),
        (np.ones(2, ml_dtypes.bfloat16), None, ml_dtypes.bfloat16),
        (np.ones(2, ">i4"), None, np.int32),
        (1, "float16", np.float16),
        (np.ones(2), ml_dtypes.bfloat16, ml_dtypes.bfloat16),
        (np.asfortranarray(np.ones((2, 3))), np.float32, np.float32),
    ],
)
def test_dtype_is_the_values_or_the_one_asked_for(initial: Any, dtype: Any, expected: Any) -> None:
    variable = Variable(initial, dtype=dtype)
    assert variable.dtype == expected
    assert variable.dtype.isnative
    assert variable.shape == np.shape(initial)
    assert np.array_equal(np.asarray(variable), np.asarray(initial))


@every_synchronization
def test_assigned_values_take_the_variables_dtype(strategy: Strategy, synchronization: str) -> None:
    """T100."""
    with strategy.scope():
        variable = Variable(0.0, dtype=np.float32, synchronization=synchronization, aggregation="MEAN")
    for value in (1, np.float64(1), np.int8(1), np.ones((), ">f8"), np.float16(1)):
        variable.assign(0.0)
        strategy.run(lambda value=value: variable.assign_add(value))
        assert variable.local_value() == 1
        assert variable.local_value().dtype == variable.read_value().dtype == np.float32


@in_scope
def test_variables_cannot_be_copied() -> None:
    variable = Variable(1.0, name="kernel")
    for copies in (copy.copy, copy.deepcopy):
        with pytest.raises(RuntimeError, match="'kernel' cannot be copied"):
            copies(variable)


@in_scope
def test_own_copy_is_seen_and_not_written() -> None:
    variable = Variable([1.0, 2.0])
    view = variable.local_value()
    variable.assign([3.0, 4.0])
    assert view.tolist() == [3, 4]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 7
    value = variable.read_value()
    value[...] = 7
    np.asarray(variable)[...] = 7
    assert variable.local_value().tolist() == [3, 4]


def test_own_copy_is_seen_in_every_context(strategy: Strategy) -> None:
    with strategy.scope():
        variable = Variable(1.0, synchronization="ON_READ")
        strategy.run(lambda: variable.assign(RANK))
        assert variable.local_value() == RANK
    assert variable.local_value() == RANK
    assert f"this rank's copy: array({RANK}.)" in repr(variable)


# --- Computing with it ---

A = np.array([[1.0, 2.0], [3.0, 4.0]])
COMPUTE: dict[str, Callable[[Any], Any]] = {
    "v + 1": lambda v: v + 1,
    "1 - v": lambda v: 1 - v,
    "v * v": lambda v: v * v,
    "array / v": lambda v: A / v,
    "v / array": lambda v: v / A,
    "v // 2": lambda v: v // 2,
    "v % 2": lambda v: v % 2,
    "v ** 2": lambda v: v**2,
    "2 ** v": lambda v: 2**v,
    "v @ v": lambda v: v @ v,
    "array @ v": lambda v: A @ v,
    "-v": lambda v: -v,
    "abs(v)": lambda v: abs(v),
    "v == array": lambda v: v == A,
    "v != 1": lambda v: v != 1,
    "v < 2": lambda v: v < 2,
    "v >= 2": lambda v: v >= 2,
    "divmod": lambda v: divmod(v, 2)[1],
    "v[0]": lambda v: v[0],
    "v[:, 1]": lambda v: v[:, 1],
    "np.exp": lambda v: np.exp(v),
    "np.add.reduce": lambda v: np.add.reduce(v),
    "np.maximum": lambda v: np.maximum(v, 2),
    "np.add into an array": lambda v: np.add(v, v, out=np.empty((2, 2))),
    "np.sum": lambda v: np.sum(v),
    "np.sum along an axis": lambda v: np.sum(v, axis=1),
    "np.mean": lambda v: np.mean(v),
    "np.dot": lambda v: np.dot(v, v),
    "np.tensordot": lambda v: np.tensordot(v, v, 1),
    "np.linalg.norm": lambda v: np.linalg.norm(v),
    "np.concatenate": lambda v: np.concatenate([v, v]),
    "np.stack": lambda v: np.stack([v, A]),
    "np.where": lambda v: np.where(v > 1, v, 0),
    "np.transpose": lambda v: np.transpose(v),
    "np.einsum": lambda v: np.einsum("ij,jk", v, v),
    "np.asarray": lambda v: np.asarray(v, np.float32),
    "np.array": lambda v: np.array(v),
    "len": len,
    "list": lambda v: [row.tolist() for row in v],
}


@in_scope
@every_synchronization
@pytest.mark.parametrize("name", COMPUTE)
def test_variable_computes_like_an_array(synchronization: str, name: str) -> None:
    variable = Variable(A, synchronization=synchronization, aggregation="MEAN")
    result, expected = COMPUTE[name](variable), COMPUTE[name](A)
    assert np.array_equal(result, expected)
    assert type(result) is type(expected)
    assert variable.local_value().tolist() == A.tolist()


@in_scope
def test_scalar_variable_is_a_number() -> None:
    variable = Variable(2.0)
    assert (float(variable), int(variable), bool(variable), bool(Variable(0))) == (2.0, 2, True, False)
    assert f"{float(variable):.1f}" == "2.0"


@in_scope
def test_variables_are_told_apart_by_identity_where_they_are_keys() -> None:
    one, two = Variable([1.0, 2.0]), Variable([1.0, 2.0])
    assert {one: 1, two: 2} == {one: 1, two: 2}
    assert len({one, two}) == 2


@in_scope
def test_operators_do_not_assign() -> None:
    """`assign` knows the replicas; an operator does not."""
    variable = Variable([1.0, 2.0])
    with pytest.raises(TypeError):
        variable += 1
    with pytest.raises(TypeError):
        np.add(variable, 1, out=variable)
    with pytest.raises(TypeError):
        variable[0] = 1
    assert variable.local_value().tolist() == [1, 2]
