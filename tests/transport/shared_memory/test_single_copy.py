"""Sums that ranks copy out of each other's arrays: the numbers of two-shot, in few bytes, where that is faster."""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from support.contributions import bits, contribution, reduction_of, unlike_numbers
from support.everywhere import same_everywhere

import mpidist
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.transport.node_memory import PeerMemory
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory import FusedArrays, FusedReducer
from mpidist.transport.shared_memory.trials import Trial

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

pytestmark = [pytest.mark.core, pytest.mark.ranks(2, 3, 4)]

COUNT = 700_001  # float32 numbers: more than a chunk, and no whole number of shards
LENGTHS = [[COUNT], [200_000, 1, 300_000, 0, 200_000]]  # pieces
DTYPES = [np.dtype(code) for code in ("f", "i", "F", ml_dtypes.bfloat16)]


@pytest.fixture
def strategies(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Strategy]]:
    """One for each value of `MPIDIST_SINGLE_COPY`."""
    made = {}
    for value in ("always", "never", "auto"):
        monkeypatch.setenv("MPIDIST_SINGLE_COPY", value)
        made[value] = Strategy(comm=comm)
    yield made
    for strategy in made.values():
        strategy.close()


def reducer_of(strategy: Strategy) -> FusedReducer:
    reducer = strategy.extended.group.levels.fused
    assert reducer is not None
    return reducer


