"""`scatter_add` and its like: some rows of a variable, changed across replicas, in a replica, and by all of them."""

from functools import partial
from itertools import product

import numpy as np
import pytest
from support.everywhere import raises_everywhere, same_everywhere

from mpidist import IndexedSlices, OneDeviceStrategy, Variable
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.errors import InvalidArgumentError

METHODS = [f"scatter_{name}" for name in ("add", "sub", "mul", "div", "max", "min", "update")]
ADDITIVE = METHODS[:4]

pytestmark = pytest.mark.ranks(1, 3)


@pytest.fixture(params=[False, True], ids=["per rank", "per node"])
def strategy(comm, request):
    with Strategy(comm=comm, per_node_variables=request.param) as made:
        yield made


@pytest.fixture
def make(strategy):
    def create(value, aggregation="NONE", synchronization="AUTO"):
        with strategy.scope():
            return Variable(value, aggregation=aggregation, synchronization=synchronization)

    return create


def after(method, before, slices):
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


def test_rows_are_changed_across_replicas_and_in_updates(make, strategy):
    """Rows that come twice are changed twice; whatever the aggregation."""
    for method, dtype in product(METHODS, (np.float32, np.int64, np.uint8)):
        before = np.arange(2, 14, dtype=dtype).reshape(4, 3)
        slices = IndexedSlices(np.array([[1, 2, 3], [2, 2, 2], [4, 1, 1]], dtype), [3, 0, 3], (4, 3))
        once = after(method, before, slices)
        for aggregation in ("NONE", "SUM"):
            variable = make(before, aggregation)
            change = getattr(variable, method)
            assert change(slices) is variable
            assert variable.local_value().tolist() == once.tolist(), (method, dtype)
            strategy.extended.update(variable, lambda var, change=change, slices=slices: change(slices))
            assert variable.local_value().tolist() == after(method, once, slices).tolist(), (method, dtype)
    with strategy.scope():
        variable.scatter_update(IndexedSlices(np.zeros((1, 3), dtype), np.array([1], np.uint8), None), False, None)
    assert variable.local_value()[1].tolist() == [0, 0, 0]


@pytest.mark.core
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_replicas_change_rows_together(make, strategy, comm, aggregation):
    """Those of all ranks in rank order; ranks may have other numbers of rows, and none."""
    size = comm.size
    before = np.arange(1.0, 2 * size + 3).reshape(-1, 2)
    everyones = [
        IndexedSlices(np.full((rank, 2), 2.0 ** (rank + 1)), [rank, *[0] * (rank - 1)][:rank]) for rank in range(size)
    ]
    for method in METHODS:
        variable = make(before, aggregation)
        step = partial(getattr(variable, method), everyones[comm.rank])
        if method not in ADDITIVE and aggregation != "ONLY_FIRST_REPLICA":
            with raises_everywhere(comm, NotImplementedError, f"{method} of variable '.*' has no {aggregation}"):
                strategy.run(step)
            assert variable.local_value().tolist() == before.tolist()
            continue
        assert strategy.run(step) is variable
        expected = before
        for slices in everyones[: 1 if aggregation == "ONLY_FIRST_REPLICA" else size]:
            values = np.asarray(slices.values) / (size if aggregation == "MEAN" else 1)
            expected = after(method, expected, IndexedSlices(values, slices.indices))
        assert variable.local_value().tolist() == expected.tolist(), method
        assert same_everywhere(comm, variable.local_value())


def test_scatter_without_aggregation_changes_rows_of_the_replica(comm):
    with Strategy(comm=comm) as strategy, strategy.scope():
        variable = Variable([4.0])
        expected = {"sub": 2, "add": 4, "max": 4, "min": 2, "mul": 4, "div": 2, "update": 2}
        for name, value in expected.items():
            strategy.run(lambda name=name: getattr(variable, f"scatter_{name}")(IndexedSlices([2.0], [0])))
            assert variable.local_value() == value
        strategy.run(lambda: variable.scatter_add(IndexedSlices([float(comm.rank)], [0], None)))
        assert variable.local_value() == 2 + comm.rank


WRONG = [
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


@pytest.mark.ranks(3)
def test_rows_that_do_not_fit_are_an_error_on_all_ranks(make, strategy, comm):
    variable, number, metric = make([[1.0, 2.0], [3.0, 4.0]], "SUM"), make(1.0, "SUM"), make([1.0], "SUM", "ON_READ")
    wrong = [
        (partial(number.scatter_add, IndexedSlices([1.0], [0])), ValueError, r"has shape \[\]"),
        *((partial(variable.scatter_add, slices), kind, text) for slices, kind, text in WRONG),
        *(
            (
                partial(getattr(metric, method), IndexedSlices([1.0], [0])),
                NotImplementedError,
                f"{method} is not supported by .*'variable.*', which is ON_READ",
            )
            for method in METHODS
        ),
    ]
    for change, kind, text in wrong:
        with raises_everywhere(comm, kind, text):
            change()
        with raises_everywhere(comm, kind, text):
            strategy.run(change)
    with raises_everywhere(comm, InvalidArgumentError, "rank 1.*row 100"):  # and on rank 2
        strategy.run(lambda: variable.scatter_add(IndexedSlices([[1.0, 1.0]], [comm.rank * 100])))
    assert (variable.local_value().tolist(), metric.local_value()) == ([[1, 2], [3, 4]], 1)
    with OneDeviceStrategy() as other, pytest.raises(RuntimeError, match="scatter_add: mixing different strategies"):
        other.run(lambda: variable.scatter_add(IndexedSlices([1.0], [0])))
    strategy.run(lambda: variable.scatter_add(IndexedSlices([[1.0, 0.0]], [0])))
    assert variable.local_value().tolist() == [[1 + comm.size, 2], [3, 4]]
