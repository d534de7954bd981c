"""Steps through data sets: twice, at once, into an error, ahead of the program, and not the same on all ranks."""

import threading
import time

import numpy as np
import pytest
from mpi4py import MPI
from support.everywhere import raises_everywhere

from mpidist import Batches, InputContext, InputOptions, InputReplicationMode
from mpidist import MultiWorkerMirroredStrategy as MultiWorker
from mpidist.errors import InvalidArgumentError, PeerFailedError

pytestmark = pytest.mark.ranks(1, 3)

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size


BATCHES = [np.arange(4), np.arange(4, 8), np.arange(8, 10)]


def lists(dataset):
    return [batch.tolist() for batch in dataset]


class Shuffled:
    """Batches of 10 rows of 40, in another order each time, which a seed decides."""

    def __init__(self, seed):
        self._rng = np.random.default_rng(seed)

    def __iter__(self):
        yield from self._rng.permutation(40).reshape(4, 10)


def test_iterating_again_starts_anew(strategy):
    dataset = strategy.experimental_distribute_dataset(BATCHES)
    assert lists(dataset) == lists(dataset)
    shuffled = strategy.experimental_distribute_dataset(Shuffled(5))
    first, second = lists(shuffled), lists(shuffled)
    assert first != second
    for steps in (first, second):
        everything = [item for its in WORLD.allgather(steps) for part in its for item in part]
        assert sorted(everything) == list(range(40))


def test_iterators_do_not_disturb_each_other(strategy):
    dataset = strategy.experimental_distribute_dataset([np.full(SIZE, step) for step in range(3)])
    one, two = iter(dataset), iter(dataset)
    seen = [next(one), next(two), next(one), next(two), next(one), next(two)]
    assert [part.tolist() for part in seen] == [[0], [0], [1], [1], [2], [2]]
    assert iter(one) is one
    assert [list(one), list(two)] == [[], []]


def test_loop_may_end_early(strategy):
    def endless():
        while True:
            yield np.ones(SIZE)

    class Endless:
        __iter__ = staticmethod(endless)

    for step, part in enumerate(strategy.experimental_distribute_dataset(Endless())):
        assert part.shape == (1,)
        if step == 2:
            break
    assert strategy.reduce("SUM", 1) == SIZE


def test_next_in_run_is_refused(strategy):
    dataset = strategy.experimental_distribute_dataset([np.ones(2)])
    steps = iter(dataset)
    with pytest.raises(ValueError, match="should be called from outside"):
        strategy.run(lambda: next(steps))
    with pytest.raises(ValueError, match="should be called from outside"):
        strategy.run(lambda: list(dataset))
    assert len(list(steps)) == 1


def test_data_set_must_be_iterable_more_than_once(strategy):
    for once in ((batch for batch in BATCHES), iter(BATCHES), zip(BATCHES, BATCHES, strict=True)):
        with pytest.raises(TypeError, match="used up after one pass"):
            strategy.experimental_distribute_dataset(once)
        with pytest.raises(TypeError, match="used up after one pass"):
            strategy.distribute_datasets_from_function(lambda context, once=once: once)
    for wrong in (3, None, object()):
        with pytest.raises(TypeError, match="iterable of batches"):
            strategy.experimental_distribute_dataset(wrong)
    with pytest.raises(TypeError, match="iterable of batches"):
        strategy.distribute_datasets_from_function(lambda context: None)
    for wrong in ("fast", 3):
        with pytest.raises(TypeError, match="InputOptions"):
            strategy.experimental_distribute_dataset([np.ones(2)], wrong)
    for policy in ("AUTO", "DATA"):
        with pytest.raises(TypeError, match=r"from_function takes a function that gets an InputContext .*, got list"):
            strategy.distribute_datasets_from_function(
                [np.ones(2)],
                InputOptions(auto_shard_policy=policy),
            )


class BadRecordError(Exception):
    """One that does not survive pickling, as many do not."""

    def __init__(self, path, line):
        super().__init__(f"{path}:{line} is broken")


FAILURES = [ValueError("no number"), OSError("no such file"), BadRecordError("data.csv", 7)]