class Copies:
    """What ranks have copied out of other processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes = 0
        original = PeerMemory.copy

        def copy(memory: PeerMemory, rank: int, address: int, into: Any) -> bool:
            self.nbytes += into.nbytes
            return original(memory, rank, address, into)

        monkeypatch.setattr(PeerMemory, "copy", copy)

    def take(self) -> int:
        """Return how many bytes were copied since the last call."""
        taken, self.nbytes = self.nbytes, 0
        return taken


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    return Copies(monkeypatch)


def pieces(numbers: Any, lengths: Sequence[int]) -> list[Any]:
    return [part.copy() for part in np.split(numbers, np.cumsum(lengths)[:-1])]


def joined(arrays: Sequence[Any]) -> Any:
    return np.concatenate([array.reshape(-1) for array in arrays])


@pytest.mark.parametrize("is_in_place", [True, False])
def test_sums_are_those_of_two_shot(
    strategies: dict[str, Strategy], comm: Intracomm, copies: Copies, is_in_place: bool
) -> None:
    for lengths in LENGTHS:
        for dtype in DTYPES:
            count = sum(lengths) * 4 // min(4, dtype.itemsize)  # bfloat16, too, in 2 MiB
            of_dtype = [*lengths[:-1], lengths[-1] + count - sum(lengths)]
            found = {}
            for name in ("always", "never"):
                sources = pieces(contribution("sum", comm.rank, count, dtype), of_dtype)
                results = sources if is_in_place else [np.full(array.shape, 99, dtype) for array in sources]
                reducer, arrays = reducer_of(strategies[name]), FusedArrays(dtype, sources, results)
                copies.take()
                reducer.run(reducer.transfer(arrays, Reduction("sum")))
                assert (copies.take() > 0) == (name == "always" and comm.size > 1)
                assert (joined(results) == reduction_of("sum", comm.size, count, dtype)).all(), (dtype, lengths)
                if not is_in_place:
                    assert (joined(sources) == contribution("sum", comm.rank, count, dtype)).all()
                found[name] = bits(joined(results))
            assert found["always"] == found["never"]


@pytest.mark.parametrize("divide_by", [1, 3])
def test_numbers_are_added_in_rank_order_and_divided_once(
    strategies: dict[str, Strategy], comm: Intracomm, divide_by: int
) -> None:
    numbers = unlike_numbers(comm.size, COUNT, np.float32)[comm.rank]
    for op in ("sum", "max") if divide_by == 1 else ("sum",):
        found = []
        for name in ("always", "never"):
            mine = numbers.copy()
            reducer = reducer_of(strategies[name])
            reducer.run(reducer.transfer(FusedArrays(mine.dtype, [mine], [mine]), Reduction(op), divide_by))
            assert same_everywhere(comm, mine)
            found.append(bits(mine))
        assert found[0] == found[1]


def test_each_number_is_copied_once_on_each_way(
    strategies: dict[str, Strategy], comm: Intracomm, copies: Copies
) -> None:
    """A rank copies its shard from all others, and all other shards: 2 S (P - 1) / P bytes if shards are alike."""
    reducer, size = reducer_of(strategies["always"]), comm.size
    count = 24 * 16 * 4096  # shards are alike for 1 to 4 ranks
    values = np.ones(count, np.float32)
    copies.take()
    reducer.run(reducer.transfer(FusedArrays(values.dtype, [values], [values]), Reduction("sum")))
    nbytes = copies.take()
    assert comm.allreduce(nbytes) == 2 * values.nbytes * (size - 1)
    assert abs(nbytes - 2 * values.nbytes * (size - 1) / size) < 4096 * size


def test_a_rank_may_want_no_result(strategies: dict[str, Strategy], comm: Intracomm, copies: Copies) -> None:
    reducer = reducer_of(strategies["always"])
    for root in range(comm.size):
        source, dtype = contribution("sum", comm.rank, COUNT, np.dtype(np.float64)), np.dtype(np.float64)
        results = [np.zeros(COUNT)] if comm.rank == root else []
        copies.take()
        reducer.run(reducer.transfer(FusedArrays(dtype, [source], results), Reduction("sum")))
        assert copies.take() > 0
        assert all((result == reduction_of("sum", comm.size, COUNT, dtype)).all() for result in results)
        assert (source == contribution("sum", comm.rank, COUNT, dtype)).all()


def test_arrays_that_nobody_can_copy_are_staged_on_all_ranks(
    strategies: dict[str, Strategy], comm: Intracomm, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    reducer, original = reducer_of(strategies["always"]), PeerMemory.own_address
    for odd in range(comm.size):
        with monkeypatch.context() as patch:
            if comm.rank == odd:
                patch.setattr(PeerMemory, "own_address", lambda memory, array: 0)
            mine = contribution("sum", comm.rank, COUNT, np.dtype(np.float32))
            copies.take()
            reducer.run(reducer.transfer(FusedArrays(mine.dtype, [mine], [mine]), Reduction("sum")))
            assert copies.take() == 0
            assert (mine == reduction_of("sum", comm.size, COUNT, mine.dtype)).all()
        assert PeerMemory.own_address is original


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda numbers: numbers,
    "strided": lambda numbers: np.repeat(numbers, 2)[::2],
    "reversed": lambda numbers: numbers[::-1].copy()[::-1],
    "a column": lambda numbers: np.stack([numbers, numbers], axis=1)[:, 0],
    "two dimensions": lambda numbers: numbers[: COUNT - 1].reshape(-1, 10),
    "Fortran's order": lambda numbers: np.asfortranarray(numbers[: COUNT - 1].reshape(-1, 10)),
    "other bytes first": lambda numbers: numbers.astype(">f4"),
    "whole numbers": lambda numbers: numbers.astype(np.int32),
    "a nest": lambda numbers: [np.repeat(numbers, 2)[::2], numbers.astype(np.int64), numbers, np.float32(3)],
}


ON_ONE_RANK = ("strided", "reversed", "a column")  # ranks have to agree on shapes, dtypes and nests


def leaves(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@pytest.mark.parametrize(
    ("layout", "is_everywhere"), [*((layout, True) for layout in LAYOUTS), *((layout, False) for layout in ON_ONE_RANK)]
)
def test_numbers_are_right_however_they_lie(
    strategies: dict[str, Strategy], comm: Intracomm, layout: str, is_everywhere: bool
) -> None:
    """On all ranks, or on one alone. The mean of whole numbers is a floating point number."""

    def numbers_of(rank: int) -> Any:
        return (np.arange(COUNT) % 100 + rank).astype(np.float32)

    def lay(rank: int) -> Any:
        return LAYOUTS[layout if is_everywhere or rank == comm.size - 1 else "plain"](numbers_of(rank))

    def step() -> None:
        context = mpidist.get_replica_context()
        assert context is not None
        for op in ("sum", "mean"):
            divide_by = comm.size if op == "mean" else 1
            rows = [[np.asarray(leaf, np.float64) for leaf in leaves(lay(rank))] for rank in range(comm.size)]
            expected = [sum(column) / divide_by for column in zip(*rows, strict=True)]
            found = leaves(context.all_reduce(op, lay(comm.rank)))
            for one, right in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, right, rtol=1e-6)
            if layout not in ("whole numbers", "a nest"):
                mine = lay(comm.rank)
                context.all_reduce(op, mine, out=mine)
                np.testing.assert_allclose(mine, expected[0], rtol=1e-6)
                around = np.full(2 * COUNT, 7, np.float32)
                if mine.ndim == 1 and mine.dtype.isnative:
                    context.all_reduce(op, lay(comm.rank), out=around[::2])
                    np.testing.assert_allclose(around[::2], expected[0], rtol=1e-6)
                    assert (around[1::2] == 7).all()

    for strategy in strategies.values():
        strategy.run(step)


def test_arrays_may_change_as_soon_as_a_call_has_returned(strategies: dict[str, Strategy], comm: Intracomm) -> None:
    """Ranks that are slow still copy, then: the call has to wait for them."""
    mine = random.Random(comm.rank)

    def step(number: int) -> None:
        context = mpidist.get_replica_context()
        assert context is not None
        given = np.full(COUNT, comm.rank + number, np.float32)
        time.sleep(mine.choice([0, 0.001, 0.01]))
        if number % 2:
            result = context.all_reduce("sum", given)
        else:
            result = context.all_reduce("sum", given, out=given)
        assert (result == sum(range(comm.size)) + comm.size * number).all()
        given[...] = result[...] = -1

    for number in range(12):
        strategies["always"].run(step, args=(number,))


def test_no_call_keeps_an_array(strategies: dict[str, Strategy]) -> None:
    def step() -> weakref.ref[Any]:
        context = mpidist.get_replica_context()
        assert context is not None
        given = np.ones(COUNT, np.float32)
        context.all_reduce("mean", given, out=given)
        return weakref.ref(given)

    for name, strategy in strategies.items():
        for call in range(12):
            assert strategy.run(step)() is None, (name, call)


def test_a_rank_that_is_gone_ends_the_call(
    strategies: dict[str, Strategy], comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other ranks do about it, the tests of failures show: here they are told."""
    reducer, asked = reducer_of(strategies["always"]), []

    def check_peers() -> None:
        asked.append(True)
        if len(asked) == 3:
            raise ConnectionError("a rank is gone")

    monkeypatch.setattr(PeerMemory, "copy", lambda *args: False)
    monkeypatch.setattr(reducer, "check_peers", check_peers)
    values = np.ones(COUNT, np.float32)
    with pytest.raises(ConnectionError):
        reducer.run(reducer.transfer(FusedArrays(values.dtype, [values], [values]), Reduction("sum")))
    comm.Barrier()


