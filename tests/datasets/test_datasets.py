"""Data sets: every rank its part of each global batch, or batches of its own, and all ranks the same steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from mpi4py import MPI
from support.everywhere import raises_everywhere

import mpidist
from mpidist import InputContext, MultiWorkerMirroredStrategy, Strategy
from mpidist.errors import InvalidArgumentError

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size


class Pair(NamedTuple):
    x: Any
    y: Any


@pytest.fixture
def strategy() -> Iterator[Strategy]:
    with MultiWorkerMirroredStrategy() as made:
        yield made


def batches(count: int, size: int) -> list[Any]:
    """Cut 0 ... count - 1 into batches: `range(count).batch(size)`."""
    return [np.arange(start, min(start + size, count)) for start in range(0, count, size)]


def share(length: int) -> list[int]:
    """Give the lengths of the ranks' parts of a global batch: they differ by at most one, longer parts first."""
    return [length // SIZE + (rank < length % SIZE) for rank in range(SIZE)]


def lists(dataset: Iterable[Any]) -> list[list[Any]]:
    return [batch.tolist() for batch in dataset]


# --- Global batches ---


@pytest.mark.core
@pytest.mark.parametrize(
    ("count", "size"),
    [(10, 4), (8, 7), (8, 3), (9, 6), (14, 5), (22, 10), (7, 5), (9, 2), (15, 4), (8, 4), (100, 10), (4, 1), (0, 3)],
)
def test_every_batch_is_cut_in_contiguous_parts(strategy: Strategy, count: int, size: int) -> None:
    """Reference 4.1; T157, T158, T161, T163, T169, X51: every element once, in rank order."""
    everything = batches(count, size)
    mine = list(strategy.experimental_distribute_dataset(everything))
    assert len(mine) == len(everything)
    for part, whole in zip(mine, everything, strict=True):
        assert part.dtype == whole.dtype
        parts = WORLD.allgather(part.tolist())
        assert [len(its) for its in parts] == share(len(whole))
        assert [item for its in parts for item in its] == whole.tolist()


@pytest.mark.ranks(4)
def test_six_elements_keep_all_of_four_ranks_busy(strategy: Strategy) -> None:
    """X51; section 7, fault 21."""
    dataset = strategy.experimental_distribute_dataset(batches(9, 6))
    assert WORLD.allgather(lists(dataset)) == [[[0, 1], [6]], [[2, 3], [7]], [[4], [8]], [[5], []]]


def test_nest_of_arrays_is_cut_leaf_by_leaf(strategy: Strategy) -> None:
    x = np.arange(20, dtype=np.float32).reshape(5, 2, 2)
    batch = {"pair": Pair(x, [np.arange(5, dtype=np.int8)]), "names": np.array(list("abcde"))}
    (part,) = strategy.experimental_distribute_dataset([batch])
    start = sum(share(5)[:RANK])
    stop = start + share(5)[RANK]
    assert list(part) == ["pair", "names"]
    assert isinstance(part["pair"], Pair)
    assert np.array_equal(part["pair"].x, x[start:stop])
    assert part["pair"].x.dtype == np.float32
    assert part["pair"].y[0].tolist() == list(range(start, stop))
    assert "".join(part["names"]) == "abcde"[start:stop]


def test_arrays_and_labels_come_together(strategy: Strategy) -> None:
    """T127."""
    x = np.array([[1, 2], [6, 12], [2, 4], [5, 10], [3, 6], [4, 8]])
    y = np.arange(6)[::-1]
    steps = iter(strategy.experimental_distribute_dataset([(x, y)] * 2))
    for _ in range(2):
        part = next(steps)
        whole = strategy.gather(part, axis=0)
        assert np.array_equal(whole[0], x)
        assert np.array_equal(whole[1], y)
    with pytest.raises(StopIteration):
        next(steps)
    if RANK == 0:  # what is over stays over, and nobody is asked
        with pytest.raises(StopIteration):
            next(steps)


def test_steps_are_run_on_the_parts(strategy: Strategy) -> None:
    """T173, T176."""
    dataset = strategy.experimental_distribute_dataset([np.array([5, 6]), np.array([7, 8])])
    squares = [strategy.gather(strategy.run(lambda x: x * x, (part,)), axis=0).tolist() for part in dataset]
    assert squares == [[25, 36], [49, 64]]
    dataset = strategy.experimental_distribute_dataset([np.array([0, 1]), np.array([2, 3])])
    first = strategy.run(lambda x: [{"a": x - 1, "b": x + 1}], (next(iter(dataset)),))
    gathered = strategy.gather(first, axis=0)
    assert (gathered[0]["a"].tolist(), gathered[0]["b"].tolist()) == ([-1, 0], [1, 2])


def test_means_of_batches_weigh_empty_parts_right(strategy: Strategy) -> None:
    """T175."""
    dataset = strategy.experimental_distribute_dataset([np.array([5.0, 6.0]), np.array([7.0, 8.0])])
    product = 2.0
    for part in dataset:
        product *= strategy.reduce("MEAN", part, axis=0)
    assert product == pytest.approx(82.5)
    with strategy.scope():
        variable = mpidist.Variable(1.0, aggregation="ONLY_FIRST_REPLICA")
        counter = mpidist.Variable(0.0, aggregation="MEAN")
    for _ in dataset:
        strategy.run(lambda: (variable.assign_add(1.0), counter.assign_add(1.0)))
    assert (variable.read_value(), counter.read_value()) == (3, 2)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ((np.ones(3), np.ones(2)), r"equally long on axis 0, got shapes \[\[3\], \[2\]\]"),
        ([np.ones(2), 1.0], "equally long"),
        (np.float32(1), "put batches in a list"),
        ("text", "equally long"),
        ({}, "equally long"),
    ],
)
def test_batch_that_cannot_be_cut_is_refused(strategy: Strategy, batch: Any, text: str) -> None:
    steps = iter(strategy.experimental_distribute_dataset([np.ones(2), batch]))
    next(steps)
    with raises_everywhere(WORLD, InvalidArgumentError, text):
        next(steps)