@pytest.mark.core
@pytest.mark.parametrize("kind", ["global", "own"])
def test_error_of_one_ranks_data_set_reaches_all(strategy, kind):
    for error in FAILURES:

        class Failing:
            def __iter__(self, error=error):
                yield np.ones(2 * SIZE)
                if RANK == SIZE - 1:
                    raise error
                yield np.ones(2 * SIZE)

        if kind == "global":
            steps = iter(strategy.experimental_distribute_dataset(Failing()))
        else:
            steps = iter(strategy.distribute_datasets_from_function(lambda context, made=Failing: made()))
        next(steps)
        # An exception that cannot be pickled keeps its text alone on the other ranks.
        raised = PeerFailedError if isinstance(error, BadRecordError) and RANK != SIZE - 1 else type(error)
        with pytest.raises(raised, match=str(error)) as caught:
            next(steps)
        if RANK != SIZE - 1:
            assert f"on rank {SIZE - 1}" in str(caught.value.__cause__)
            assert "in __iter__" in str(caught.value.__cause__)
        assert list(steps) == []
        assert strategy.reduce("SUM", 1) == SIZE


def test_data_set_that_cannot_be_opened_on_one_rank_fails_on_all(strategy):
    class Missing:
        def __iter__(self):
            if RANK == 0:
                raise FileNotFoundError("data.csv")
            return iter(BATCHES)

    steps = iter(strategy.experimental_distribute_dataset(Missing()))
    with raises_everywhere(WORLD, FileNotFoundError, r"data\.csv"):
        next(steps)


@pytest.mark.ranks(3)
def test_next_on_one_rank_and_reduce_on_others_is_an_error_on_all(strategy):
    steps = iter(strategy.experimental_distribute_dataset(BATCHES))
    with raises_everywhere(WORLD, InvalidArgumentError, "next of data set 0"):
        next(steps) if RANK == 0 else strategy.reduce("SUM", 1.0)


@pytest.mark.no_mpi
def test_input_context_has_pipelines_and_replicas():
    context = InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=6)
    assert (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync) == (2, 1, 6)
    assert [context.get_per_replica_batch_size(size) for size in (12, 6, 0)] == [2, 1, 0]
    with pytest.raises(ValueError, match="13 is not divisible by the 6 replicas"):
        context.get_per_replica_batch_size(13)
    assert str(InputContext()) == "InputContext(input pipeline id 0, total: 1)"
    with pytest.raises(AttributeError):
        context.input_pipeline_id = 0


def test_options_change_nothing_on_a_cpu(strategy):
    for fetch in (True, False):
        options = InputOptions(experimental_fetch_to_device=fetch)
        assert lists(strategy.experimental_distribute_dataset([np.arange(SIZE)], options)) == [[RANK]]
    options = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
    assert lists(strategy.distribute_datasets_from_function(lambda context: [np.arange(2)], options)) == [[0, 1]]
    with pytest.raises(NotImplementedError, match="PER_REPLICA"):
        strategy.experimental_distribute_dataset([np.arange(SIZE)], options)


@pytest.mark.ranks(3)
def test_iteration_of_unlike_data_sets_raises_everywhere(comm, strategy):
    train, validate = (strategy.experimental_distribute_dataset([np.arange(4)]) for _ in range(2))
    steps = iter(validate if comm.rank == 0 else train)
    with raises_everywhere(comm, InvalidArgumentError, "rank 0: next of data set 1; rank.* next of data set 0"):
        next(steps)
    assert list(steps) == []


@pytest.mark.ranks(3)
def test_iteration_of_unlike_batch_shapes_raises_everywhere(comm, strategy):
    batches = [np.zeros((4, 3), "f4" if comm.rank else "f8"), (np.zeros(4), np.zeros(4))[: 1 + bool(comm.rank)]]
    texts = [r"rank 0: float64\[3\]; rank.*: float32\[3\]", r"rank 0: float64\[\]; rank.*: float64\[\], float64\[\]"]
    for batch, text in zip(batches, texts, strict=True):
        unlike = strategy.experimental_distribute_dataset([batch])
        advice = "(?s:(?!seed).)*the same dtypes and shapes"  # and nothing of seeds
        with raises_everywhere(comm, InvalidArgumentError, f"form of the first batch: {text}{advice}"):
            next(iter(unlike))


