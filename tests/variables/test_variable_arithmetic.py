"""What a variable is, and computing with it as with an array: no matter on how many ranks."""

import copy
import operator
import pickle
import re
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from scipy.sparse import csr_matrix

from mpidist import OneDeviceStrategy, Variable

pytestmark = pytest.mark.no_mpi

every_synchronization = pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])


@pytest.fixture(autouse=True)
def _in_scope():
    with OneDeviceStrategy() as strategy, strategy.scope():
        yield


def test_dtype_is_that_of_the_value_or_the_argument():
    for initial, dtype, expected in (
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
    ):
        variable = Variable(initial, dtype=dtype)
        assert variable.dtype == expected
        assert variable.dtype.isnative
        assert variable.shape == np.shape(initial)
        assert np.array_equal(np.asarray(variable), np.asarray(initial))


def test_variables_cannot_be_copied():
    variable = Variable(1.0, name="kernel")
    for copies in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match=r"'kernel' cannot be copied or pickled: .*; read its value"):
            copies([variable] if copies is not copy.copy else variable)


def test_own_copy_is_seen_and_not_written():
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


A = np.array([[1.0, 2.0], [3.0, 4.0]])


def added_at(array, indices, values):
    np.add.at(array, indices, values)
    return array


COMPUTE = {
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


def test_mask_computes_like_an_array():
    mask, array = Variable(A > 2), A > 2
    assert (np.add(A, 1, out=np.zeros((2, 2)), where=mask) == np.add(A, 1, out=np.zeros((2, 2)), where=array)).all()
    assert (A[mask] == A[array]).all()
    for one, other in ((~mask, ~array), (mask & mask, array), (mask ^ True, ~array), (mask | False, array)):
        assert (one == other).all()


@every_synchronization
def test_variable_computes_like_an_array(synchronization):
    variable = Variable(A, synchronization=synchronization, aggregation="MEAN")
    for name, compute in COMPUTE.items():
        result, expected = compute(variable), compute(A)
        assert np.array_equal(result, expected), name
        assert type(result) is type(expected), name
        assert variable.local_value().tolist() == A.tolist(), name


@every_synchronization
def test_scalar_variable_is_a_number(synchronization):
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


def test_arrays_own_methods_are_those_of_its_value():
    variable = Variable(A)
    for name in ("sum", "mean", "reshape", "astype", "tolist", "fill", "flat"):
        assert not hasattr(variable, name)
        with pytest.raises(
            AttributeError, match=rf"a variable has no '{name}': read it first, as in variable.numpy\(\)\.{name}"
        ):
            getattr(variable, name)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        variable.nonsense  # noqa: B018


class Operand:
    """What sees the array that an operator was given."""

    __array_ufunc__ = None

    def __radd__(self, other):
        return other


def test_operators_read_the_memory_itself_and_cannot_write_it():
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


@every_synchronization
def test_read_result_is_independent_of_the_variable(synchronization):
    """It does not change when the variable does, and writing it does not change the variable."""
    variable = Variable(A, synchronization=synchronization, aggregation="MEAN")
    reads = [
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


def test_array_without_a_copy_is_refused():
    with pytest.raises(ValueError, match=r"cannot become an array without a copy; its local_value\(\)"):
        Variable(A).__array__(copy=False)


def test_power_with_a_modulus_is_refused_by_name():
    """As NumPy's arrays refuse it."""
    variable = Variable(3, name="count")
    with pytest.raises(TypeError, match=r"integers, got variable 'count': pass int\(variable\)"):
        pow(variable, 2, 5)
    assert (pow(variable, 2), pow(2, variable), pow(int(variable), 2, 5)) == (9, 8, 4)


def test_variable_keys_are_compared_by_identity():
    one, two = Variable([1.0, 2.0]), Variable([1.0, 2.0])
    assert {one: 1, two: 2} == {one: 1, two: 2}
    assert len({one, two}) == 2


def test_operators_do_not_assign():
    """`assign` knows the replicas; an operator does not."""
    variable, index = Variable([1.0, 2.0], name="w"), np.array([0, 0])
    in_place = {
        "+=": (operator.iadd, "use assign_add"), "-=": (operator.isub, "use assign_sub"),
        "*=": (operator.imul, "assign"),
        "@=": (operator.imatmul, "assign"), "**=": (operator.ipow, "assign"), "|=": (operator.ior, "assign"),
    }  # fmt: skip
    for symbol, (change, advice) in in_place.items():
        with pytest.raises(TypeError, match=rf"variable 'w' cannot be changed by {re.escape(symbol)}.*{advice}"):
            change(variable, np.ones(2))
    numpys = [
        lambda: np.add(variable, 1, out=variable), lambda: np.add.at(variable, index, 1.0),
        lambda: np.multiply.at(variable, index, variable), lambda: np.modf(A[0], out=(None, variable)),
    ]  # fmt: skip
    for change in numpys:
        with pytest.raises(TypeError, match=r"cannot write variable 'w'.*assign_add, scatter_add"):
            change()
    with pytest.raises(TypeError, match="'w' cannot be written in part: use assign, scatter_update"):
        variable[0] = 1
    with pytest.raises(TypeError):
        np.copyto(variable, 0)
    assert variable.local_value().tolist() == [1, 2]
