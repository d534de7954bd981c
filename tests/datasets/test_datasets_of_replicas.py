"""Data sets where the number of replicas was chosen: what a replica gets does not depend on the number of ranks."""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from host_cuda.gpus import gpus, one_node, require_gpus
from support.everywhere import raises_everywhere

from mpidist import InputContext, InputOptions, MirroredStrategy, PerReplica, Variable, get_replica_context
from mpidist import MultiWorkerMirroredStrategy as MultiWorker
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError, OutOfRangeError
from mpidist.transport import arrays

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["gpus", "one_node"]

NUMBERS: dict[str, Callable[[int], int]] = {
    "P": lambda size: size,
    "P + 1": lambda size: size + 1,
    "2 P": lambda size: 2 * size,
    "8": lambda size: 8,
}
PER_REPLICA = InputOptions(experimental_replication_mode="PER_REPLICA")


class Pair(NamedTuple):
    x: Any
    y: Any


@pytest.fixture(params=NUMBERS)
def num_replicas(request: pytest.FixtureRequest, comm: Intracomm) -> int:
    return NUMBERS[request.param](comm.size)


@pytest.fixture
def strategy(comm: Intracomm, num_replicas: int) -> Iterator[MultiWorker]:
    with MultiWorker(replicas=num_replicas, comm=comm) as made:
        yield made