ONE_BATCH: dict[str, Any] = {
    "array": np.arange(6),
    "matrix": np.arange(6).reshape(3, 2),
    "tuple of arrays": (np.arange(8.0).reshape(4, 2), np.arange(4)),
    "dict": {"x": np.arange(4)},
}


@pytest.mark.parametrize("name", ONE_BATCH)
def test_one_batch_is_no_data_set_of_batches(strategy: Strategy, name: str) -> None:
    """Section 7, fault 20: the advice instead of an IndexError, and of rows that are taken for batches."""
    with raises_everywhere(WORLD, TypeError, r"put batches in a list: \[batch, \.\.\.\]"):
        strategy.experimental_distribute_dataset(ONE_BATCH[name])
    with raises_everywhere(WORLD, TypeError, "put batches in a list"):
        strategy.distribute_datasets_from_function(lambda context: ONE_BATCH[name])
    (part,) = strategy.experimental_distribute_dataset([ONE_BATCH[name]])
    assert type(part) is type(ONE_BATCH[name])


# --- Batches of each rank's own ---


@pytest.mark.core
def test_every_rank_makes_its_own_batches(strategy: Strategy) -> None:
    """T155, T158, T161, T170: nothing is cut, and the function is called once."""
    calls: list[InputContext] = []

    def make(context: InputContext) -> list[Any]:
        calls.append(context)
        return batches(4 * SIZE, 2)[context.input_pipeline_id :: context.num_input_pipelines]

    dataset = strategy.distribute_datasets_from_function(make)
    expected = [[2 * RANK, 2 * RANK + 1], [2 * (RANK + SIZE), 2 * (RANK + SIZE) + 1]]
    assert lists(dataset) == expected
    assert lists(dataset) == expected
    assert calls == [InputContext(SIZE, RANK, SIZE)]


def test_elements_need_not_be_batches(strategy: Strategy) -> None:
    """T155, T176: unbatched numbers, and pairs of them."""
    dataset = strategy.distribute_datasets_from_function(lambda context: range(5, 8))
    assert list(dataset) == [5, 6, 7]
    assert [strategy.reduce("SUM", element) for element in dataset] == [5 * SIZE, 6 * SIZE, 7 * SIZE]
    dataset = strategy.distribute_datasets_from_function(lambda context: [(i, i * i) for i in range(3)])
    assert list(dataset) == [(0, 0), (1, 1), (2, 4)]


def test_rank_that_has_run_out_gets_empty_batches(strategy: Strategy) -> None:
    """T160, T169, T172: as many steps as the longest, of the same dtypes and trailing shapes."""

    def make(context: InputContext) -> list[Any]:
        batch = {"x": np.full((2, 3), RANK, np.float16), "y": [np.full(2, RANK, np.int8)]}
        return [batch] * (context.input_pipeline_id + 1)

    steps = list(strategy.distribute_datasets_from_function(make))
    assert len(steps) == SIZE
    for number, batch in enumerate(steps):
        length = 2 if number <= RANK else 0
        assert (batch["x"].shape, batch["x"].dtype) == ((length, 3), np.float16)
        assert (batch["y"][0].shape, batch["y"][0].dtype) == ((length,), np.int8)


@pytest.mark.core
@pytest.mark.parametrize("empty", ["first", "last"])
def test_rank_without_any_batch_learns_their_form_from_others(strategy: Strategy, empty: str) -> None:
    without = 0 if empty == "first" else SIZE - 1

    def make(_: InputContext) -> list[Any]:
        return [] if without == RANK else [Pair(np.ones((2, 3), np.float16), 5)] * 2

    steps = list(strategy.distribute_datasets_from_function(make))
    assert len(steps) == (2 if SIZE > 1 else 0)
    for batch in steps:
        assert isinstance(batch, Pair)
        if without == RANK:
            assert (batch.x.shape, batch.x.dtype) == ((0, 3), np.float16)
            assert (batch.y.shape, batch.y.dtype) == ((0,), np.int64)
        assert strategy.reduce("SUM", batch.x, axis=0).tolist() == [2 * (SIZE - 1)] * 3


def test_no_batch_on_any_rank_is_no_step(strategy: Strategy) -> None:
    """Reference 4.1: empty data set."""
    assert list(strategy.distribute_datasets_from_function(lambda context: [])) == []
    assert list(strategy.experimental_distribute_dataset([])) == []
