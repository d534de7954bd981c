"""Data sets: every replica its part of each global batch, or batches of its own pipeline, and all the same steps."""

import logging
import pickle
import zlib
from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.everywhere import raises_everywhere
from support.replicas import ids_here, local, shared_ranks

import mpidist
from mpidist import InputContext, InputOptions, MirroredStrategy
from mpidist import MultiWorkerMirroredStrategy as MultiWorker
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError, OutOfRangeError

pytestmark = pytest.mark.ranks(1, 3)

PER_REPLICA = InputOptions(experimental_replication_mode="PER_REPLICA")


class Pair(NamedTuple):
    x: Any
    y: Any


@pytest.fixture
def strategy(comm, replicas):
    with MultiWorker(replicas=replicas, comm=comm) as made:
        yield made


@pytest.fixture
def total(strategy):
    """Give the number of replicas."""
    return strategy.num_replicas_in_sync


def of_all(comm, strategy, value):
    """List the components of all replicas, in the order of replicas. Collective."""
    return [part for of_rank in comm.allgather(local(strategy, value)) for part in of_rank]


# --- Global batches ---


@pytest.mark.core
@pytest.mark.ranks(max=3)
def test_parts_follow_from_the_number_of_replicas_alone(comm, strategy, total):
    """Every row once, in the order of replicas, whatever the length of a batch."""
    whole = [np.arange(2 * length, dtype=np.float32).reshape(length, 2) for length in (10, 0, 1, 17, total)]
    steps = list(strategy.experimental_distribute_dataset(whole))
    assert len(steps) == len(whole)
    for batch, part in zip(whole, steps, strict=True):
        assert of_all(comm, strategy, part) == [rows.tolist() for rows in np.array_split(batch, total)]
        for mine in strategy.experimental_local_results(part):
            assert (mine.dtype, mine.shape[1:]) == (np.float32, (2,))
            assert not len(mine) or np.shares_memory(mine, batch)


@pytest.mark.ranks(3)
@pytest.mark.core
def test_devices_that_are_more_than_ranks_are_replicas(comm):
    with MirroredStrategy([f"CPU:{at}" for at in range(4)], comm=comm) as strategy:
        (part,) = strategy.experimental_distribute_dataset([np.arange(10)])
        assert of_all(comm, strategy, part) == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
        assert comm.allgather(len(part.values)) == [2, 1, 1]
        assert comm.rank or repr(part) == "PerReplica:{0: array([0, 1, 2]), 1: array([3, 4, 5])}"
        assert strategy.gather(part, axis=0).tolist() == list(range(10))


def test_nest_is_cut_leaf_by_leaf(comm, strategy, total):
    batch = {"pair": Pair(np.arange(10).reshape(5, 2), [np.arange(5, dtype=np.int8)]), "names": np.array(list("abcde"))}
    (part,) = strategy.experimental_distribute_dataset([batch])
    assert list(part) == ["pair", "names"]
    assert isinstance(part["pair"], Pair)
    for leaf, whole in ((part["pair"].x, batch["pair"].x), (part["pair"].y[0], batch["pair"].y[0])):
        assert of_all(comm, strategy, leaf) == [rows.tolist() for rows in np.array_split(whole, total)]
        assert {mine.dtype for mine in strategy.experimental_local_results(leaf)} == {whole.dtype}
    names = of_all(comm, strategy, part["names"])
    assert names == [part.tolist() for part in np.array_split(batch["names"], total)]


class Lazy:
    """Rows of a file, which are read by slices alone, as those of h5py."""

    def __init__(self, numbers):
        self._numbers = numbers
        self.shape = numbers.shape
        self.read: list[tuple[int, int]] = []

    def __getitem__(self, rows):
        assert isinstance(rows, slice)
        self.read.append((rows.start, rows.stop))
        return self._numbers[rows].copy()


