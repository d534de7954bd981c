"""Making variables, and computing with them as with arrays."""

from __future__ import annotations

import copy
import operator
import pickle
import re
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from scipy.sparse import csr_matrix
from support.everywhere import raises_everywhere, same_everywhere

import mpidist
from mpidist import MultiWorkerMirroredStrategy, Strategy, Variable
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError
from mpidist.transport.failures import open_groups

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


def test_variable_outside_of_the_scope_of_an_open_strategy_warns(caplog: pytest.LogCaptureFixture) -> None:
    """Its value is each rank's own. Once for each variable, and where no other rank can be meant, not at all."""

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "mpidist.variables"]

    before = open_groups.num_open()
    alone = Variable(1.0)
    assert len(warnings()) == (before > 0)
    caplog.clear()
    with MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            Variable(1.0)
        strategy.run(lambda: Variable(1.0))
        assert not warnings()
        outside = Variable(RANK + 1.0, name="w")
        for _ in range(2):
            outside.assign_add(1.0)
        assert len(warnings()) == (SIZE > 1)
        assert SIZE == 1 or re.search(
            r"variable 'w' was made outside of strategy\.scope\(\).*make it inside", *warnings()
        )
        text = r"mixing different strategies; variable '.*' was made outside of strategy\.scope\(\); make it inside"
        for variable in (outside, alone):
            for assign in (variable.assign, variable.assign_add, lambda x, v=variable: v.scatter_add(x)):
                with strategy.scope(), pytest.raises(RuntimeError, match=text):
                    assign(1.0)
                with pytest.raises(RuntimeError, match=text):
                    strategy.run(assign, (1.0,))
    assert outside.read_value() == RANK + 3


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
        (
            {"aggregation": "MEAN", "initial_value": 1},
            ValueError,
            "^variable 'w' of dtype int64 cannot have aggregation MEAN.*SUM",
        ),
        (
            {"aggregation": "MEAN", "initial_value": 1, "dtype": np.int8},
            ValueError,
            "variable 'w' of dtype int8 cannot have aggregation MEAN",
        ),
        ({"aggregation": "MEAN", "initial_value": 1, "synchronization": "ON_READ"}, ValueError, "MEAN"),
        ({"initial_value": None}, TypeError, "NoneType"),
        ({"initial_value": object()}, TypeError, "object"),
        ({"initial_value": [[1], [1, 2]]}, ValueError, "variable 'w' takes lists of equal lengths: .*inhomogeneous"),
        (
            {"initial_value": "text"},
            TypeError,
            "variable 'w' cannot take a value of type builtins.str; needed an array",
        ),
        ({"dtype": "bogus"}, TypeError, "variable 'w': the dtype must be one of NumPy's, as 'float32', got 'bogus'"),
        ({"initial_value": lambda: 1 / 0}, ZeroDivisionError, "division"),
    ],
)
def test_variable_that_cannot_be_is_refused(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    """T112, T113."""
    with raises_everywhere(WORLD, kind, text):
        Variable(**{"initial_value": 1.0, "name": "w", **arguments})


@in_scope
@pytest.mark.parametrize("value", ["text", None])
def test_what_is_no_number_is_not_assigned(value: Any) -> None:
    variable = Variable(1.0, name="w")
    needed = "variable 'w' cannot take a value of type .*; needed an array"
    for assign in variable.assign, variable.assign_add:
        with pytest.raises(TypeError, match=needed):
            assign(value)
    assert variable.numpy() == 1


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
    for copies in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match=r"'kernel' cannot be copied or pickled: .*; read its value"):
            copies([variable] if copies is not copy.copy else variable)


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


def added_at(array: Any, indices: Any, values: Any) -> Any:
    np.add.at(array, indices, values)
    return array


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
    "np.max": lambda v: np.max(v),
    "np.argmax": lambda v: np.argmax(v),
    "np.add, where it is true": lambda v: np.add(np.zeros((2, 2)), 1, out=np.full((2, 2), 5.0), where=v > 2),
    "np.add.at of an array": lambda v: added_at(np.zeros(2), [0, 0], v[:, 0]),
    "np.add.at with an array": lambda v: added_at(np.zeros((2, 2)), [1, 0], v),
    "array -= v": lambda v: operator.isub(A.copy(), v),
    "list + v": lambda v: operator.add([1.0, 2.0], v),
    "reversed divmod": lambda v: divmod(7, v)[0],
    "csr @ v": lambda v: csr_matrix(A) @ v,
    "v @ csr": lambda v: v @ csr_matrix(A),
    "csr * v": lambda v: csr_matrix(A) * v,
    "csr + v": lambda v: np.asarray(csr_matrix(A) + v),
    "v.T": lambda v: v.T,
    "v.ndim": lambda v: v.ndim,
    "v.size": lambda v: v.size,
    "v.shape": lambda v: v.shape,
    "in": lambda v: (3 in v, 5 in v),
    "+v": lambda v: +v,
    "len": len,
    "list": lambda v: [row.tolist() for row in v],
}


