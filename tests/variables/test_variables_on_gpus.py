"""Variables and symmetric arrays in device memory: where they lie, and how they are read and written there."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from host_cuda.gpus import down, gpus, one_node, require_gpus, up
from support.everywhere import raises_everywhere

from mpidist import IndexedSlices, MirroredStrategy, MultiWorkerMirroredStrategy, OneDeviceStrategy, Variable
from mpidist import get_replica_context as context
from mpidist.checkpoint import Checkpoint
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError
from mpidist.experimental import ParameterServerStrategy
from mpidist.transport import arrays

__all__ = ["gpus", "one_node"]  # fixtures

pytestmark = pytest.mark.usefixtures("one_node")

NAMED = {
    "one device": lambda comm: OneDeviceStrategy("GPU:0"),
    "a device of this rank": lambda comm: MirroredStrategy("GPU:0", comm=comm),
    "a device of each rank": lambda comm: MirroredStrategy(["GPU:0"] * comm.size, comm=comm),
    "several replicas": lambda comm: MirroredStrategy(["GPU:0"] * 2 * comm.size, comm=comm),
}
VALUES = {
    "number": lambda number: number,
    "NumPy": lambda number: np.full(3, number, np.float32),
    "CuPy": lambda number: up(np.full(3, number, np.float32)),
}
SCATTERS = ("scatter_add", "scatter_sub", "scatter_mul", "scatter_div", "scatter_max", "scatter_min", "scatter_update")


@pytest.fixture(
    params=[
        pytest.param("one device", marks=pytest.mark.ranks(1)),
        pytest.param("a device of this rank", marks=pytest.mark.ranks(3)),
        pytest.param("a device of each rank", marks=pytest.mark.ranks(3)),
        pytest.param("several replicas", marks=pytest.mark.ranks(1, 3)),
    ]
)
def strategy(request, gpus, comm):
    with NAMED[request.param](comm) as made:
        yield made


def make(strategy, value, **how):
    with strategy.scope():
        return Variable(value, **how)


def is_on_gpu(variable):
    return arrays.is_device(variable.local_value())


def test_named_gpus_hold_variables_and_symmetric_arrays(strategy):
    for value in (np.arange(3.0), up(np.arange(3.0)), lambda: np.arange(3.0), [0.0, 1.0, 2.0]):
        for synchronization in ("ON_WRITE", "ON_READ"):
            variable = make(strategy, value, synchronization=synchronization, aggregation="MEAN")
            assert is_on_gpu(variable)
            assert variable.numpy().tolist() == [0.0, 1.0, 2.0]
    assert is_on_gpu(make(strategy, 1, dtype=np.float32))
    array = strategy.symmetric_empty((2, 3), np.float32)
    assert arrays.is_device(array)
    assert (array.shape, array.dtype) == ((2, 3), np.float32)
    likes = strategy.symmetric_empty_like({"host": np.zeros(2), "GPU": up(np.zeros(3, "i4"))})
    assert all(map(arrays.is_device, likes.values()))
    assert [(its.shape, its.dtype.str) for its in likes.values()] == [((2,), "<f8"), ((3,), "<i4")]
    assert not arrays.is_device(strategy.symmetric_empty(4, np.float32, per_node=True))


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("kind", [MirroredStrategy, MultiWorkerMirroredStrategy])
def test_found_gpus_hold_only_values_given_there(kind, gpus, comm):
    with kind(comm=comm) as strategy:
        assert parts_of(strategy).replicas.devices[0].is_gpu
        assert not is_on_gpu(make(strategy, np.arange(3.0)))
        assert is_on_gpu(make(strategy, lambda: up(np.arange(3.0))))
        assert not arrays.is_device(strategy.symmetric_empty(4, np.float32))
        host, device = strategy.symmetric_empty_like([np.zeros(2), up(np.zeros(2))])
        assert not arrays.is_device(host)
        assert arrays.is_device(device)


@pytest.mark.ranks(3)
def test_one_device_that_is_no_gpu_keeps_variables_in_host_memory(gpus, comm):
    devices = ["GPU:0"] * comm.size + ["CPU:0"]
    with MirroredStrategy(devices, comm=comm) as strategy:
        assert not is_on_gpu(make(strategy, np.arange(3.0)))
        assert not arrays.is_device(strategy.symmetric_empty(4, np.float32))


@pytest.mark.ranks(3)
def test_per_node_variables_stay_in_host_memory(gpus, comm):
    with MirroredStrategy("GPU:0", comm=comm, per_node_variables=True) as strategy:
        variable = make(strategy, np.arange(3.0))
        assert not is_on_gpu(variable)
        variable.assign(up(np.ones(3)))
        assert variable.numpy().tolist() == [1.0, 1.0, 1.0]


@pytest.mark.ranks(3)
def test_values_that_no_gpu_holds_are_everyones_error(gpus, comm):
    with MirroredStrategy("GPU:0", comm=comm) as strategy:
        value = np.zeros(2, np.longdouble if comm.rank == comm.size - 1 else np.float64)
        with raises_everywhere(comm, (TypeError, InvalidArgumentError, ValueError, KeyError), "float128|'g'"):
            make(strategy, value)
        with raises_everywhere(comm, (TypeError, InvalidArgumentError, ValueError, KeyError), "."):
            strategy.symmetric_empty(2, value.dtype)
        assert is_on_gpu(make(strategy, np.zeros(2)))


def test_numpy_and_cupy_values_are_assigned(strategy):
    weights = make(strategy, np.zeros((2, 2), np.float32))
    weights.assign(np.ones((2, 2), np.float32))
    weights.assign_add(up(np.full((2, 2), 2.0, np.float32)))
    weights.assign_sub(0.5)
    weights.assign_add(np.float32(0.5))
    weights.assign_add([[1, 2], [3, 4]])
    strategy.run(lambda: weights.assign_add(np.full((2, 2), 10.0, np.float32)))
    assert is_on_gpu(weights)
    assert weights.numpy().tolist() == [[14.0, 15.0], [16.0, 17.0]]
    with pytest.raises(ValueError, match="another kind of number"):
        weights.assign(np.zeros((2, 2), complex))
    other = make(strategy, np.zeros((2, 2), np.float32))
    other.assign(weights)
    assert other.numpy().tolist() == weights.numpy().tolist()


def combined(strategy):
    """Return what becomes of the numbers 1, 2, ... of all replicas, by the aggregation."""
    total = strategy.num_replicas_in_sync
    return {"SUM": total * (total + 1) / 2, "MEAN": (total + 1) / 2, "ONLY_FIRST_REPLICA": 1.0}


def test_values_of_any_memory_are_assigned_in_replica_context(strategy):
    total = strategy.num_replicas_in_sync
    for (aggregation, assigned), kind in product(combined(strategy).items(), VALUES):
        variable = make(strategy, np.zeros(3, np.float32), aggregation=aggregation)

        def step(variable=variable, kind=kind):
            variable.assign(VALUES[kind](context().replica_id_in_sync_group + 1.0))
            variable.assign_add(VALUES[kind](0.5))

        if (kind, aggregation) == ("number", "SUM") and total > 1:
            with pytest.raises(ValueError, match=f"it would count {total} times"):
                strategy.run(step)
            continue
        strategy.run(step)
        added = 0.5 * total if aggregation == "SUM" else 0.5
        assert is_on_gpu(variable)
        assert variable.numpy().tolist() == [assigned + added] * 3, (aggregation, kind)


def test_expressions_take_numpy_by_a_copy_and_cupy_as_it_is(strategy):
    """The result is NumPy's beside NumPy's arrays, and CuPy's else."""
    numbers = np.array([1.0, 2.0, 4.0])
    v, scalar = make(strategy, numbers), make(strategy, 2.75)
    on_host = [
        v + numbers, numbers + v, numbers * v, v - [1.0, 1.0, 1.0], numbers @ v, v @ numbers, v == numbers, v**numbers,
        np.add(v, numbers), np.add(numbers, v), np.sum(v), np.add.reduce(v), np.asarray(v), v.numpy(), np.mean(v),
        np.concatenate([v, numbers]), np.where(numbers > 1, v, 0.0),
    ]  # fmt: skip
    n = numbers
    expected = [
        n + n, n + n, n * n, n - 1, n @ n, n @ n, n == n, n**n, n + n, n + n, n.sum(), n.sum(), n, n, n.mean(),
        np.concatenate([n, n]), np.where(n > 1, n, 0.0),
    ]  # fmt: skip
    for got, want in zip(on_host, expected, strict=True):
        assert isinstance(got, (np.ndarray, np.generic))
        assert np.array_equal(got, want)
    on_gpu = [v + 1, 1 - v, v * up(numbers), up(numbers) * v, v + v, v * scalar, -v, v[1:], v.T, np.add(v, 1.0)]
    expected = [n + 1, 1 - n, n * n, n * n, n + n, n * 2.75, -n, n[1:], n, n + 1]
    for got, want in zip(on_gpu, expected, strict=True):
        assert arrays.is_device(got)
        assert np.array_equal(down(got), want)
    out = np.zeros(3)
    assert np.add(v, 1.0, out=out) is out
    assert out.tolist() == [2.0, 3.0, 5.0]
    assert (float(scalar), int(scalar), round(scalar, 1), f"{scalar:.1f}") == (2.75, 2, 2.8, "2.8")
    assert list(range(make(strategy, 3))) == [0, 1, 2]
    assert bool(scalar > 2)
    assert v.numpy().tolist() == n.tolist(), "not written by its readers"


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_rows_are_changed_as_in_host_memory(gpus, comm, dtype):
    """Bit by bit, whatever the number of changes of one row."""
    rng = np.random.default_rng(3)
    start = (rng.normal(size=(6, 5)) * 100 + 200).astype(dtype)
    indices = np.array([2, 5, 2, 0, 2, 5, 2], np.int64)
    rows = (rng.normal(size=(7, 5)) * 3 + 10).astype(dtype)

    def changed(strategy, place):
        variables = [make(strategy, start) for _ in SCATTERS]
        for variable, call in zip(variables, SCATTERS, strict=True):
            getattr(variable, call)(IndexedSlices(place(rows), place(indices)))
            getattr(variable, call)(IndexedSlices(rows[:0], indices[:0]))
            assert is_on_gpu(variable) == (strategy is on_gpu)
        return [variable.numpy().tobytes() for variable in variables]

    with MirroredStrategy("CPU:0", comm=comm) as on_host, MirroredStrategy("GPU:0", comm=comm) as on_gpu:
        expected = changed(on_host, np.asarray)
        assert changed(on_gpu, np.asarray) == changed(on_gpu, up) == expected