def test_lazy_rows_are_read_by_their_replicas_alone(comm, strategy, total):
    lazy = Lazy(np.arange(11))
    (part,) = strategy.experimental_distribute_dataset([lazy])
    assert of_all(comm, strategy, part) == [rows.tolist() for rows in np.array_split(np.arange(11), total)]
    everyone = [bounds for of_rank in comm.allgather(lazy.read) for bounds in of_rank]
    assert len(everyone) == total  # each part once
    assert sorted(row for start, stop in everyone for row in range(start, stop)) == list(range(11))


@pytest.mark.ranks(3)
def test_global_batches_unlike_on_ranks_raise_everywhere(comm, strategy):
    unlike = strategy.experimental_distribute_dataset([np.arange(4) + comm.rank])
    with raises_everywhere(comm, InvalidArgumentError, "checksum of the first batch: rank 0: .*same seed"):
        next(iter(unlike))
    longer = strategy.experimental_distribute_dataset([np.ones(4 + (comm.rank == 1))])
    advice = "(?s:(?!seed).)*files, rows and batch size$"  # and nothing of seeds
    with raises_everywhere(comm, InvalidArgumentError, f"global batch: ranks 0, 2: 4 rows; rank 1: 5 rows{advice}"):
        next(iter(longer))
    steps = iter(strategy.experimental_distribute_dataset([np.ones(4)] * (1 + (comm.rank > 0))))
    next(steps)
    with raises_everywhere(comm, InvalidArgumentError, f"global batch: rank 0: none; rank.*: 4 rows{advice}"):
        next(steps)
    assert list(steps) == []


def test_batches_that_cannot_be_cut_are_refused(comm, strategy):
    for batch, text in (
        ((np.ones(3), np.ones(2)), r"equally long on axis 0, got array \[0\]: \[3\], array \[1\]: \[2\]; if"),
        ([np.ones(2), 1.0], "equally long"),
        (np.float32(1), "put batches in a list"),
        ({"x": [1, 2], "y": [0.5, 1.5]}, r"array \['x'\]\[0\]: int, .*; make an array of each list of numbers"),
        ("text", "equally long"),
        ({}, "equally long"),
    ):
        steps = iter(strategy.experimental_distribute_dataset([np.ones(2), batch]))
        next(steps)
        with raises_everywhere(comm, InvalidArgumentError, text):
            next(steps)
    with pytest.raises(NotImplementedError, match="PER_REPLICA"):
        strategy.experimental_distribute_dataset([np.ones(2)], PER_REPLICA)
    for batch in (np.arange(6).reshape(3, 2), (np.ones((4, 2)), np.arange(4)), {"x": np.arange(4)}):
        with raises_everywhere(comm, TypeError, r"put batches in a list: \[batch, \.\.\.\]"):
            strategy.experimental_distribute_dataset(batch)
        with raises_everywhere(comm, TypeError, "put batches in a list"):
            strategy.distribute_datasets_from_function(lambda context, batch=batch: batch, PER_REPLICA)
        (part,) = strategy.experimental_distribute_dataset([batch])
        assert type(part) is type(batch) or isinstance(batch, np.ndarray)


# --- A pipeline of each replica ---


@pytest.mark.core
def test_per_replica_mode_makes_a_pipeline_for_replicas(comm, strategy, total):
    calls = []

    def make(context):
        calls.append(context)
        return [np.full(2, 10 * context.input_pipeline_id + step) for step in range(3)]

    dataset = strategy.distribute_datasets_from_function(make, PER_REPLICA)
    everyone = [context for of_rank in comm.allgather(calls) for context in of_rank]
    assert everyone == [InputContext(total, replica_id, total) for replica_id in range(total)]
    for _ in range(2):
        steps = [of_all(comm, strategy, part) for part in dataset]
        assert steps == [[[10 * at + step] * 2 for at in range(total)] for step in range(3)]
        next(iter(dataset))  # left early: the next pass is whole
    assert len(dataset) == 3


