"""Ranks that step data sets differently are told, on all ranks and at once; and reading ahead of the program."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.everywhere import raises_everywhere

from mpidist import Batches, InputOptions, InputReplicationMode, get_replica_context
from mpidist import MultiWorkerMirroredStrategy as MultiWorker
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError, OutOfRangeError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

several = pytest.mark.ranks(min=2)


class Shuffled:
    """Global batches of 4 rows of 12, in an order that a seed decides."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        yield from np.random.default_rng(self.seed).permutation(12).reshape(3, 4)


@pytest.mark.core
@several
def test_rank_that_breaks_out_of_an_epoch_is_told_on_all_ranks(comm: Intracomm, placement: tuple[int, ...]) -> None:
    """A whole program: an early stop by each rank's own loss."""
    last = comm.size - 1
    with MultiWorker(comm=comm) as strategy:
        train = strategy.experimental_distribute_dataset([np.full(2 * comm.size, step) for step in range(5)])

        def step(part: Any) -> float:
            get_replica_context().all_reduce("sum", part.sum())
            return float(part[0]) if comm.rank == last else 0.0

        def program() -> None:
            for epoch in range(2):
                for part in train:
                    if strategy.run(step, args=(part,)) > 1 and epoch == 0:
                        break

        others = f"ranks? 0(-{last - 1})?" if last > 1 else "rank 0"
        text = (
            rf"next of data set 0 .*pass: {others}: that began with call 2; rank {last}: begins.*step: .*: 3; .*reduced"
        )
        with raises_everywhere(comm, InvalidArgumentError, text):
            program()
        assert strategy.reduce("sum", 1) == comm.size
        assert [part.shape for part in train] == [(2,)] * 5  # a new pass is the same on all ranks


@several
def test_steps_of_two_data_sets_at_once_are_told(comm: Intracomm) -> None:
    with MultiWorker(comm=comm) as strategy:
        train, validate = (strategy.experimental_distribute_dataset([np.arange(4)]) for _ in range(2))
        steps = iter(validate if comm.rank == 0 else train)
        with raises_everywhere(comm, InvalidArgumentError, "rank 0: next of data set 1; rank.* next of data set 0"):
            next(steps)
        assert list(steps) == []


@several
def test_unlike_global_batches_are_told(comm: Intracomm, placement: tuple[int, ...]) -> None:
    with MultiWorker(comm=comm) as strategy:
        unlike = strategy.experimental_distribute_dataset(Shuffled(seed=comm.rank))
        with raises_everywhere(comm, InvalidArgumentError, "checksum of the first batch: rank 0: .*same seed"):
            next(iter(unlike))
        longer = strategy.experimental_distribute_dataset([np.ones(4 + comm.rank)])
        advice = "(?s:(?!seed).)*files, rows and batch size$"  # and nothing of seeds
        with raises_everywhere(comm, InvalidArgumentError, f"global batch: rank 0: 4 rows; rank 1: 5 rows{advice}"):
            next(iter(longer))
        batches = [np.arange(4), np.arange(4, 8)][: 1 if comm.rank == 0 else 2]
        steps = iter(strategy.experimental_distribute_dataset(batches))
        next(steps)
        with raises_everywhere(comm, InvalidArgumentError, f"global batch: rank 0: none; rank.*: 4 rows{advice}"):
            next(steps)
        assert list(steps) == []
        assert len(list(strategy.experimental_distribute_dataset(Shuffled(seed=1)))) == 3


@several
def test_global_batches_of_unlike_form_are_told(comm: Intracomm) -> None:
    batches = [np.zeros((4, 3), "f4" if comm.rank else "f8"), (np.zeros(4), np.zeros(4))[: 1 + bool(comm.rank)]]
    texts = [r"rank 0: float64\[3\]; rank.*: float32\[3\]", r"rank 0: float64\[\]; rank.*: float64\[\], float64\[\]"]
    with MultiWorker(comm=comm) as strategy:
        for batch, text in zip(batches, texts, strict=True):
            unlike = strategy.experimental_distribute_dataset([batch])
            advice = "(?s:(?!seed).)*the same dtypes and shapes"  # and nothing of seeds
            with raises_everywhere(comm, InvalidArgumentError, f"form of the first batch: {text}{advice}"):
                next(iter(unlike))