def test_rows_of_all_replicas_are_changed(strategy):
    for aggregation, number in combined(strategy).items():
        embedding = make(strategy, np.zeros((4, 2)), aggregation=aggregation)

        def step(embedding=embedding):
            own = float(context().replica_id_in_sync_group + 1)
            embedding.scatter_add(IndexedSlices(np.full((2, 2), own), [1, 3]))

        strategy.run(step)
        assert embedding.numpy().tolist() == [[0.0] * 2, [number] * 2, [0.0] * 2, [number] * 2], aggregation


def test_program_trains_and_checkpoints_hold_variables(strategy, comm, tmp_path):
    shared = Path(comm.bcast(str(tmp_path)))
    folder = tmp_path if isinstance(strategy, OneDeviceStrategy) else shared  # whose ranks know nothing of each other
    total = strategy.num_replicas_in_sync
    with strategy.scope():
        weights = Variable(np.ones(3, np.float32))
        seen = Variable(0, dtype=np.int64, synchronization="ON_READ", aggregation="SUM")
        checkpoint = Checkpoint(weights=weights, seen=seen)

    def step(x):
        gradient = context().all_reduce("sum", up(np.ones(3, np.float32)) * context().replica_id_in_sync_group)
        weights.assign_sub(0.5 * gradient)
        seen.assign_add(len(x))
        return x @ weights

    for _ in range(2):
        strategy.run(step, args=(np.ones((4, 3), np.float32),))
    path, trained = checkpoint.write(folder / "one"), [1.0 - total * (total - 1) / 2] * 3
    assert (weights.numpy().tolist(), int(seen)) == (trained, 8 * total)
    weights.assign(np.zeros(3))
    seen.assign(0)
    checkpoint.restore(path)
    assert is_on_gpu(weights)
    assert is_on_gpu(seen)
    assert (weights.numpy().tolist(), int(seen)) == (trained, 8 * total)