def expected_parts(batch: Any, num_replicas: int) -> list[Any]:
    """Cut a batch by the number of replicas alone: lengths differ by one at most, longer parts first."""
    lengths = [len(batch) // num_replicas + (at < len(batch) % num_replicas) for at in range(num_replicas)]
    starts = [sum(lengths[:at]) for at in range(num_replicas)]
    return [batch[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def of_all_replicas(comm: Intracomm, value: Any) -> list[Any]:
    """List the components of all replicas, in the order of replicas. Collective."""
    assert type(value) is PerReplica
    mine = [np.asarray(part).tolist() for part in value.values]
    return [part for of_rank in comm.allgather(mine) for part in of_rank]


# --- Global batches ---


@pytest.mark.core
def test_ten_rows_over_four_replicas(comm: Intracomm) -> None:
    with MultiWorker(replicas=4, comm=comm) as strategy:
        (part,) = strategy.experimental_distribute_dataset([np.arange(10)])
    assert of_all_replicas(comm, part) == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert comm.allgather(len(part.values)) == {1: [4], 2: [2, 2], 3: [2, 1, 1], 4: [1, 1, 1, 1]}[comm.size]
    if comm.rank == 0 and comm.size in (2, 3):
        assert repr(part) == "PerReplica:{0: array([0, 1, 2]), 1: array([3, 4, 5])}"


@pytest.mark.core
@pytest.mark.parametrize("length", [0, 1, 10, 17])
def test_parts_follow_from_the_number_of_replicas_alone(
    comm: Intracomm, strategy: MultiWorker, num_replicas: int, length: int
) -> None:
    whole = [np.arange(2 * length, dtype=np.float32).reshape(length, 2) + step for step in range(3)]
    steps = list(strategy.experimental_distribute_dataset(whole))
    assert len(steps) == 3
    for batch, part in zip(whole, steps, strict=True):
        parts = of_all_replicas(comm, part)
        assert parts == [rows.tolist() for rows in expected_parts(batch, num_replicas)]
        assert [row for rows in parts for row in rows] == batch.tolist()
        for mine in part.values:
            assert (mine.dtype, mine.shape[1:]) == (np.float32, (2,))
            assert not len(mine) or np.shares_memory(mine, batch)


def test_devices_that_are_more_than_ranks_are_replicas(comm: Intracomm) -> None:
    with MirroredStrategy([f"CPU:{at}" for at in range(comm.size + 1)], comm=comm) as strategy:
        (part,) = strategy.experimental_distribute_dataset([np.arange(7)])
        expected = [rows.tolist() for rows in expected_parts(np.arange(7), comm.size + 1)]
        assert of_all_replicas(comm, part) == expected
        assert strategy.gather(part, axis=0).tolist() == list(range(7))


def test_nest_is_cut_leaf_by_leaf(comm: Intracomm, strategy: MultiWorker, num_replicas: int) -> None:
    batch = {"pair": Pair(np.arange(10).reshape(5, 2), [np.arange(5, dtype=np.int8)]), "names": np.array(list("abcde"))}
    (part,) = strategy.experimental_distribute_dataset([batch])
    assert list(part) == ["pair", "names"]
    assert isinstance(part["pair"], Pair)
    for leaf, whole in ((part["pair"].x, batch["pair"].x), (part["pair"].y[0], batch["pair"].y[0])):
        assert of_all_replicas(comm, leaf) == [rows.tolist() for rows in expected_parts(whole, num_replicas)]
        assert {mine.dtype for mine in leaf.values} == {whole.dtype}
    assert ["".join(names) for names in of_all_replicas(comm, part["names"])] == expected_parts("abcde", num_replicas)


class Lazy:
    """Rows of a file, which are read by slices alone, as those of h5py."""

    def __init__(self, numbers: Any) -> None:
        self._numbers = numbers
        self.shape = numbers.shape
        self.read: list[slice] = []

    def __getitem__(self, rows: Any) -> Any:
        assert isinstance(rows, slice)
        self.read.append(rows)
        return self._numbers[rows].copy()


def test_lazy_rows_are_read_by_their_replicas_alone(comm: Intracomm, num_replicas: int) -> None:
    lazy = Lazy(np.arange(11))
    with MultiWorker(replicas=num_replicas, comm=comm) as strategy:
        (part,) = strategy.experimental_distribute_dataset([lazy])
        assert of_all_replicas(comm, part) == [rows.tolist() for rows in expected_parts(np.arange(11), num_replicas)]
        read = [(rows.start, rows.stop) for rows in lazy.read]
        everyone = [bounds for of_rank in comm.allgather(read) for bounds in of_rank]
    assert len(everyone) == num_replicas  # each part once
    assert sorted(row for start, stop in everyone for row in range(start, stop)) == list(range(11))


@pytest.mark.ranks(min=2)
def test_unlike_global_batches_are_told(comm: Intracomm, strategy: MultiWorker) -> None:
    unlike = strategy.experimental_distribute_dataset([np.arange(4) + comm.rank])
    with raises_everywhere(comm, InvalidArgumentError, "checksum of the first batch: rank 0: .*same seed"):
        next(iter(unlike))
    shorter = [np.ones(4)] * (1 + (comm.rank == 0))
    steps = iter(strategy.experimental_distribute_dataset(shorter))
    next(steps)
    with raises_everywhere(comm, InvalidArgumentError, "global batch: rank 0: 4 rows; rank.*: none"):
        next(steps)
    assert list(steps) == []


@pytest.mark.ranks(1)
def test_one_rank_with_replicas_compares_no_checksum(strategy: MultiWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zlib, "crc32", lambda *arguments: pytest.fail("there is nobody to compare with"))
    assert len(list(strategy.experimental_distribute_dataset([np.ones(4)]))) == 1


def test_batch_that_cannot_be_cut_is_refused(comm: Intracomm, strategy: MultiWorker) -> None:
    steps = iter(strategy.experimental_distribute_dataset([np.ones(2), (np.ones(3), np.ones(2))]))
    next(steps)
    with raises_everywhere(comm, InvalidArgumentError, r"equally long on axis 0, got shapes \[\[3\], \[2\]\]"):
        next(steps)
    with pytest.raises(NotImplementedError, match="cut for the replicas anyway"):
        strategy.experimental_distribute_dataset([np.ones(2)], PER_REPLICA)
    with pytest.raises(TypeError, match="put batches in a list"):
        strategy.experimental_distribute_dataset(np.ones(2))


# --- A pipeline of each replica ---


@pytest.mark.core
def test_each_replica_has_a_pipeline_of_its_own(comm: Intracomm, strategy: MultiWorker, num_replicas: int) -> None:
    calls: list[InputContext] = []

    def make(context: InputContext) -> list[Any]:
        calls.append(context)
        return [np.full(2, 10 * context.input_pipeline_id + step) for step in range(3)]

    dataset = strategy.distribute_datasets_from_function(make, PER_REPLICA)
    everyone = [context for of_rank in comm.allgather(calls) for context in of_rank]
    assert everyone == [InputContext(num_replicas, replica_id, num_replicas) for replica_id in range(num_replicas)]
    for _ in range(2):
        steps = [of_all_replicas(comm, part) for part in dataset]
        assert steps == [[[10 * at + step] * 2 for at in range(num_replicas)] for step in range(3)]
    assert len(dataset) == 3


@pytest.mark.core
@pytest.mark.parametrize("longest", ["first", "last"])
def test_replica_that_has_run_out_gets_empty_batches(
    comm: Intracomm, strategy: MultiWorker, num_replicas: int, longest: str
) -> None:
    """The first or the last replica has no batch at all; its form is that of the others."""

    def num_batches(at: int) -> int:
        return at if longest == "last" else num_replicas - 1 - at

    def make(context: InputContext) -> list[Any]:
        batch = Pair(np.full((2, 3), context.input_pipeline_id, np.float16), 5)
        return [batch] * num_batches(context.input_pipeline_id)

    steps = list(strategy.distribute_datasets_from_function(make, PER_REPLICA))
    assert len(steps) == num_replicas - 1
    for number, part in enumerate(steps):
        assert isinstance(part, Pair)
        full = [number < num_batches(at) for at in range(num_replicas)]
        assert of_all_replicas(comm, part.x) == [[[at] * 3] * 2 if full[at] else [] for at in range(num_replicas)]
        assert of_all_replicas(comm, part.y) == [5 if full[at] else [] for at in range(num_replicas)]
        assert {(mine.dtype, mine.shape[1:]) for mine in part.x.values} == {(np.dtype(np.float16), (3,))}
        ids = [at for at in range(num_replicas) if full[at]]
        assert strategy.reduce("SUM", part.x, axis=0).tolist() == [2 * sum(ids)] * 3


def test_no_batch_of_any_replica_is_no_step(strategy: MultiWorker) -> None:
    assert list(strategy.distribute_datasets_from_function(lambda context: [], PER_REPLICA)) == []
    assert list(strategy.distribute_datasets_from_function(lambda context: [])) == []
    assert list(strategy.experimental_distribute_dataset([])) == []


@pytest.mark.core
def test_error_of_one_replicas_pipeline_reaches_all(comm: Intracomm, strategy: MultiWorker, num_replicas: int) -> None:
    class Failing:
        def __init__(self, context: InputContext) -> None:
            self.fails = context.input_pipeline_id == num_replicas - 1
            self.num_passes = 0

        def __iter__(self) -> Iterator[Any]:
            self.num_passes += 1
            yield np.ones(2)
            if self.fails and self.num_passes == 1:
                raise OSError("disk")
            yield np.zeros(2)

    dataset = strategy.distribute_datasets_from_function(Failing, PER_REPLICA)
    steps = iter(dataset)
    next(steps)
    with raises_everywhere(comm, OSError, "disk"):
        next(steps)
    assert list(steps) == []
    assert [of_all_replicas(comm, part) for part in dataset] == [[[1, 1]] * num_replicas, [[0, 0]] * num_replicas]


def test_function_that_fails_for_one_replica_fails_on_all(
    comm: Intracomm, strategy: MultiWorker, num_replicas: int
) -> None:
    def make(context: InputContext) -> list[Any]:
        if context.input_pipeline_id == num_replicas - 1:
            raise FileNotFoundError("train.h5")
        return [np.arange(2)]

    with raises_everywhere(comm, FileNotFoundError, r"train\.h5"):
        strategy.distribute_datasets_from_function(make, PER_REPLICA)
    with raises_everywhere(comm, TypeError, "put batches in a list"):
        strategy.distribute_datasets_from_function(lambda context: np.ones(2), PER_REPLICA)
    with raises_everywhere(comm, TypeError, "options must be an InputOptions"):
        strategy.distribute_datasets_from_function(lambda context: [], "fast")  # type: ignore[arg-type]
    assert len(list(strategy.distribute_datasets_from_function(lambda context: range(2), PER_REPLICA))) == 2


def test_replicas_of_a_rank_must_make_batches_of_one_form(comm: Intracomm) -> None:
    last = 2 * comm.size - 1

    def make(context: InputContext) -> list[Any]:
        return [(np.ones(2), np.ones(2)) if context.input_pipeline_id == last else {"x": np.ones(2)}]

    with MultiWorker(replicas=2 * comm.size, comm=comm) as strategy:
        steps = iter(strategy.distribute_datasets_from_function(make, PER_REPLICA))
        with raises_everywhere(
            comm, InvalidArgumentError, f"replica {last} passes .* and replica {last - 1} .*one form"
        ):
            next(steps)
        assert list(steps) == []


class Rows:
    """Rows in a form that cannot be sliced."""

    def __init__(self, count: int) -> None:
        self.shape = (count, 2)

    def __getitem__(self, key: Any) -> Any:
        raise TypeError("rows cannot be sliced")


def test_batches_need_not_be_sliced_where_all_replicas_have_as_many(comm: Intracomm) -> None:
    with MultiWorker(replicas=2 * comm.size, comm=comm) as strategy:

        def steps_of(count: Callable[[int], int]) -> Iterator[Any]:
            def make(context: InputContext) -> list[Any]:
                return [Rows(3)] * count(context.input_pipeline_id)

            return iter(strategy.distribute_datasets_from_function(make, PER_REPLICA))

        for rows in steps_of(lambda replica_id: 2):
            assert [part.shape for part in rows.values] == [(3, 2)] * 2
        steps = steps_of(lambda replica_id: 1 + (replica_id == 0))  # on rank 0 a replica runs out, on others all do
        next(steps)
        with raises_everywhere(comm, TypeError, "rows cannot be sliced"):
            next(steps)
        assert strategy.reduce("max", 1) == 1


# --- A pipeline of each rank ---


@pytest.mark.core
def test_replicas_take_turns_at_the_pipeline_of_their_rank(
    comm: Intracomm, strategy: MultiWorker, num_replicas: int
) -> None:
    num_here = parts_of(strategy).replicas.num_here
    calls: list[InputContext] = []

    def make(context: InputContext) -> Any:
        calls.append(context)
        return range(5)

    dataset = strategy.distribute_datasets_from_function(make)
    assert calls == [InputContext(comm.size, comm.rank, num_replicas)]
    own = -(-5 // num_here)
    for _ in range(2):
        steps = list(dataset)
        assert len(steps) == -(-5 // min(comm.allgather(num_here)))
        taken = [part for step in steps for part in step.values]
        assert taken[:5] == [0, 1, 2, 3, 4]
        assert all((part.shape, part.dtype) == ((0,), np.int64) for part in taken[5:])
    assert len(dataset) == own


def test_pipelines_of_ranks_are_warned_of_once(
    comm: Intracomm, strategy: MultiWorker, num_replicas: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "mpidist")
    list(strategy.distribute_datasets_from_function(lambda context: range(2), PER_REPLICA))
    list(strategy.experimental_distribute_dataset([np.ones(2)]))
    with MultiWorker(comm=comm) as other:
        list(other.distribute_datasets_from_function(lambda context: range(2)))
    assert caplog.messages == []
    dataset = strategy.distribute_datasets_from_function(lambda context: range(2))
    list(dataset)
    list(dataset)
    assert len(caplog.messages) == (comm.rank == 0)
    for text in caplog.messages:
        assert "depend on the number of ranks" in text
        assert f"each of the {num_replicas} replicas" in text
        assert "experimental_replication_mode='per_replica'" in text


# --- Steps ---


@pytest.mark.parametrize("mode", ["PER_WORKER", "PER_REPLICA"])
def test_lengths_and_forms_are_told(comm: Intracomm, strategy: MultiWorker, mode: str) -> None:
    batch = {"x": np.ones((4, 3), np.float32), "y": np.arange(4)}
    options = InputOptions(experimental_replication_mode=mode)
    own = strategy.distribute_datasets_from_function(lambda context: [batch] * 4, options)
    assert len(own) == (4 if mode == "PER_REPLICA" else -(-4 // parts_of(strategy).replicas.num_here))
    shared = strategy.experimental_distribute_dataset([batch] * 4)
    assert len(shared) == 4
    for dataset in (own, shared):
        spec = dataset.element_spec
        assert (spec["x"], spec["y"]) == (((None, 3), np.float32), ((None,), np.int64))
    endless = strategy.distribute_datasets_from_function(lambda context: Endless(), options)
    with pytest.raises(TypeError, match=r"Endless, has no len\(\)"):
        len(endless)
    assert endless.element_spec == ((None,), np.int64)

    class WithSpec(Endless):
        element_spec = "as told"

    assert strategy.distribute_datasets_from_function(lambda context: WithSpec(), options).element_spec == "as told"


class Endless:
    """Batches without an end."""

    def __iter__(self) -> Iterator[Any]:
        step = 0
        while True:
            yield np.full(2, step)
            step += 1


def test_get_next_tells_the_end(comm: Intracomm, strategy: MultiWorker, num_replicas: int) -> None:
    dataset = strategy.experimental_distribute_dataset([np.full(num_replicas, 5)])
    steps = iter(dataset)
    assert of_all_replicas(comm, steps.get_next()) == [[5]] * num_replicas
    with pytest.raises(OutOfRangeError, match="at its end"):
        steps.get_next()
    steps = iter(dataset)
    first, second = steps.get_next_as_optional(), steps.get_next_as_optional()
    assert (first.has_value(), second.has_value()) == (True, False)
    assert of_all_replicas(comm, first.get_value()) == [[5]] * num_replicas


def test_step_costs_one_round(
    comm: Intracomm, strategy: MultiWorker, num_replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = parts_of(strategy).group
    own = strategy.distribute_datasets_from_function(lambda context: [np.ones(2)] * 3, PER_REPLICA)
    for dataset in (strategy.experimental_distribute_dataset([np.ones(4)] * 3), own):
        steps = iter(dataset)
        before = group.agreement.sequence
        with monkeypatch.context() as patch:
            for name in ("all_reduce_or", "all_gather_object"):
                patch.setattr(type(group.agreement), name, lambda self, item: pytest.fail("a second message"))
            assert len(list(steps)) == 3
        assert group.agreement.sequence - before == (4 if comm.size > 1 else 0)


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mpidist.read_ahead"]


@pytest.mark.parametrize("kind", ["global", "PER_WORKER", "PER_REPLICA"])
def test_steps_are_read_ahead(comm: Intracomm, strategy: MultiWorker, num_replicas: int, kind: str) -> None:
    mode = "PER_REPLICA" if kind == "PER_REPLICA" else "PER_WORKER"
    options = InputOptions(experimental_replication_mode=mode, experimental_per_replica_buffer_size=3)
    ahead, now = (
        strategy.experimental_distribute_dataset([np.arange(9) + step for step in range(6)], given)
        if kind == "global"
        else strategy.distribute_datasets_from_function(lambda context: [np.arange(3) + at for at in range(6)], given)
        for given in (options, InputOptions(experimental_replication_mode=mode))
    )
    assert [of_all_replicas(comm, part) for part in ahead] == [of_all_replicas(comm, part) for part in now]
    for part in ahead:
        assert len(part.values) == parts_of(strategy).replicas.num_here
        break
    wait_until(lambda: not readers())
    assert len(list(ahead)) == len(list(now))


@pytest.mark.usefixtures("one_node")
@pytest.mark.parametrize("first_kind", ["GPU", "CPU"])
def test_parts_are_put_on_the_devices_of_their_replicas(
    comm: Intracomm, gpus: Any, monkeypatch: pytest.MonkeyPatch, first_kind: str
) -> None:
    """On GPUs that one process may not have: the test notes which one would be current at each copy."""
    require_gpus(2 * comm.size)
    current: list[int] = []
    copied: list[tuple[int, list[int]]] = []
    to_device = arrays.to_device

    def noting(array: Any) -> Any:
        copied.append((current[-1], array.tolist()))
        return to_device(array)

    monkeypatch.setattr(arrays, "use_gpu", current.append)
    monkeypatch.setattr(arrays, "to_device", noting)
    devices = [f"{first_kind if at % 2 == 0 else 'GPU'}:{at}" for at in range(2 * comm.size)]
    with MirroredStrategy(devices, comm=comm) as strategy:
        batches = [{"x": np.arange(8)}]
        (part,) = strategy.experimental_distribute_dataset(batches)
        mine = range(2 * comm.rank, 2 * comm.rank + 2)
        on_gpus = [at for at in mine if devices[at].startswith("GPU")]
        expected = expected_parts(np.arange(8), 2 * comm.size)
        assert copied == [(at, expected[at].tolist()) for at in on_gpus]
        kinds = [np.ndarray if at not in on_gpus else gpus.cupy.ndarray for at in mine]
        assert [type(rows) for rows in part["x"].values] == kinds
        assert first_kind == "CPU" or current[-1] == mine[0]  # a rank's first device is its current one
        copied.clear()
        list(strategy.experimental_distribute_dataset(batches, InputOptions(experimental_fetch_to_device=False)))
        assert copied == []


def test_a_numpy_program_stays_one_where_the_strategy_finds_gpus(comm: Intracomm, gpus: Any) -> None:
    """The example of the README: only a GPU that has been named, or an option, makes batches CuPy arrays."""
    batches = [np.ones((2 * comm.size, 3))]
    with MultiWorker(comm=comm) as strategy, strategy.scope():
        weights = Variable(np.zeros((3, 2)))
        for x in strategy.experimental_distribute_dataset(batches):
            strategy.run(lambda x: weights.assign_sub(x.T @ (x @ weights - 1)), args=(x,))
        assert isinstance(weights.local_value(), np.ndarray)
        options = InputOptions(experimental_fetch_to_device=True)
        (part,) = strategy.experimental_distribute_dataset(batches, options)
        assert isinstance(part, gpus.cupy.ndarray) == parts_of(strategy).devices_here[0].is_gpu


# --- Whole programs ---


@pytest.mark.core
@pytest.mark.parametrize("kind", ["global", "PER_REPLICA"])
def test_training_with_an_early_break_is_the_same_on_any_number_of_ranks(
    comm: Intracomm, strategy: MultiWorker, num_replicas: int, kind: str
) -> None:
    """Two epochs, the first of which ends at its third step; whole numbers, computed once more from R alone."""
    batches = [{"x": np.arange(11) * (step + 1), "y": np.arange(11) - step} for step in range(5)]

    def make(context: InputContext) -> list[Any]:
        num_pipelines = context.num_input_pipelines
        parts = [{name: expected_parts(batch[name], num_pipelines) for name in batch} for batch in batches]
        return [{name: cut[name][context.input_pipeline_id] for name in cut} for cut in parts]

    if kind == "global":
        dataset = strategy.experimental_distribute_dataset(batches)
    else:
        dataset = strategy.distribute_datasets_from_function(make, PER_REPLICA)

    def step(part: Any) -> Any:
        context = get_replica_context()
        own = (1 + context.replica_id_in_sync_group) * (part["x"] * part["y"]).sum()
        return context.all_reduce("sum", own)

    totals = []
    for epoch in range(2):
        for number, part in enumerate(dataset):
            (total, *others) = strategy.run(step, args=(part,)).values
            assert all(other == total for other in others)
            totals.append(int(total))
            if epoch == 0 and number == 2:
                break
    expected = []
    for batch in batches:
        parts = expected_parts(batch["x"] * batch["y"], num_replicas)
        expected.append(sum((1 + at) * int(rows.sum()) for at, rows in enumerate(parts)))
    assert totals == expected[:3] + expected


@pytest.mark.ranks(min=2)
def test_rank_that_breaks_out_of_an_epoch_is_told_on_all_ranks(comm: Intracomm, strategy: MultiWorker) -> None:
    train = strategy.experimental_distribute_dataset([np.full(9, step) for step in range(3)])

    def program() -> None:
        for epoch in range(2):
            for part in train:
                strategy.run(lambda rows: get_replica_context().all_reduce("sum", rows.sum()), args=(part,))
                if epoch == 0 and comm.rank == comm.size - 1:
                    break

    with raises_everywhere(comm, InvalidArgumentError, rf"next of data set 0 .*rank {comm.size - 1}: begins"):
        program()
    assert len(list(train)) == 3