@several
@pytest.mark.parametrize("kind", ["structured", "nested", "long double"])
def test_padding_is_not_compared(comm: Intracomm, kind: str) -> None:
    """Ranks have the same numbers, and other bytes between them, as in memory of `np.empty`."""
    pair = np.dtype([("kind", "i1"), ("weight", "f8")], align=True)
    nested = np.dtype([("inner", pair, 2), ("kind", "i1")], align=True)
    dtype = {"structured": pair, "nested": nested, "long double": np.dtype(np.longdouble)}[kind]
    memory = np.full(4 * comm.size * dtype.itemsize, comm.rank, np.uint8)
    batch = memory.view(dtype)
    if dtype.names is None:
        memory.reshape(-1, dtype.itemsize)[:, :10] = np.full(1, 2.5, dtype).view(np.uint8)[:10]
    for numbers in [batch, batch["inner"]] if kind == "nested" else [batch] * (dtype.names is not None):
        for name in {"kind", "weight"} & set(numbers.dtype.names):
            numbers[name] = np.arange(numbers.size).reshape(numbers.shape) % 100
    with MultiWorker(comm=comm) as strategy:
        assert [len(part) for part in strategy.experimental_distribute_dataset([batch])] == [4]
        (batch if dtype.names is None else batch["kind"])[-1] = comm.rank
        with raises_everywhere(comm, InvalidArgumentError, "checksum of the first batch"):
            list(strategy.experimental_distribute_dataset([batch]))


def test_passes_that_overlap_are_told_apart(comm: Intracomm) -> None:
    """An iterator that one rank alone makes, and never asks, is no pass."""
    with MultiWorker(comm=comm) as strategy:
        dataset = strategy.experimental_distribute_dataset(Shuffled(seed=1))
        if comm.rank == 0:
            iter(dataset)
        one, two = iter(dataset), iter(dataset)
        for steps in (two, one, two, one, two, one):
            next(steps)
        assert (list(one), list(two)) == ([], [])
        if comm.size > 1:
            one, two = iter(dataset), iter(dataset)
            next(one)
            next(two)
            with raises_everywhere(comm, InvalidArgumentError, "pass: rank 0: that began with call .*; rank"):
                next(one if comm.rank == 0 else two)


@pytest.mark.parametrize("kind", ["global", "own"])
def test_pass_is_over_on_all_ranks_after_an_error(comm: Intracomm, kind: str) -> None:
    class Failing:
        def __iter__(self) -> Iterator[Any]:
            yield np.arange(4)
            if comm.rank == comm.size - 1:
                raise OSError("disk")
            yield from [np.arange(4)] * 2

    with MultiWorker(comm=comm) as strategy:
        if kind == "global":
            dataset = strategy.experimental_distribute_dataset(Failing())
        else:
            dataset = strategy.distribute_datasets_from_function(lambda context: Failing())
        steps = iter(dataset)
        next(steps)
        with raises_everywhere(comm, OSError, "disk"):
            next(steps)
        assert list(steps) == []
        assert len(next(iter(dataset))) == (4 if kind == "own" else len(range(comm.rank, 4, comm.size)))


def test_function_that_fails_on_one_rank_fails_on_all(comm: Intracomm) -> None:
    """And the strategy is as good as before, also for the next data set."""

    def make(context: Any) -> list[Any]:
        if context.input_pipeline_id == comm.size - 1:
            raise FileNotFoundError("train.h5")
        return [np.arange(2)]

    with MultiWorker(comm=comm) as strategy:
        with raises_everywhere(comm, FileNotFoundError, r"train\.h5"):
            strategy.distribute_datasets_from_function(make)
        assert list(strategy.distribute_datasets_from_function(lambda context: range(2))) == [0, 1]


