"""Ranks that step data sets differently are told, on all ranks and at once; and reading ahead of the program."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.everywhere import raises_everywhere
from support.ranks import Intracomm

from mpidist import Batches, InputOptions, InputReplicationMode
from mpidist import MultiWorkerMirroredStrategy as MultiWorker
from mpidist.errors import InvalidArgumentError

pytestmark = pytest.mark.ranks(1, 3)


class Shuffled:
    """Global batches of 4 rows of 12, in an order that a seed decides."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        yield from np.random.default_rng(self.seed).permutation(12).reshape(3, 4)


@pytest.mark.ranks(3)
def test_steps_of_two_data_sets_at_once_are_told(comm: Intracomm) -> None:
    with MultiWorker(comm=comm) as strategy:
        train, validate = (strategy.experimental_distribute_dataset([np.arange(4)]) for _ in range(2))
        steps = iter(validate if comm.rank == 0 else train)
        with raises_everywhere(comm, InvalidArgumentError, "rank 0: next of data set 1; rank.* next of data set 0"):
            next(steps)
        assert list(steps) == []


@pytest.mark.ranks(3)
def test_global_batches_of_unlike_form_are_told(comm: Intracomm) -> None:
    batches = [np.zeros((4, 3), "f4" if comm.rank else "f8"), (np.zeros(4), np.zeros(4))[: 1 + bool(comm.rank)]]
    texts = [r"rank 0: float64\[3\]; rank.*: float32\[3\]", r"rank 0: float64\[\]; rank.*: float64\[\], float64\[\]"]
    with MultiWorker(comm=comm) as strategy:
        for batch, text in zip(batches, texts, strict=True):
            unlike = strategy.experimental_distribute_dataset([batch])
            advice = "(?s:(?!seed).)*the same dtypes and shapes"  # and nothing of seeds
            with raises_everywhere(comm, InvalidArgumentError, f"form of the first batch: {text}{advice}"):
                next(iter(unlike))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", ["nested", "long double"])
def test_padding_is_not_compared(comm: Intracomm, kind: str) -> None:
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
    with MultiWorker(comm=comm) as strategy:
        assert [len(part) for part in strategy.experimental_distribute_dataset([batch])] == [4]
        (batch if dtype.names is None else batch["kind"])[-1] = comm.rank
        with raises_everywhere(comm, InvalidArgumentError, "checksum of the first batch"):
            list(strategy.experimental_distribute_dataset([batch]))


@pytest.mark.ranks(3)
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
        one, two = iter(dataset), iter(dataset)
        next(one)
        next(two)
        with raises_everywhere(comm, InvalidArgumentError, "pass: rank 0: that began with call .*; rank"):
            next(one if comm.rank == 0 else two)


@pytest.mark.ranks(3)
def test_without_checks_the_numbers_of_batches_are_the_programs_affair(
    comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not the steps: they need the round to end together."""
    monkeypatch.setenv("MPIDIST_CHECK", "0")
    with MultiWorker(comm=comm) as strategy:
        assert len(list(strategy.experimental_distribute_dataset(Shuffled(seed=comm.rank)))) == 3
        steps = iter(strategy.experimental_distribute_dataset([np.ones(4)] * (2 - (comm.rank == 0))))
        next(steps)
        with raises_everywhere(comm, InvalidArgumentError, "global batch: rank 0: none; rank.*: 4 rows"):
            next(steps)


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


def test_error_of_a_batch_that_is_read_ahead_comes_in_its_place_and_ends_all_readers(comm: Intracomm) -> None:
    """At once, not when the iterator, which the error refers to, is garbage-collected; files are closed then, too."""
    source = Counted(3, OSError("torn")) if comm.rank == comm.size - 1 else Counted(1000)
    with MultiWorker(comm=comm) as strategy:
        options = InputOptions(experimental_per_replica_buffer_size=8)
        steps = iter(strategy.experimental_distribute_dataset(source, options))
        assert len([next(steps) for _ in range(3)]) == 3
        with raises_everywhere(comm, OSError, "torn"):
            next(steps)
        wait_until(lambda: not readers())
        assert list(steps) == []
        assert strategy.reduce("sum", 1) == comm.size


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


@pytest.mark.parametrize(("seed", "buffer_size"), [(None, 3), (5, 1), (5, 3)])
def test_ranks_read_their_own_rows_of_files_alone(comm: Intracomm, seed: int | None, buffer_size: int) -> None:
    """Of shuffled batches, too; no row twice in an epoch; and in the thread, where batches are read ahead."""
    numbers_read: list[int] = []
    threads: set[str] = set()

    class OfFile:
        """As a data set of h5py, which takes slices, and increasing row numbers."""

        shape = (10, 2)

        def __getitem__(self, rows: Any) -> Any:
            rows = np.arange(10)[rows]
            assert (np.diff(rows) > 0).all()
            numbers_read.extend(rows.tolist())
            threads.add(threading.current_thread().name)
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
        assert ("mpidist.read_ahead" in threads) == (buffer_size > 1)


@pytest.mark.ranks(3)
def test_masked_arrays_are_cut_with_their_masks(comm: Intracomm) -> None:
    """On any number of ranks. What is masked may be another number on each rank, and masks must be equal."""
    batch = np.ma.masked_array([1.0, comm.rank, 3.0], [False, True, False])
    with MultiWorker(comm=comm) as strategy:
        (part,) = strategy.experimental_distribute_dataset([batch])
        assert isinstance(part, np.ma.MaskedArray)
        assert comm.allreduce(part.filled(10.0).sum()) == 14.0
        batch.mask = [False, False, comm.rank == 0]
        with raises_everywhere(comm, InvalidArgumentError, "checksum of the first batch"):
            next(iter(strategy.experimental_distribute_dataset([batch])))


@pytest.mark.ranks(3)
def test_other_orders_of_rows_in_files_are_told(comm: Intracomm) -> None:
    class OfFile:
        shape = (100,)

        def __getitem__(self, rows: Any) -> Any:
            return np.arange(100)[rows]

    with MultiWorker(comm=comm) as strategy:
        batches = Batches(OfFile(), 50, seed=comm.rank)
        with raises_everywhere(comm, InvalidArgumentError, "checksum of the first batch"):
            next(iter(strategy.experimental_distribute_dataset(batches)))