@pytest.mark.ranks(3)
def test_iteration_of_unlike_nests_of_batches_raises_everywhere(comm, strategy):
    rows = np.arange(4)
    forms = {r"\{'a': \*\}; .*: \{'b': \*\}": ({"a": rows}, {"b": rows}), r"\[\*\]; .*: \(\*\)": ([rows], (rows,))}
    for text, batches in forms.items():
        unlike = strategy.experimental_distribute_dataset([batches[comm.rank > 0]])
        with raises_everywhere(
            comm, InvalidArgumentError, f"nest of the first batch: rank 0: {text}.*in nests of one form"
        ):
            next(iter(unlike))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", ["nested", "long double"])
def test_padding_is_not_compared(comm, kind, strategy):
    """Ranks have the same numbers, and other bytes between them, as in memory of `np.empty`."""
    pair = np.dtype([("kind", "i1"), ("weight", "f8")], align=True)
    nested = np.dtype([("inner", pair, 2), ("kind", "i1")], align=True)
    dtype = nested if kind == "nested" else np.dtype(np.longdouble)
    memory = np.full(4 * comm.size * dtype.itemsize, comm.rank, np.uint8)
    batch = memory.view(dtype)
    if dtype.names is None:
        memory.reshape(-1, dtype.itemsize)[:, :10] = np.full(1, 2.5, dtype).view(np.uint8)[:10]
    for numbers in [batch, batch["inner"]] if kind == "nested" else [batch] * (dtype.names is not None):
        for name in {"kind", "weight"} & set(numbers.dtype.names):
            numbers[name] = np.arange(numbers.size).reshape(numbers.shape) % 100
    assert [len(part) for part in strategy.experimental_distribute_dataset([batch])] == [4]
    (batch if dtype.names is None else batch["kind"])[-1] = comm.rank
    with raises_everywhere(comm, InvalidArgumentError, "checksum of the first batch"):
        list(strategy.experimental_distribute_dataset([batch]))


@pytest.mark.ranks(3)
def test_iteration_of_overlapping_passes_raises_where_ranks_differ(comm, strategy):
    """An iterator that one rank alone makes, and never asks, is no pass."""
    dataset = strategy.experimental_distribute_dataset(Shuffled(1))
    if comm.rank == 0:
        iter(dataset)
    one, two = iter(dataset), iter(dataset)
    for steps in (two, one) * 4:
        next(steps)
    assert (list(one), list(two)) == ([], [])
    one, two = iter(dataset), iter(dataset)
    next(one)
    next(two)
    with raises_everywhere(comm, InvalidArgumentError, "pass: rank 0: that began with call .*; rank"):
        next(one if comm.rank == 0 else two)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("field", ["epoch", "steps"])
def test_load_state_dict_of_unlike_positions_raises_everywhere(comm, strategy, field):
    dataset = strategy.distribute_datasets_from_function(lambda _: [np.ones(4)] * 3)
    dataset.load_state_dict({"epoch": 0, "steps": 0, "pipelines": 3, "replicas": 3, field: int(comm.rank == 1)})
    epoch, steps = (1, 0) if field == "epoch" else (0, 1)
    text = f"pass: rank.* begins at epoch 0, steps 0; rank 1: begins at epoch {epoch}, steps {steps}.*same position"
    with raises_everywhere(comm, InvalidArgumentError, text):
        list(dataset)


@pytest.mark.ranks(3)
def test_without_checks_numbers_in_batches_are_not_compared(comm, monkeypatch):
    """But not the steps: they need the round to end together."""
    monkeypatch.setenv("MPIDIST_CHECK", "0")
    with MultiWorker(comm=comm) as strategy:
        assert len(list(strategy.experimental_distribute_dataset(Shuffled(comm.rank)))) == 4
        steps = iter(strategy.experimental_distribute_dataset([np.ones(4)] * (2 - (comm.rank == 0))))
        next(steps)
        with raises_everywhere(comm, InvalidArgumentError, "global batch: rank 0: none; rank.*: 4 rows"):
            next(steps)