def test_mask_computes_like_an_array() -> None:
    mask, array = Variable(A > 2), A > 2
    assert (np.add(A, 1, out=np.zeros((2, 2)), where=mask) == np.add(A, 1, out=np.zeros((2, 2)), where=array)).all()
    assert (A[mask] == A[array]).all()
    for one, other in ((~mask, ~array), (mask & mask, array), (mask ^ True, ~array), (mask | False, array)):
        assert (one == other).all()


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
@every_synchronization
def test_scalar_variable_is_a_number(synchronization: str) -> None:
    rules = {"synchronization": synchronization, "aggregation": "ONLY_FIRST_REPLICA"}
    number, count, none = Variable(2.5, **rules), Variable(3, **rules), Variable(0, **rules)
    assert (float(number), int(number), complex(number), bool(number), bool(none)) == (2.5, 2, 2.5, True, False)
    assert complex(Variable(1j, **rules)) == 1j
    assert f"{number:.2f} {count:>3} {number}" == f"2.50   3 {number!r}"
    assert (round(number), round(Variable(2.75, **rules), 1)) == (2, 2.8)
    assert operator.index(count) == 3
    assert list(range(count)) == [0, 1, 2]
    assert [4, 5, 6, 7][:count] == [4, 5, 6]
    assert np.zeros(count).shape == (3,)
    assert np.ones((2, count)).shape == (2, 3)
    assert np.arange(10)[count] == 3
    assert np.arange(10)[Variable(np.arange(3), **rules)].tolist() == [0, 1, 2]
    for no_index in (number, Variable(True, **rules), Variable(np.ones(1, int), **rules)):
        with pytest.raises(TypeError, match="can be converted to a scalar index"):
            operator.index(no_index)
    for unsized in (list, tuple, sum, len):
        with pytest.raises(TypeError, match=r"iteration over a 0-d array|has no len"):
            unsized(number)


@in_scope
def test_arrays_own_methods_are_those_of_its_value() -> None:
    variable = Variable(A)
    for name in ("sum", "mean", "reshape", "astype", "tolist", "fill", "flat"):
        assert not hasattr(variable, name)
        with pytest.raises(
            AttributeError, match=rf"a variable has no '{name}': read it first, as in variable.numpy\(\)\.{name}"
        ):
            getattr(variable, name)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        variable.nonsense  # noqa: B018


@in_scope
@every_synchronization
def test_reading_makes_one_call_and_no_second_one_for_each_row(strategy: Strategy, synchronization: str) -> None:
    variable = Variable(np.arange(50.0), synchronization=synchronization, aggregation="MEAN")
    calls = [
        lambda: sum(variable), lambda: list(variable), lambda: 7 in variable, lambda: variable.T, lambda: variable[1:3],
        lambda: variable + 1, lambda: np.asarray(variable), lambda: f"{variable[0]:.1f}",
    ]  # fmt: skip
    agreement = parts_of(strategy).group.agreement
    for call in calls:
        before = agreement.sequence
        call()
        assert agreement.sequence - before == (SIZE > 1 and synchronization == "ON_READ")
    before = agreement.sequence
    assert (len(variable), variable.ndim, variable.size, variable.shape) == (50, 1, 50, (50,))
    assert agreement.sequence == before


class Operand:
    """What sees the array that an operator was given."""

    __array_ufunc__ = None

    def __radd__(self, other: Any) -> Any:
        return other


@in_scope
def test_operators_read_the_memory_itself_and_cannot_write_it() -> None:
    variable = Variable(A)
    seen = variable + Operand()
    assert np.shares_memory(seen, variable.local_value())
    assert not seen.flags.writeable
    tracemalloc.start()
    try:
        large = Variable(np.ones((1000, 1000)))
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        np.ones(1000) @ large
        large[5]
        np.add.reduce(large)
        assert tracemalloc.get_traced_memory()[1] - before < 1_000_000
    finally:
        tracemalloc.stop()