@pytest.mark.core
@pytest.mark.parametrize("longest", ["first", "last"])
def test_replica_that_ran_out_gets_empty_ones(comm, strategy, total, longest):
    """The first or the last replica has no batch at all; its form is that of the others."""

    def num_batches(at):
        return at if longest == "last" else total - 1 - at

    def make(context):
        batch = Pair(np.full((2, 3), context.input_pipeline_id, np.float16), 5)
        return [batch] * num_batches(context.input_pipeline_id)

    steps = list(strategy.distribute_datasets_from_function(make, PER_REPLICA))
    assert len(steps) == total - 1
    for number, part in enumerate(steps):
        assert isinstance(part, Pair)
        full = [number < num_batches(at) for at in range(total)]
        assert of_all(comm, strategy, part.x) == [[[at] * 3] * 2 if full[at] else [] for at in range(total)]
        assert of_all(comm, strategy, part.y) == [5 if full[at] else [] for at in range(total)]
        for mine in strategy.experimental_local_results(part.x):
            assert (mine.dtype, mine.shape[1:]) == (np.float16, (3,))
        ids = [at for at in range(total) if full[at]]
        assert strategy.reduce("SUM", part.x, axis=0).tolist() == [2 * sum(ids)] * 3


def test_dataset_without_batches_has_no_step(strategy):
    assert list(strategy.distribute_datasets_from_function(lambda context: [], PER_REPLICA)) == []
    assert list(strategy.distribute_datasets_from_function(lambda context: [])) == []
    assert list(strategy.experimental_distribute_dataset([])) == []


@pytest.mark.core
def test_error_of_one_replicas_pipeline_reaches_all(comm, strategy, total):
    class Failing:
        def __init__(self, context):
            self.fails = context.input_pipeline_id == total - 1
            self.num_passes = 0

        def __iter__(self):
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
    assert [of_all(comm, strategy, part) for part in dataset] == [[[1, 1]] * total, [[0, 0]] * total]


def test_function_that_fails_for_one_replica_fails_on_all(comm, strategy, total):
    """And the strategy is as good as before, also for the next data set."""

    def make(context):
        if context.input_pipeline_id == total - 1:
            raise FileNotFoundError("train.h5")
        return [np.arange(2)]

    with raises_everywhere(comm, FileNotFoundError, r"train\.h5"):
        strategy.distribute_datasets_from_function(make, PER_REPLICA)
    with raises_everywhere(comm, TypeError, "options must be an InputOptions"):
        strategy.distribute_datasets_from_function(lambda context: [], "fast")
    numbers = strategy.distribute_datasets_from_function(lambda context: range(2), PER_REPLICA)
    assert [of_all(comm, strategy, part) for part in numbers] == [[0] * total, [1] * total]


class Rows:
    """Rows in a form that cannot be sliced, as that of some sparse matrices."""

    def __init__(self, count):
        self.shape = (count, 2)

    def __getitem__(self, key):
        raise TypeError("rows cannot be sliced")


@pytest.mark.ranks(3)
def test_batches_need_not_be_sliced_where_all_replicas_have_as_many(comm, strategy):
    """Only a replica that runs out gets an empty one of others; then it is everybody's error."""

    def steps_of(count):
        def make(context):
            return [Rows(3)] * count(context.input_pipeline_id)

        return iter(strategy.distribute_datasets_from_function(make, PER_REPLICA))

    for rows in steps_of(lambda replica_id: 2):
        assert {part.shape for part in strategy.experimental_local_results(rows)} == {(3, 2)}
    steps = steps_of(lambda replica_id: 1 + (replica_id == 0))  # on rank 0 a replica runs out, on others all do
    next(steps)
    with raises_everywhere(comm, TypeError, "rows cannot be sliced"):
        next(steps)
    assert strategy.reduce("max", 1) == 1


@pytest.mark.ranks(3)
def test_batches_that_cannot_be_pickled_are_an_error_only_where_a_rank_has_none(comm, strategy):
    num_here = len(ids_here(strategy))
    make_batch = namedtuple("make_batch", ["rows"])  # pickle does not find the class

    def steps_of(least):
        def make(context):
            return [make_batch(np.ones(2))] * (num_here * (least + context.input_pipeline_id))

        return iter(strategy.distribute_datasets_from_function(make))

    steps = [strategy.experimental_local_results(part.rows) for part in steps_of(1)]
    assert [len(rows) for parts in steps for rows in parts] == [
        2 * (number <= comm.rank) for number in range(3) for _ in range(num_here)
    ]
    with raises_everywhere(comm, pickle.PicklingError, "make_batch"):
        next(steps_of(0))
    assert strategy.reduce("max", 1) == 1