@pytest.mark.no_mpi
def test_wrong_options_are_refused():
    assert InputOptions() == InputOptions(None, "per_worker", False, 1)
    placed = InputOptions(experimental_place_dataset_on_device=True, experimental_replication_mode="PER_REPLICA")
    assert not placed.experimental_fetch_to_device
    per_replica = InputReplicationMode.PER_REPLICA
    for error, wrong in (
        (ValueError, {"experimental_replication_mode": "bogus"}),
        (ValueError, {"experimental_place_dataset_on_device": True}),
        (
            ValueError,
            {
                "experimental_place_dataset_on_device": True,
                "experimental_replication_mode": per_replica,
                "experimental_fetch_to_device": True,
            },
        ),
        (ValueError, {"experimental_per_replica_buffer_size": 0}),
        (TypeError, {"experimental_per_replica_buffer_size": 1.5}),
        (TypeError, {"experimental_fetch_to_device": "yes"}),
        (TypeError, {"experimental_fetch_to_device": 0}),
        (TypeError, {"experimental_place_dataset_on_device": None}),
    ):
        with pytest.raises(error):
            InputOptions(**wrong)


class Counted:
    """Batches that count how many of them were read, and fail after the last if they are told to."""

    def __init__(self, number, error=None):
        self.number, self.error, self.num_read = number, error, 0

    def __iter__(self):
        for step in range(self.number):
            self.num_read += 1
            yield np.full(4, step)
        if self.error is not None:
            raise self.error


def wait_until(condition):
    while not condition():
        time.sleep(0.01)


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "mpidist.read_ahead"]


def test_batches_are_read_ahead_as_far_as_the_buffer_goes(comm, strategy):
    source = Counted(9)
    options = InputOptions(experimental_per_replica_buffer_size=3)
    dataset = strategy.experimental_distribute_dataset(source, options)
    steps = iter(dataset)
    next(steps)
    wait_until(lambda: source.num_read >= 3)  # the one in hand, and two ready
    time.sleep(0.05)
    assert source.num_read == 3
    del steps  # an early break
    wait_until(lambda: not readers())
    assert [len(part) for part in dataset] == [len(range(comm.rank, 4, comm.size))] * 9


def test_readers_of_passes_that_were_left_end(strategy):
    """Also those that wait for a place, and with another pass begun meanwhile."""
    options = InputOptions(experimental_per_replica_buffer_size=2)
    dataset = strategy.experimental_distribute_dataset(Counted(1000), options)
    for _ in range(20):
        for at, _part in enumerate(dataset):
            if at == 3:
                break
    kept = iter(dataset)
    assert [next(kept)[:0].size, next(iter(dataset))[:0].size, next(kept)[:0].size] == [0, 0, 0]
    wait_until(lambda: len(readers()) == 1)  # that of `kept`
    del kept
    wait_until(lambda: not readers())


@pytest.mark.parametrize(("is_distributed_again", "has_hash"), [(False, False), (False, True), (True, True)])
def test_next_pass_that_shares_an_iterator_begins_once_the_reader_of_the_last_has_ended(
    strategy, is_distributed_again, has_hash
):
    """As those of PyTorch's DataLoader with persistent workers."""
    events, is_reading, begins_too_early = [], threading.Event(), threading.Event()

    class Shared:
        persistent_workers = True
        __hash__ = object.__hash__ if has_hash else None

        def __iter__(self):
            if events:
                begins_too_early.set()
            events.append("begin")
            return map(self.read, range(3))

        def read(self, number):
            if number == 1 and not is_reading.is_set():
                is_reading.set()
                begins_too_early.wait(0.5)
            events.append(number)
            return np.full(4, number)

    options = InputOptions(experimental_per_replica_buffer_size=2)
    source = Shared()
    dataset = strategy.experimental_distribute_dataset(source, options)
    for _ in dataset:
        is_reading.wait()
        break
    if is_distributed_again:
        dataset = strategy.experimental_distribute_dataset(source, options)
    assert len(list(dataset)) == 3
    assert (events[:3], events[-4:]) == (["begin", 0, 1], ["begin", 0, 1, 2])  # a slow rank may read 2 in both passes