def test_small_and_many_and_symmetric_arrays_are_never_copied_so(
    strategies: dict[str, Strategy], comm: Intracomm, copies: Copies
) -> None:
    def step() -> None:
        context = mpidist.get_replica_context()
        assert context is not None
        for value in (np.ones(1000), [np.ones(1000)] * 600, np.ones(COUNT, np.float16)):
            context.all_reduce("mean", value)
        symmetric = strategy.symmetric_empty_like(np.ones(COUNT))
        context.all_reduce("mean", symmetric, out=symmetric)
        assert copies.take() == 0
        context.all_reduce("mean", np.ones(COUNT))
        assert copies.take() > 0

    strategy = strategies["always"]
    copies.take()
    strategy.run(step)


def test_both_ways_are_tried_and_the_faster_one_is_taken_on_all_ranks(
    strategies: dict[str, Strategy], comm: Intracomm, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks see other times: what counts is the slowest of them."""
    original = Trial.add

    def add(trial: Trial, nanoseconds: int) -> bool:
        way = trial.next()[0]
        return original(trial, [1000, 500 if comm.rank else slower][way])

    monkeypatch.setattr(Trial, "add", add)
    for nbytes, slower in ((3 << 20, 1500), (5 << 20, 900), (9 << 20, 990)):
        values, seen = np.ones(nbytes // 4, np.float32), []

        def step(values: Any = values, seen: list[bool] = seen) -> None:
            context = mpidist.get_replica_context()
            assert context is not None
            copies.take()
            context.all_reduce("mean", values, out=values)
            seen.append(copies.take() > 0)

        for _ in range(12):
            strategies["auto"].run(step)
        assert (values == 1).all()
        wins = slower == 900  # 990 is not clearly faster than 1000
        assert seen == [False, False, *[False, True] * 3, *[wins] * 4]
        assert comm.allgather(seen) == [seen] * comm.size


def test_calls_that_are_started_are_not_tried(strategies: dict[str, Strategy], copies: Copies) -> None:
    """The program works between their steps: their time says nothing. They take the way of other calls."""
    values = np.ones(COUNT, np.float32)

    def start() -> None:
        context = mpidist.get_replica_context()
        assert context is not None
        assert (context.start_all_reduce("mean", values).wait() == 1).all()

    def call() -> None:
        context = mpidist.get_replica_context()
        assert context is not None
        context.all_reduce("mean", values)

    copies.take()
    for _ in range(12):
        strategies["auto"].run(start)
    assert copies.take() == 0
    for _ in range(4):
        strategies["auto"].run(call)
    assert copies.take() > 0


@pytest.mark.ranks(1)
def test_a_trial_is_repeated_and_takes_the_least_times() -> None:
    trial, ways = Trial(2), []
    for call in range(1100):
        way, is_tried = trial.next()
        if is_tried:
            ways.append(call)
            late = call > 500
            if trial.add([100, 300 if late else 50][way] + (1000 if len(ways) % 3 else 0)):
                trial.end([trial.times])
                assert trial.best == (0 if late else 1)
    assert ways == [*range(2, 8), *range(508, 514), *range(1014, 1020)]
