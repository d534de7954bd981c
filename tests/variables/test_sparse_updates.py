"""`scatter_add` and its like: some rows of a variable, changed across replicas, in a replica, and by all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.everywhere import raises_everywhere, same_everywhere

from mpidist import IndexedSlices, OneDeviceStrategy, Variable
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.errors import InvalidArgumentError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

METHODS = [f"scatter_{name}" for name in ("add", "sub", "mul", "div", "max", "min", "update")]
ADDITIVE = METHODS[:4]

only_several = pytest.mark.ranks(min=2)


@pytest.fixture(params=[False, True], ids=["per rank", "per node"])
def strategy(comm: Intracomm, request: pytest.FixtureRequest) -> Iterator[Strategy]:
    with Strategy(comm=comm, per_node_variables=request.param) as made:
        yield made


@pytest.fixture
def make(strategy: Strategy) -> Callable[..., Variable]:
    def create(value: Any, aggregation: str = "NONE", synchronization: str = "AUTO") -> Variable:
        with strategy.scope():
            return Variable(value, aggregation=aggregation, synchronization=synchronization)

    return create


def after(method: str, before: Any, slices: IndexedSlices) -> Any:
    """Say what becomes of an array, row by row."""
    array = np.array(before)
    for index, row in zip(slices.indices, np.asarray(slices.values, array.dtype), strict=True):
        if method == "scatter_update":
            array[index] = row
        elif method == "scatter_div" and array.dtype.kind in "iu":
            array[index] //= row
        else:
            ufunc = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}.get(method[8:])
            ufunc = ufunc or {"max": np.maximum, "min": np.minimum}[method[8:]]
            array[index] = ufunc(array[index], row)
    return array


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8])
@pytest.mark.parametrize("method", METHODS)
def test_rows_are_changed_across_replicas_and_in_updates(
    make: Callable[..., Variable], strategy: Strategy, method: str, dtype: Any
) -> None:
    """T98. Rows that come twice are changed twice; whatever the aggregation."""
    before = np.arange(2, 14, dtype=dtype).reshape(4, 3)
    slices = IndexedSlices(np.array([[1, 2, 3], [2, 2, 2], [4, 1, 1]], dtype), [3, 0, 3], (4, 3))
    for aggregation in ("NONE", "SUM"):
        variable = make(before, aggregation)
        assert getattr(variable, method)(slices) is variable
        once = after(method, before, slices)
        assert variable.local_value().tolist() == once.tolist()
        strategy.extended.update(variable, lambda var: getattr(var, method)(slices))
        assert variable.local_value().tolist() == after(method, once, slices).tolist()
    with strategy.scope():
        variable.scatter_update(IndexedSlices(np.zeros((1, 3), dtype), np.array([1], np.uint8), None), False, None)
    assert variable.local_value()[1].tolist() == [0, 0, 0]


def test_a_replica_changes_its_own_rows_where_nothing_is_aggregated(comm: Intracomm) -> None:
    """T97."""
    with Strategy(comm=comm) as strategy, strategy.scope():
        variable = Variable([4.0])
        expected = {"sub": 2, "add": 4, "max": 4, "min": 2, "mul": 4, "div": 2, "update": 2}
        for name, value in expected.items():
            strategy.run(lambda name=name: getattr(variable, f"scatter_{name}")(IndexedSlices([2.0], [0])))
            assert variable.local_value() == value
        strategy.run(lambda: variable.scatter_add(IndexedSlices([float(comm.rank)], [0], None)))
        assert variable.local_value() == 2 + comm.rank


@pytest.mark.core
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
@pytest.mark.parametrize("method", METHODS)
def test_replicas_change_rows_together(
    make: Callable[..., Variable], strategy: Strategy, comm: Intracomm, aggregation: str, method: str
) -> None:
    """T92, T95. Those of all ranks in rank order; ranks may have other numbers of rows, and none."""
    size = comm.size
    before = np.arange(1.0, 2 * size + 3).reshape(-1, 2)
    variable = make(before, aggregation)
    everyones = [
        IndexedSlices(np.full((rank, 2), 2.0 ** (rank + 1)), [rank, *[0] * (rank - 1)][:rank]) for rank in range(size)
    ]

    def step() -> Any:
        return getattr(variable, method)(everyones[comm.rank])

    if method not in ADDITIVE and aggregation != "ONLY_FIRST_REPLICA":
        with raises_everywhere(comm, NotImplementedError, f"{method} of variable 'variable' has no {aggregation}"):
            strategy.run(step)
        assert variable.local_value().tolist() == before.tolist()
        return
    assert strategy.run(step) is variable
    expected = before
    for slices in everyones[: 1 if aggregation == "ONLY_FIRST_REPLICA" else size]:
        values = np.asarray(slices.values) / (size if aggregation == "MEAN" else 1)
        expected = after(method, expected, IndexedSlices(values, slices.indices))
    assert variable.local_value().tolist() == expected.tolist()
    assert same_everywhere(comm, variable.local_value())


@pytest.mark.ranks(2)
def test_integers_are_divided_as_integers(make: Callable[..., Variable], strategy: Strategy, comm: Intracomm) -> None:
    """T94."""
    variable = make([1, 6, 1], "SUM")
    strategy.run(lambda: variable.scatter_div(IndexedSlices([comm.rank + 2], [comm.rank])))
    assert variable.local_value().tolist() == [0, 2, 1]


@pytest.mark.ranks(2)
def test_means_of_rows_are_those_of_the_reference(
    make: Callable[..., Variable], strategy: Strategy, comm: Intracomm
) -> None:
    """T92, T95."""
    rank = comm.rank
    variable = make(np.zeros(3), "MEAN")
    strategy.run(lambda: variable.scatter_sub(IndexedSlices(np.array([rank, rank + 1.0]), [rank, rank + 1])))
    assert variable.local_value().tolist() == [0, -1, -1]
    variable = make([2.0, 1.0, 1.0], "MEAN")
    strategy.run(lambda: variable.scatter_mul(IndexedSlices([rank + 2.0], [rank])))
    assert variable.local_value().tolist() == [2, 1.5, 1]


@pytest.mark.parametrize("method", METHODS)
def test_rows_of_what_is_read_together_are_not_changed(
    make: Callable[..., Variable], strategy: Strategy, comm: Intracomm, method: str
) -> None:
    """T109."""
    variable = make([1.0], "SUM", "ON_READ")
    for call in (lambda f: f(), strategy.run):
        with raises_everywhere(
            comm, NotImplementedError, f"{method} is not supported by .*'variable', which is ON_READ"
        ):
            call(lambda: getattr(variable, method)(IndexedSlices([1.0], [0])))
    assert variable.local_value() == 1


WRONG: list[tuple[Any, type[Exception], str]] = [
    (IndexedSlices([[1.0, 2.0]], [2]), ValueError, "has rows 0 to 1, and row 2 was to be changed"),
    (IndexedSlices([[1.0, 2.0]], [-1]), ValueError, "row -1 was to be changed"),
    (IndexedSlices([1.0, 2.0], [0]), ValueError, r"needed indices \[k\] and values \[k, 2\], got .* values \[2\]"),
    (IndexedSlices([[1.0, 2.0]], 0), ValueError, r"got indices \[\]"),
    (IndexedSlices([[1.0, 2.0]], [0, 1]), ValueError, r"got indices \[2\]"),
    (IndexedSlices([[1j, 2.0]], [0]), ValueError, "another kind of number"),
    (IndexedSlices([[1.0, 2.0]], [0.0]), TypeError, "must be integers, got dtype float64"),
    (IndexedSlices(None, [0]), TypeError, "NoneType"),
    (np.ones(2), TypeError, r"IndexedSlices\(values, indices\), not by ndarray"),
]


@pytest.mark.parametrize(("slices", "kind", "text"), WRONG, ids=[text for _, _, text in WRONG])
def test_rows_that_do_not_fit_are_an_error_on_all_ranks(
    make: Callable[..., Variable], strategy: Strategy, comm: Intracomm, slices: Any, kind: type[Exception], text: str
) -> None:
    variable = make([[1.0, 2.0], [3.0, 4.0]], "SUM")
    for call in (lambda f: f(), strategy.run):
        with raises_everywhere(comm, kind, text):
            call(lambda: variable.scatter_add(slices))
    assert variable.local_value().tolist() == [[1, 2], [3, 4]]


@only_several
def test_one_ranks_wrong_row_is_everyones_error(
    make: Callable[..., Variable], strategy: Strategy, comm: Intracomm
) -> None:
    variable = make([1.0, 2.0], "SUM")
    slices = IndexedSlices([1.0], [comm.rank * 100])
    with raises_everywhere(comm, InvalidArgumentError, "rank 1.*row 100"):
        strategy.run(lambda: variable.scatter_add(slices))
    assert variable.local_value().tolist() == [1, 2]
    strategy.run(lambda: variable.scatter_add(IndexedSlices([1.0], [0])))
    assert variable.local_value().tolist() == [1 + comm.size, 2]


def test_numbers_have_no_rows(make: Callable[..., Variable], comm: Intracomm) -> None:
    with raises_everywhere(comm, ValueError, r"has shape \[\]"):
        make(1.0).scatter_add(IndexedSlices([1.0], [0]))


def test_another_strategys_rows_are_not_changed(make: Callable[..., Variable]) -> None:
    variable = make([1.0])
    with OneDeviceStrategy() as other, pytest.raises(RuntimeError, match="scatter_add: mixing different strategies"):
        other.run(lambda: variable.scatter_add(IndexedSlices([1.0], [0])))
