"""Iterating over data sets: twice, at once, to the end, and into an error; what the function and the options say."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from support.everywhere import raises_everywhere

from mpidist import InputContext, InputOptions, InputReplicationMode, Strategy
from mpidist.errors import InvalidArgumentError, PeerFailedError

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size

pytestmark = pytest.mark.ranks(1, 3)

BATCHES = [np.arange(4), np.arange(4, 8), np.arange(8, 10)]


def lists(dataset: Iterable[Any]) -> list[list[Any]]:
    return [batch.tolist() for batch in dataset]


class Shuffled:
    """A data set that comes in another order each time, the same on all ranks."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(5)

    def __iter__(self) -> Iterator[Any]:
        numbers = self._rng.permutation(40)
        yield from numbers.reshape(4, 10)


def test_iterating_again_starts_anew(strategy: Strategy) -> None:
    dataset = strategy.experimental_distribute_dataset(BATCHES)
    assert lists(dataset) == lists(dataset)
    shuffled = strategy.experimental_distribute_dataset(Shuffled())
    first, second = lists(shuffled), lists(shuffled)
    assert first != second
    for steps in (first, second):
        everything = [item for its in WORLD.allgather(steps) for part in its for item in part]
        assert sorted(everything) == list(range(40))


def test_iterators_do_not_disturb_each_other(strategy: Strategy) -> None:
    dataset = strategy.experimental_distribute_dataset([np.full(SIZE, step) for step in range(3)])
    one, two = iter(dataset), iter(dataset)
    seen = [next(one), next(two), next(one), next(two), next(one), next(two)]
    assert [part.tolist() for part in seen] == [[0], [0], [1], [1], [2], [2]]
    assert iter(one) is one
    assert [list(one), list(two)] == [[], []]


def test_loop_may_end_early(strategy: Strategy) -> None:
    def endless() -> Iterator[Any]:
        while True:
            yield np.ones(SIZE)

    class Endless:
        __iter__ = staticmethod(endless)

    for step, part in enumerate(strategy.experimental_distribute_dataset(Endless())):
        assert part.shape == (1,)
        if step == 2:
            break
    assert strategy.reduce("SUM", 1) == SIZE


def test_next_in_run_is_refused(strategy: Strategy) -> None:
    dataset = strategy.experimental_distribute_dataset([np.ones(2)])
    steps = iter(dataset)
    with pytest.raises(ValueError, match="should be called from outside"):
        strategy.run(lambda: next(steps))
    with pytest.raises(ValueError, match="should be called from outside"):
        strategy.run(lambda: list(dataset))
    assert len(list(steps)) == 1


def test_data_set_must_be_iterable_more_than_once(strategy: Strategy) -> None:
    for once in ((batch for batch in BATCHES), iter(BATCHES), zip(BATCHES, BATCHES, strict=True)):
        with pytest.raises(TypeError, match="used up after one pass"):
            strategy.experimental_distribute_dataset(once)
        with pytest.raises(TypeError, match="used up after one pass"):
            strategy.distribute_datasets_from_function(lambda context, once=once: once)
    for wrong in (3, None, object()):
        with pytest.raises(TypeError, match="iterable of batches"):
            strategy.experimental_distribute_dataset(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="iterable of batches"):
        strategy.distribute_datasets_from_function(lambda context: None)  # type: ignore[arg-type, return-value]
    for wrong in ("fast", 3):
        with pytest.raises(TypeError, match="InputOptions"):
            strategy.experimental_distribute_dataset([np.ones(2)], wrong)  # type: ignore[arg-type]
    for policy in ("AUTO", "DATA"):
        with pytest.raises(TypeError, match=r"from_function takes a function that gets an InputContext .*, got list"):
            strategy.distribute_datasets_from_function(
                [np.ones(2)],  # type: ignore[arg-type]
                InputOptions(auto_shard_policy=policy),
            )


class BadRecordError(Exception):
    """One that does not survive pickling, as many do not."""

    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path}:{line} is broken")


FAILURES: list[Exception] = [ValueError("no number"), OSError("no such file"), BadRecordError("data.csv", 7)]


@pytest.mark.core
@pytest.mark.parametrize("kind", ["global", "own"])
def test_error_of_one_ranks_data_set_reaches_all(strategy: Strategy, kind: str) -> None:
    for error in FAILURES:

        class Failing:
            def __iter__(self, error: Exception = error) -> Iterator[Any]:
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


def test_data_set_that_cannot_be_opened_on_one_rank_fails_on_all(strategy: Strategy) -> None:
    class Missing:
        def __iter__(self) -> Iterator[Any]:
            if RANK == 0:
                raise FileNotFoundError("data.csv")
            return iter(BATCHES)

    steps = iter(strategy.experimental_distribute_dataset(Missing()))
    with raises_everywhere(WORLD, FileNotFoundError, r"data\.csv"):
        next(steps)


@pytest.mark.ranks(3)
def test_next_on_one_rank_and_reduce_on_others_is_an_error_on_all(strategy: Strategy) -> None:
    steps = iter(strategy.experimental_distribute_dataset(BATCHES))
    with raises_everywhere(WORLD, InvalidArgumentError, "next of data set 0"):
        next(steps) if RANK == 0 else strategy.reduce("SUM", 1.0)


@pytest.mark.no_mpi
def test_input_context_tells_pipelines_and_replicas() -> None:
    context = InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=6)
    assert (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync) == (2, 1, 6)
    assert [context.get_per_replica_batch_size(size) for size in (12, 6, 0)] == [2, 1, 0]
    with pytest.raises(ValueError, match="13 is not divisible by the 6 replicas"):
        context.get_per_replica_batch_size(13)
    assert str(InputContext()) == "InputContext(input pipeline id 0, total: 1)"
    with pytest.raises(AttributeError):
        context.input_pipeline_id = 0  # type: ignore[misc]


def test_options_change_nothing_on_a_cpu(strategy: Strategy) -> None:
    for fetch in (True, False):
        options = InputOptions(experimental_fetch_to_device=fetch)
        assert lists(strategy.experimental_distribute_dataset([np.arange(SIZE)], options)) == [[RANK]]
    options = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
    assert lists(strategy.distribute_datasets_from_function(lambda context: [np.arange(2)], options)) == [[0, 1]]
    with pytest.raises(NotImplementedError, match="PER_REPLICA"):
        strategy.experimental_distribute_dataset([np.arange(SIZE)], options)