def test_symmetric_arrays_are_reduced(strategy):
    total = strategy.num_replicas_in_sync
    value, out = strategy.symmetric_empty(5, np.float32), strategy.symmetric_empty(5, np.float32)
    value[...] = up(np.arange(5, dtype=np.float32))
    expected = [float(total * at) for at in range(5)]
    if parts_of(strategy).replicas.tree is None:
        assert strategy.run(lambda: context().all_reduce("sum", value, out=out)) is out
        assert down(out).tolist() == expected
    else:  # several replicas cannot share one `out`
        sums = strategy.run(lambda: down(context().all_reduce("sum", value)).tolist())
        assert strategy.experimental_local_results(sums) == (expected,) * len(parts_of(strategy).replicas.ids_here)


@pytest.fixture(
    params=[
        pytest.param(which, marks=pytest.mark.ranks(number))
        for which, number in (("2 on a GPU", 3), ("3 on a GPU", 1), ("2 GPUs", 3), ("3 GPUs", 1))
    ]
)
def several(request, gpus, comm):
    """A strategy whose ranks have several replicas each, on one GPU or on as many."""
    count = int(request.param[0]) * comm.size
    is_shared = request.param.endswith("on a GPU")
    require_gpus(1 if is_shared else count)
    with MirroredStrategy([f"GPU:{0 if is_shared else at}" for at in range(count)], comm=comm) as made:
        yield made