def test_error_of_a_batch_that_is_read_ahead_comes_in_its_place_and_ends_all_readers(comm, strategy):
    """At once, not when the iterator, which the error refers to, is garbage-collected; files are closed then, too."""
    source = Counted(3, OSError("torn")) if comm.rank == comm.size - 1 else Counted(1000)
    options = InputOptions(experimental_per_replica_buffer_size=8)
    steps = iter(strategy.experimental_distribute_dataset(source, options))
    assert len([next(steps) for _ in range(3)]) == 3
    with raises_everywhere(comm, OSError, "torn"):
        next(steps)
    wait_until(lambda: not readers())
    assert list(steps) == []
    assert strategy.reduce("sum", 1) == comm.size


def test_reader_that_calls_the_strategy_is_refused(comm, strategy):
    """Between the program's own calls it would come at another place on each rank."""

    class Asking:
        def __iter__(self):
            yield np.arange(4)
            yield strategy.broadcast(np.arange(4))

    options = InputOptions(experimental_per_replica_buffer_size=3)
    dataset = strategy.experimental_distribute_dataset(Asking(), options)
    for _ in range(2):
        num_steps = 0
        with raises_everywhere(comm, RuntimeError, r"^broadcast in the thread that reads batches ahead: on each"):
            for _part in dataset:
                num_steps += 1
                strategy.reduce("SUM", 1.0)
        assert num_steps == 1
    assert strategy.reduce("SUM", 1.0) == comm.size


@pytest.mark.parametrize(("seed", "buffer_size"), [(None, 3), (5, 1), (5, 3)])
def test_ranks_read_their_own_rows_of_files_alone(comm, seed, buffer_size, strategy):
    """Of shuffled batches, too; no row twice in an epoch; and in the thread, where batches are read ahead."""
    numbers_read = []
    threads = set()

    class OfFile:
        """As a data set of h5py, which takes slices, and increasing row numbers."""

        shape = (10, 2)

        def __getitem__(self, rows):
            rows = np.arange(10)[rows]
            assert (np.diff(rows) > 0).all()
            numbers_read.extend(rows.tolist())
            threads.add(threading.current_thread().name)
            return np.stack([rows, rows], axis=1)

    data = {"file": OfFile(), "memory": np.arange(10)}
    options = InputOptions(experimental_per_replica_buffer_size=buffer_size)
    dataset = strategy.experimental_distribute_dataset(Batches(data, 4, seed=seed), options)
    own = []
    for part in dataset:
        assert isinstance(part["file"], np.ndarray)
        assert part["file"].shape == (len(part["memory"]), 2)
        assert (part["memory"] == part["file"].T).all()
        own += part["memory"].tolist()
    assert sorted(numbers_read) == sorted(own)
    assert sorted(number for of_rank in comm.allgather(own) for number in of_rank) == list(range(10))
    assert own == sorted(own) or seed is not None
    assert ("mpidist.read_ahead" in threads) == (buffer_size > 1)


@pytest.mark.ranks(3)
def test_masked_arrays_are_cut_with_their_masks(comm, strategy):
    """On any number of ranks. What is masked may be another number on each rank, and masks must be equal."""
    batch = np.ma.masked_array([1.0, comm.rank, 3.0], [False, True, False])
    (part,) = strategy.experimental_distribute_dataset([batch])
    assert isinstance(part, np.ma.MaskedArray)
    assert comm.allreduce(part.filled(10.0).sum()) == 14.0
    batch.mask = [False, False, comm.rank == 0]
    with raises_everywhere(comm, InvalidArgumentError, "checksum of the first batch"):
        next(iter(strategy.experimental_distribute_dataset([batch])))


@pytest.mark.ranks(3)
def test_iteration_of_unlike_row_orders_raises_everywhere(comm, strategy):
    class OfFile:
        shape = (100,)

        def __getitem__(self, rows):
            return np.arange(100)[rows]

    batches = Batches(OfFile(), 50, seed=comm.rank)
    with raises_everywhere(comm, InvalidArgumentError, "checksum of the first batch"):
        next(iter(strategy.experimental_distribute_dataset(batches)))