def test_step_costs_one_round(comm: Intracomm, placement: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    with MultiWorker(comm=comm) as strategy:
        group = parts_of(strategy).group
        own = strategy.distribute_datasets_from_function(lambda context: [np.ones(2)] * 3)
        for dataset in (strategy.experimental_distribute_dataset([np.ones(4)] * 3), own):
            steps = iter(dataset)
            before = group.agreement.sequence
            with monkeypatch.context() as patch:
                for name in ("all_reduce_or", "all_gather_object"):
                    patch.setattr(type(group.agreement), name, lambda self, item: pytest.fail("a second message"))
                assert len(list(steps)) == 3
            assert group.agreement.sequence - before == (4 if comm.size > 1 else 0)


@several
def test_without_checks_the_numbers_of_batches_are_the_programs_affair(
    comm: Intracomm, placement: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not the steps: they need the round to end together."""
    monkeypatch.setenv("MPIDIST_CHECK", "0")
    with MultiWorker(comm=comm) as strategy:
        assert len(list(strategy.experimental_distribute_dataset(Shuffled(seed=comm.rank)))) == 3
        steps = iter(strategy.experimental_distribute_dataset([np.ones(4)] * (2 - (comm.rank == 0))))
        next(steps)
        with raises_everywhere(comm, InvalidArgumentError, "global batch: rank 0: none; rank.*: 4 rows"):
            next(steps)


def test_get_next_tells_the_end(comm: Intracomm) -> None:
    with MultiWorker(comm=comm) as strategy:
        dataset = strategy.experimental_distribute_dataset([np.full(comm.size, 5)])
        steps = iter(dataset)
        assert steps.get_next().tolist() == [5]
        with pytest.raises(OutOfRangeError, match="at its end"):
            steps.get_next()
        steps = iter(dataset)
        first, second = steps.get_next_as_optional(), steps.get_next_as_optional()
        assert (first.has_value(), first.get_value().tolist(), second.has_value()) == (True, [5], False)
        with pytest.raises(OutOfRangeError, match="has_value"):
            second.get_value()


def test_length_and_form_are_told(comm: Intracomm) -> None:
    with MultiWorker(comm=comm) as strategy:
        batches = [{"x": np.ones((4, 3), np.float32), "y": np.arange(4)}] * 2
        dataset = strategy.experimental_distribute_dataset(batches)
        assert len(dataset) == 2
        spec = dataset.element_spec
        assert (spec["x"], spec["y"]) == (((None, 3), np.float32), ((None,), np.int64))
        endless = strategy.experimental_distribute_dataset(Shuffled(seed=1))
        assert endless
        with pytest.raises(TypeError, match=r"Shuffled, has no len\(\)"):
            len(endless)
        with pytest.raises(ValueError, match="no element_spec"):
            _ = strategy.experimental_distribute_dataset([]).element_spec


@pytest.mark.no_mpi
def test_wrong_options_are_refused() -> None:
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
            InputOptions(**wrong)  # type: ignore[arg-type]


class Counted:
    """Batches that count how many of them were read, and fail after the last if they are told to."""

    def __init__(self, number: int, error: Exception | None = None) -> None:
        self.number, self.error, self.num_read = number, error, 0

    def __iter__(self) -> Iterator[Any]:
        for step in range(self.number):
            self.num_read += 1
            yield np.full(4, step)
        if self.error is not None:
            raise self.error


def wait_until(condition: Any) -> None:
    while not condition():
        time.sleep(0.01)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mpidist.read_ahead"]


def test_batches_are_read_ahead_as_far_as_the_buffer_goes(comm: Intracomm) -> None:
    source = Counted(9)
    with MultiWorker(comm=comm) as strategy:
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


def test_readers_of_passes_that_were_left_end(comm: Intracomm) -> None:
    """Also those that wait for a place, and with another pass begun meanwhile."""
    with MultiWorker(comm=comm) as strategy:
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


def test_readers_of_passes_that_another_rank_ended_end(comm: Intracomm) -> None:
    """At once, not when the iterator, which the error refers to, is garbage-collected; files are closed then, too."""

    class Failing:
        def __iter__(self) -> Iterator[Any]:
            for step in range(1000):
                if step == 3 and comm.rank == comm.size - 1:
                    raise OSError("torn")
                yield np.arange(4)

    with MultiWorker(comm=comm) as strategy:
        options = InputOptions(experimental_per_replica_buffer_size=2)
        steps = iter(strategy.experimental_distribute_dataset(Failing(), options))
        with raises_everywhere(comm, OSError, "torn"):
            list(steps)
        wait_until(lambda: not readers())
        assert list(steps) == []


def test_reader_that_calls_the_strategy_is_refused(comm: Intracomm) -> None:
    """Between the program's own calls it would come at another place on each rank."""
    with MultiWorker(comm=comm) as strategy:

        class Asking:
            def __iter__(self) -> Iterator[Any]:
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


def test_rows_that_are_read_when_they_are_sliced_are_read_ahead(comm: Intracomm) -> None:
    """As those of h5py and zarr: each rank reads its own, in the thread."""
    where: list[tuple[str, int]] = []

    class OfFile:
        shape = (8,)

        def __getitem__(self, rows: slice) -> Any:
            where.append((threading.current_thread().name, rows.stop - rows.start))
            return np.arange(8)[rows]

    with MultiWorker(comm=comm) as strategy:
        options = InputOptions(experimental_per_replica_buffer_size=3)
        dataset = strategy.experimental_distribute_dataset([OfFile()] * 4, options)
        own = [part.tolist() for part in dataset]
        assert sorted(row for of_rank in comm.allgather(own[-1]) for row in of_rank) == list(range(8))
        assert where.count(("mpidist.read_ahead", len(own[0]))) == 4


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("buffer_size", [1, 3])
def test_ranks_read_their_own_rows_of_files_alone(comm: Intracomm, seed: int | None, buffer_size: int) -> None:
    """Of shuffled batches, too; and no row twice in an epoch."""
    numbers_read: list[int] = []

    class OfFile:
        """As a data set of h5py, which takes slices, and increasing row numbers."""

        shape = (10, 2)

        def __getitem__(self, rows: Any) -> Any:
            rows = np.arange(10)[rows]
            assert (np.diff(rows) > 0).all()
            numbers_read.extend(rows.tolist())
            return np.stack([rows, rows], axis=1)

    with MultiWorker(comm=comm) as strategy:
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


def test_masked_arrays_are_cut_with_their_masks(comm: Intracomm) -> None:
    """On any number of ranks. What is masked may be another number on each rank, and masks must be equal."""
    batch = np.ma.masked_array([1.0, comm.rank, 3.0], [False, True, False])
    with MultiWorker(comm=comm) as strategy:
        (part,) = strategy.experimental_distribute_dataset([batch])
        assert isinstance(part, np.ma.MaskedArray)
        assert comm.allreduce(part.filled(10.0).sum()) == 14.0
        if comm.size > 1:
            batch.mask = [False, False, comm.rank == 0]
            with raises_everywhere(comm, InvalidArgumentError, "checksum of the first batch"):
                next(iter(strategy.experimental_distribute_dataset([batch])))


@pytest.mark.ranks(min=2)
def test_other_orders_of_rows_in_files_are_told(comm: Intracomm) -> None:
    class OfFile:
        shape = (100,)

        def __getitem__(self, rows: Any) -> Any:
            return np.arange(100)[rows]

    with MultiWorker(comm=comm) as strategy:
        batches = Batches(OfFile(), 50, seed=comm.rank)
        with raises_everywhere(comm, InvalidArgumentError, "checksum of the first batch"):
            next(iter(strategy.experimental_distribute_dataset(batches)))


def test_error_of_a_batch_that_is_read_ahead_comes_in_its_place(comm: Intracomm) -> None:
    with MultiWorker(comm=comm) as strategy:
        source = Counted(3, OSError("disk") if comm.rank == 0 else None)
        options = InputOptions(experimental_per_replica_buffer_size=8)
        steps = iter(strategy.experimental_distribute_dataset(source, options))
        assert len([next(steps) for _ in range(3)]) == 3
        with raises_everywhere(comm, OSError, "disk"):
            next(steps)
        assert list(steps) == []
        assert strategy.reduce("sum", 1) == comm.size


class Rows:
    """Rows in a form that cannot be sliced, as that of some sparse matrices."""

    def __init__(self, count: int) -> None:
        self.shape = (count, 2)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.ones(self.shape, dtype)

    def __getitem__(self, key: Any) -> Any:
        raise TypeError("rows cannot be sliced")


def test_batches_need_not_be_sliced_where_all_ranks_have_as_many(comm: Intracomm) -> None:
    """Only a rank that runs out gets an empty one of others; then it is everybody's error."""
    with MultiWorker(comm=comm) as strategy:

        def steps_of(count: int) -> Iterator[Any]:
            return iter(strategy.distribute_datasets_from_function(lambda _: [Rows(3) for _ in range(count)]))

        assert [rows.shape for rows in steps_of(2)] == [(3, 2)] * 2
        if comm.size > 1:
            steps = steps_of(1 + (comm.rank == 0))
            assert next(steps).shape == (3, 2)
            with raises_everywhere(comm, TypeError, "rows cannot be sliced"):
                next(steps)