@in_scope
@every_synchronization
def test_what_is_read_is_nobody_elses(synchronization: str) -> None:
    """It does not change when the variable does, and writing it does not change the variable."""
    variable = Variable(A, synchronization=synchronization, aggregation="MEAN")
    reads: list[Callable[[], Any]] = [
        lambda: variable[...], lambda: variable[0], lambda: variable[:, 1], lambda: variable[[0, 1]],
        lambda: variable.T,
        lambda: variable + 0, lambda: +variable, lambda: abs(variable), lambda: next(iter(variable)),
        lambda: variable.read_value(), lambda: variable.value(), lambda: variable.numpy(), lambda: np.asarray(variable),
        lambda: np.array(variable), lambda: np.asarray(variable, A.dtype),
    ]  # fmt: skip
    for read in reads:
        result = read()
        held = result.copy()
        variable.assign_add(1.0)
        assert (result == held).all()
        variable.assign_sub(1.0)
        result[...] = 7
        assert variable.local_value().tolist() == A.tolist()


@in_scope
def test_no_array_without_a_copy() -> None:
    with pytest.raises(ValueError, match=r"cannot become an array without a copy; its local_value\(\)"):
        Variable(A).__array__(copy=False)


@in_scope
def test_power_with_a_modulus_is_refused_by_name() -> None:
    """As NumPy's arrays refuse it."""
    variable = Variable(3, name="count")
    with pytest.raises(TypeError, match=r"integers, got variable 'count': pass int\(variable\)"):
        pow(variable, 2, 5)
    assert (pow(variable, 2), pow(2, variable), pow(int(variable), 2, 5)) == (9, 8, 4)


@in_scope
def test_variables_are_told_apart_by_identity_where_they_are_keys() -> None:
    one, two = Variable([1.0, 2.0]), Variable([1.0, 2.0])
    assert {one: 1, two: 2} == {one: 1, two: 2}
    assert len({one, two}) == 2


@in_scope
def test_operators_do_not_assign() -> None:
    """`assign` knows the replicas; an operator does not."""
    variable, index = Variable([1.0, 2.0], name="w"), np.array([0, 0])
    in_place: dict[str, tuple[Any, str]] = {
        "+=": (operator.iadd, "use assign_add"), "-=": (operator.isub, "use assign_sub"),
        "*=": (operator.imul, "assign"),
        "@=": (operator.imatmul, "assign"), "**=": (operator.ipow, "assign"), "|=": (operator.ior, "assign"),
    }  # fmt: skip
    for symbol, (change, advice) in in_place.items():
        with pytest.raises(TypeError, match=rf"variable 'w' cannot be changed by {re.escape(symbol)}.*{advice}"):
            change(variable, np.ones(2))
    numpys: list[Callable[[], Any]] = [
        lambda: np.add(variable, 1, out=variable), lambda: np.add.at(variable, index, 1.0),
        lambda: np.multiply.at(variable, index, variable), lambda: np.modf(A[0], out=(None, variable)),
    ]  # fmt: skip
    for change in numpys:
        with pytest.raises(TypeError, match=r"cannot write variable 'w'.*assign_add, scatter_add"):
            change()
    with pytest.raises(TypeError, match="'w' cannot be written in part: use assign, scatter_update"):
        variable[0] = 1
    with pytest.raises(TypeError):
        np.copyto(variable, 0)  # type: ignore[arg-type]
    assert variable.local_value().tolist() == [1, 2]


@in_scope
@pytest.mark.parametrize(
    ("value", "dtype"), [(2.7, int), (300, np.uint8), (np.nan, int), (1 + 2j, float), ([1, -1], np.uint8)], ids=str
)
def test_initial_value_of_another_kind_is_an_error_on_all_ranks(value: Any, dtype: Any) -> None:
    """As the same value is when it is assigned."""
    with raises_everywhere(WORLD, ValueError, "another kind of number|does not fit in"):
        Variable(value, dtype=dtype)
    kept = Variable([1, 2], dtype=np.float32)
    assert (kept.dtype, kept.numpy().tolist()) == (np.float32, [1, 2])