def gpu_of_replica():
    return int(context().devices[0].rpartition(":")[2])


def test_replicas_of_a_rank_read_a_copy_on_their_gpu_that_follows_the_variable(several):
    weights = make(several, np.zeros(3))
    summed = make(several, np.zeros(3), aggregation="SUM")
    first = parts_of(several).replicas.devices[0].index

    found = []

    def read():
        view = weights.local_value()
        assert view.device.id == gpu_of_replica()
        assert weights.local_value().data.ptr == view.data.ptr, "copied once"
        found.append((down(weights + up(np.ones(3))).tolist(), down(summed * 1).tolist()))

    total = several.num_replicas_in_sync
    for turn in range(3):
        several.run(read)
        assert found == [([turn + 1.0] * 3, [float(turn * total)] * 3)] * len(parts_of(several).replicas.ids_here)
        found.clear()
        several.run(lambda: summed.assign_add(up(np.ones(3))))
        if turn == 0:
            weights.assign_add(np.ones(3))
        elif turn == 1:
            several.run(lambda: weights.assign_add(np.ones(3)))
    weights.scatter_update(IndexedSlices(np.full((1,), 7.0), [1]))
    several.run(read)
    assert found[-1][0] == [3.0, 8.0, 3.0]
    assert weights.local_value().device.id == first


def test_checkpoints_of_host_memory_are_restored_on_the_gpu_of_every_replica(several, comm, tmp_path):
    folder = Path(comm.bcast(str(tmp_path)))
    with MirroredStrategy("CPU:0", comm=comm) as on_host:
        path = Checkpoint(weights=make(on_host, np.arange(3.0))).write(folder / "one")
    weights = make(several, np.zeros(3))
    several.run(lambda: weights.assign_add(np.ones(3)))  # every GPU has a copy
    Checkpoint(weights=weights).restore(path)
    found = []
    several.run(lambda: found.append(down(weights.local_value()).tolist()))
    assert found == [[0.0, 1.0, 2.0]] * len(parts_of(several).replicas.ids_here)
    assert is_on_gpu(weights)


def test_replicas_of_a_rank_write(several):
    weights = make(several, np.zeros(2))
    metric = make(several, np.zeros(2), synchronization="ON_READ", aggregation="SUM")

    def step():
        own = context().replica_id_in_sync_group
        weights.assign(up(np.full(2, 1.0)))
        weights.assign_add(weights)
        metric.assign_add(up(np.full(2, float(own))))
        assert metric.local_value().device.id == gpu_of_replica()
        gradient = context().all_reduce("mean", up(np.full(2, 3.0)))
        weights.assign_add(gradient)

    several.run(step)
    total = several.num_replicas_in_sync
    assert weights.numpy().tolist() == [5.0, 5.0]
    assert [down(copy).tolist() for copy in metric.values] == [[at] * 2 for at in parts_of(several).replicas.ids_here]
    assert metric.numpy().tolist() == [total * (total - 1) / 2] * 2
    metric.assign(np.full(2, 6.0 * total))
    assert [down(copy).tolist() for copy in several.run(metric.read_value).values] == [[6.0, 6.0]] * len(
        parts_of(several).replicas.ids_here
    )
    with pytest.raises(ValueError, match="copies would differ"):
        several.run(lambda: weights.assign(up(np.full(2, float(context().replica_id_in_sync_group)))))
    assert weights.numpy().tolist() == [5.0, 5.0]


@pytest.mark.ranks(3)
def test_rows_on_servers_are_read_by_indices_on_a_gpu(gpus, comm):
    with ParameterServerStrategy(num_ps=1, comm=comm) as strategy:
        if strategy.is_ps:
            strategy.serve()
            return
        table = make(strategy, np.arange(12.0).reshape(6, 2))
        assert table.sparse_read(up(np.array([5, 0]))).tolist() == [[10, 11], [0, 1]]