# --- A pipeline of each rank ---


@pytest.mark.core
def test_replicas_take_turns_at_the_pipeline_of_their_rank(comm, strategy, total):
    num_here = len(ids_here(strategy))
    calls = []

    def make(context):
        calls.append(context)
        return range(5)

    dataset = strategy.distribute_datasets_from_function(make)
    assert calls == [InputContext(comm.size, comm.rank, total)]
    for _ in range(2):
        steps = list(dataset)
        assert len(steps) == -(-5 // min(comm.allgather(num_here)))
        taken = [part for step in steps for part in strategy.experimental_local_results(step)]
        assert taken[:5] == [0, 1, 2, 3, 4]
        assert all((part.shape, part.dtype) == ((0,), np.int64) for part in taken[5:])
    assert len(dataset) == -(-5 // num_here)


# --- Steps ---


class Endless:
    def __iter__(self):
        while True:
            yield np.full(2, 3)


@pytest.mark.parametrize("mode", ["PER_WORKER", "PER_REPLICA"])
def test_dataset_has_length_and_element_spec(strategy, mode):
    batch = {"x": np.ones((4, 3), np.float32), "y": np.arange(4)}
    options = InputOptions(experimental_replication_mode=mode)
    own = strategy.distribute_datasets_from_function(lambda context: [batch] * 4, options)
    assert len(own) == (4 if mode == "PER_REPLICA" else -(-4 // len(ids_here(strategy))))
    shared = strategy.experimental_distribute_dataset([batch] * 4)
    assert len(shared) == 4
    for dataset in (own, shared):
        spec = dataset.element_spec
        assert (spec["x"], spec["y"]) == (((None, 3), np.float32), ((None,), np.int64))
    endless = strategy.distribute_datasets_from_function(lambda context: Endless(), options)
    assert endless
    with pytest.raises(TypeError, match=r"Endless, has no len\(\)"):
        len(endless)
    assert endless.element_spec == ((None,), np.int64)
    with pytest.raises(ValueError, match="no element_spec"):
        _ = strategy.experimental_distribute_dataset([]).element_spec

    class WithSpec(Endless):
        element_spec = "as told"

    assert strategy.distribute_datasets_from_function(lambda context: WithSpec(), options).element_spec == "as told"


def test_get_next_raises_at_the_end(comm, strategy, total):
    dataset = strategy.experimental_distribute_dataset([np.full(total, 5)])
    steps = iter(dataset)
    assert of_all(comm, strategy, steps.get_next()) == [[5]] * total
    with pytest.raises(OutOfRangeError, match="at its end"):
        steps.get_next()
    if comm.rank == 0:  # what is over stays over, and nobody is asked
        with pytest.raises(StopIteration):
            next(steps)
    steps = iter(dataset)
    first, second = steps.get_next_as_optional(), steps.get_next_as_optional()
    assert (first.has_value(), second.has_value()) == (True, False)
    assert of_all(comm, strategy, first.get_value()) == [[5]] * total
    with pytest.raises(OutOfRangeError, match="has_value"):
        second.get_value()


@pytest.mark.ranks(3)
def test_step_costs_one_round(strategy, monkeypatch):
    group = parts_of(strategy).group
    own = strategy.distribute_datasets_from_function(lambda context: [np.ones(2)] * 3, PER_REPLICA)
    for dataset in (strategy.experimental_distribute_dataset([np.ones(4)] * 3), own):
        steps = iter(dataset)
        before = group.agreement.sequence
        with monkeypatch.context() as patch:
            for name in ("all_reduce_or", "all_gather_object"):
                patch.setattr(type(group.agreement), name, lambda self, item: pytest.fail("a second message"))
            assert len(list(steps)) == 3
        assert group.agreement.sequence - before == 4


def test_steps_are_run_on_the_parts(strategy):
    dataset = strategy.experimental_distribute_dataset([np.array([5, 6]), np.array([7, 8])])
    squares = [strategy.gather(strategy.run(lambda x: x * x, (part,)), axis=0).tolist() for part in dataset]
    assert squares == [[25, 36], [49, 64]]
    nests = strategy.run(lambda x: [{"a": x - 1, "b": x + 1}], (next(iter(dataset)),))
    (gathered,) = strategy.gather(nests, axis=0)
    assert (gathered["a"].tolist(), gathered["b"].tolist()) == ([4, 5], [6, 7])
    product = 2.0
    for part in dataset:  # an empty part weighs nothing
        product *= strategy.reduce("MEAN", part, axis=0)
    assert product == pytest.approx(82.5)


@pytest.mark.ranks(3)
@pytest.mark.core
def test_early_stop_of_one_rank_raises_everywhere(comm, strategy):
    """A whole program: an early stop by each rank's own loss."""
    train = strategy.experimental_distribute_dataset([np.full(9, step) for step in range(5)])

    def program():
        for epoch in range(2):
            for number, part in enumerate(train):
                strategy.run(lambda rows: mpidist.get_replica_context().all_reduce("sum", rows.sum()), args=(part,))
                if epoch == 0 and comm.rank == 2 and number == 2:
                    break

    text = r"next of data set 0 .*pass: ranks 0-1: that began with call 2; rank 2: begins.*step: .*: 3; .*reduced"
    with raises_everywhere(comm, InvalidArgumentError, text):
        program()
    assert strategy.reduce("max", 1) == 1
    assert len(list(train)) == 5  # a new pass is the same on all ranks


# --- Several replicas of a rank ---


@pytest.mark.no_mpi
def test_one_rank_with_replicas_compares_no_checksum(monkeypatch):
    monkeypatch.setattr(zlib, "crc32", lambda *arguments: pytest.fail("there is nobody to compare with"))
    with MirroredStrategy(replicas=3) as strategy:
        assert len(list(strategy.experimental_distribute_dataset([np.ones(4)]))) == 1


def test_replicas_of_a_rank_must_make_batches_of_one_form(comm):
    last = 2 * comm.size - 1

    def make(context):
        return [(np.ones(2), np.ones(2)) if context.input_pipeline_id == last else {"x": np.ones(2)}]

    with MultiWorker(replicas=2 * comm.size, comm=comm) as strategy:
        steps = iter(strategy.distribute_datasets_from_function(make, PER_REPLICA))
        with raises_everywhere(
            comm, InvalidArgumentError, f"replica {last} passes .* and replica {last - 1} .*one form"
        ):
            next(steps)
        assert list(steps) == []


@pytest.mark.ranks(3)
@shared_ranks
def test_pipelines_of_ranks_are_warned_of_once(comm, strategy, caplog):
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
        assert "each of the 7 replicas" in text
        assert "experimental_replication_mode='per_replica'" in text


@shared_ranks
@pytest.mark.parametrize("kind", ["global", "PER_WORKER", "PER_REPLICA"])
def test_steps_are_read_ahead(comm, strategy, kind):
    mode = "PER_REPLICA" if kind == "PER_REPLICA" else "PER_WORKER"
    options = InputOptions(experimental_replication_mode=mode, experimental_per_replica_buffer_size=3)
    ahead, now = (
        strategy.experimental_distribute_dataset([np.arange(9) + step for step in range(6)], given)
        if kind == "global"
        else strategy.distribute_datasets_from_function(lambda context: [np.arange(3) + at for at in range(6)], given)
        for given in (options, InputOptions(experimental_replication_mode=mode))
    )
    assert [of_all(comm, strategy, part) for part in ahead] == [of_all(comm, strategy, part) for part in now]
    for part in ahead:
        assert len(part.values) == len(ids_here(strategy))
        break
    assert len(list(ahead)) == len(list(now))
