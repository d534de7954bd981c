"""Reductions of arrays in memory that all ranks of a node reach: into themselves, each other, and anything else.

Such arrays are added where they lie, by whichever rank has its turn. So every test overwrites its arguments as soon
as a call returns: no other rank may still read them.
"""

import gc
import random
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.contributions import HALVES, REALS, bits, in_rank_order
from support.placements import one_and_two_nodes
from support.ranks import Intracomm
from support.reductions import all_reduce
from support.transports import set_sizes
from tensors import Tensor

from mpidist import CommunicationOptions
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.errors import DeadlineExceededError
from mpidist.transport.node_memory.symmetric import places_digest

pytestmark = pytest.mark.core

SMALL, LARGE = 5, 300  # elements: one round, and many chunks


def use_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    set_sizes(monkeypatch, chunk_bytes=128, least_bytes=1, one_shot_bytes=64, depth=2, fine_count=20)


@pytest.fixture
def on_one_node(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Strategy]:
    """A strategy with chunks of 128 bytes."""
    use_small_chunks(monkeypatch)
    with Strategy(comm=comm) as made:
        yield made


@pytest.fixture
def strategy(placement: tuple[int, ...], on_one_node: Strategy) -> Strategy:
    """The same on pretended nodes."""
    return on_one_node


def numbers(rank: int, step: int, count: int) -> Any:
    """What a rank contributes in one step of a test."""
    return (np.arange(count) + 3 * rank + 7 * step) % 11.0


def total(strategy: Strategy, step: int, count: int) -> Any:
    return sum(numbers(rank, step, count) for rank in range(strategy.topology.size))


def steps(strategy: Strategy, number: int = 4) -> Iterator[int]:
    """Count, at another pace on every rank."""
    random_ = random.Random(strategy.topology.rank)
    for step in range(number):
        yield step
        if random_.random() < 0.2:
            time.sleep(random_.choice([0, 0.0005]))


def fill(strategy: Strategy, array: Any, step: int) -> Any:
    array[...] = numbers(strategy.topology.rank, step, array.size).reshape(array.shape)
    return array


def check_sum(strategy: Strategy, value: Any, step: int, out: Any = None) -> None:
    """Fill a value, add it, and look at the result."""
    result = all_reduce(strategy, "SUM", fill(strategy, value, step), out=out)
    assert out is None or result is out
    assert (result == total(strategy, step, value.size)).all()


@pytest.mark.parametrize("check", ["0", "1"])
def test_sum_of_any_value_into_any_out(
    comm: Intracomm, placement: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    """With `MPIDIST_CHECK=0` as well: the arrays lie alike on all ranks."""
    monkeypatch.setenv("MPIDIST_CHECK", check)
    use_small_chunks(monkeypatch)
    with Strategy(comm=comm) as strategy:
        for count in (SMALL, LARGE):
            array, out = strategy.symmetric_empty(count, np.float64), strategy.symmetric_empty(count, np.float64)
            together = strategy.symmetric_empty(count, np.float64, per_node=True)
            private = np.zeros(count)
            for step in steps(strategy, 4):
                for value in (array, private):
                    for target in (None, value, out, together, np.zeros(count)):
                        before = fill(strategy, value, step).copy()
                        result = all_reduce(strategy, "SUM", value, out=target)
                        assert target is None or result is target
                        assert target is value or (value == before).all()
                        assert target is not None or not np.shares_memory(result, array)
                        want = total(strategy, step, count)
                        assert (result == want).all()
                        if target is not value:
                            value[...] = -1
                            assert (result == want).all()
                        if target is out:
                            out[...] = -2


def test_outs_of_several_kinds_that_are_values_of_others(strategy: Strategy) -> None:
    """Ranks may not read values where they lie, as the results of others are copied out to some of them meanwhile."""
    for op in ("SUM", "MAX"):
        size, rank = strategy.topology.size, strategy.topology.rank
        first, second, third = strategy.symmetric_empty_like([np.zeros(LARGE)] * 3)
        private, of_node = np.empty(LARGE), strategy.symmetric_empty(LARGE, np.float64, per_node=True)
        want = size * (size + 1) / 2 if op == "SUM" else size
        pairs = (
            (private, first),
            (of_node, first),
            (second, private),
            (second, of_node),
            (second, third),
            (third, first),
        )
        for outs in map(list, pairs):
            for turn in range(2):
                first[...], second[...] = rank + 1 + turn, 10 * (rank + 1)
                all_reduce(strategy, op, [first, second], out=outs)
                assert (outs[0] == want + (turn * size if op == "SUM" else turn)).all()
                assert (outs[1] == 10 * want).all()
                strategy.barrier()


def test_of_one_for_the_node(strategy: Strategy, comm: Intracomm) -> None:
    """Every rank contributes it: into something else, and into itself."""
    for count in (SMALL, LARGE):
        value, own = strategy.symmetric_empty(count, np.float64, per_node=True), np.zeros(count)
        other = strategy.symmetric_empty(count, np.float64, per_node=True)
        for step in steps(strategy):
            comm.Barrier()
            if strategy.topology.is_leader:
                value[...] = numbers(0, step, count)
            comm.Barrier()
            right = strategy.topology.size * numbers(0, step, count)
            for out in (None, own, other, value):
                assert (all_reduce(strategy, "SUM", value, out=out) == right).all()


@one_and_two_nodes
def test_means(strategy: Strategy) -> None:
    """Of floats where they lie, and of integers, whose mean cannot lie there."""
    for count in (SMALL, LARGE):
        size = strategy.topology.size
        floats, integers = strategy.symmetric_empty(count, np.float32), strategy.symmetric_empty(count, np.int16)
        halves = strategy.symmetric_empty(count, np.float16)
        mean = strategy.symmetric_empty(count, np.float32)
        for step in steps(strategy):
            right = total(strategy, step, count).astype(np.float32) / np.float32(size)
            for value in (floats, integers):
                fill(strategy, value, step)
                assert (all_reduce(strategy, "MEAN", value) == right).all()
                assert all_reduce(strategy, "MEAN", value, out=mean) is mean
                assert (mean == right).all()
            all_reduce(strategy, "MEAN", floats, out=floats)
            assert (floats == right).all()
            halves[...] = 60000
            all_reduce(strategy, "MEAN", halves, out=halves)
            assert (halves == 60000).all()


@one_and_two_nodes
def test_rank_order_is_kept_to_the_bit(strategy: Strategy) -> None:
    size, rank = strategy.topology.size, strategy.topology.rank
    for dtype in (*REALS, *HALVES):
        rows = np.random.default_rng(4).standard_normal((size, LARGE)).astype(dtype)
        array = strategy.symmetric_empty(LARGE, dtype)
        array[...] = rows[rank]
        all_reduce(strategy, "SUM", array, out=array, options=CommunicationOptions(reproducible=True))
        assert bits(array) == bits(in_rank_order(np.add, rows, dtype)), dtype


@one_and_two_nodes
def test_lists_of_all_kinds_of_arrays(strategy: Strategy) -> None:
    """Tiny, large, empty and 0-d ones, of every layout; symmetric, private, and both."""
    shapes: list[tuple[int, ...]] = [(LARGE,), (), (0,), (1,), (3, 50), (4, 0), (2,), (LARGE, 2)]
    like = [np.zeros(shape, dtype) for shape in shapes for dtype in (np.float32, np.int64)]
    symmetric = strategy.symmetric_empty_like(like)
    odd = [np.zeros(array.shape[::-1], array.dtype.newbyteorder(">")).T for array in like]
    mixed = [(symmetric, odd)[index % 2][index] for index in range(len(like))]
    for step in steps(strategy, 2):
        right = [total(strategy, step, array.size).reshape(array.shape).astype(array.dtype) for array in like]
        for value in (symmetric, odd, mixed):
            for out in (None, symmetric, odd, mixed):
                for array in value:
                    fill(strategy, array, step)
                results = all_reduce(strategy, "SUM", value, out=out)
                assert out is None or results is out
                for result, wanted in zip(results, right, strict=True):
                    assert result.shape == wanted.shape
                    assert (result == wanted).all()


# Ranks that differ in where their arrays lie. That is their own affair.


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("check", ["0", "1"])
def test_one_rank_passes_a_private_array(
    comm: Intracomm, placement: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    """With checks and without: then everything is staged."""
    monkeypatch.setenv("MPIDIST_CHECK", check)
    use_small_chunks(monkeypatch)
    with Strategy(comm=comm) as strategy:
        for count in (SMALL, LARGE):
            symmetric, private = strategy.symmetric_empty(count, np.float64), np.zeros(count)
            other = strategy.symmetric_empty(count, np.float64)
            together = strategy.symmetric_empty(count, np.float64, per_node=True)
            for step in steps(strategy):
                value = private if comm.rank == step % comm.size else symmetric
                for out in (None, value, other, np.zeros(count), together):
                    check_sum(strategy, value, step, out)
                    value[...] = -1


@one_and_two_nodes
def test_one_rank_takes_the_result_elsewhere(strategy: Strategy) -> None:
    """In a private array, in another symmetric one, or in its own argument."""
    for count in (SMALL, LARGE):
        value, others = strategy.symmetric_empty(count, np.float64), strategy.symmetric_empty(count, np.float64)
        for step in steps(strategy, 4):
            for odd in (np.zeros(count), value, value[::-1], others[::-1]):
                is_odd = strategy.topology.rank == step % strategy.topology.size
                check_sum(strategy, value, step, odd if is_odd else others)


@one_and_two_nodes
def test_ranks_pass_other_parts_of_one_array(strategy: Strategy) -> None:
    """Each its own; or two of them in turn, in unlike order."""
    for count in (SMALL, LARGE):
        rank = strategy.topology.rank
        base = strategy.symmetric_empty(count + 100, np.float64)
        for step in steps(strategy):
            value, out = base[rank : rank + count], base[50 - rank : 50 - rank + count]
            check_sum(strategy, value, step, out)
            check_sum(strategy, value, step, value)


# Parts of arrays


PARTS: dict[str, Callable[[Any, Any, int], Any]] = {  # of an array, or of a matrix
    "slice": lambda base, _, count: base[count : 2 * count],
    "end": lambda base, _, count: base[2 * count :],
    "every second": lambda base, _, count: base[: 2 * count : 2],
    "backwards": lambda base, _, count: base[count - 1 :: -1],
    "column": lambda _, matrix, __: matrix[:, 1],
    "other dtype": lambda base, _, count: base[: 2 * count].view(np.complex128).real,
}


@one_and_two_nodes
def test_parts_of_an_array_take_results(strategy: Strategy) -> None:
    """And nothing beside them is written, here or on another rank."""
    for count in (SMALL, LARGE):
        base, value = strategy.symmetric_empty(3 * count, np.float64), np.zeros(count)
        matrix = strategy.symmetric_empty((count, 4), np.float64)
        for step, (name, part) in product(steps(strategy, 2), PARTS.items()):
            base[...] = matrix[...] = -5
            out = part(base, matrix, count)
            fill(strategy, value, step)
            all_reduce(strategy, "SUM", value, out=out)
            right = total(strategy, step, count)
            assert (out == right).all(), name
            assert base.sum() + matrix.sum() == right.sum() - 5 * (base.size + matrix.size - count), name
            fill(strategy, out, step)
            all_reduce(strategy, "SUM", out, out=out)
            assert (out == right).all(), name


@one_and_two_nodes
def test_result_over_its_argument(strategy: Strategy, comm: Intracomm) -> None:
    """Shifted by less than its length, forwards and backwards."""
    for count, per_node in product((SMALL, LARGE), (False, True)):
        base = strategy.symmetric_empty(3 * count, np.float64, per_node=per_node)
        for step in steps(strategy, 3):
            for shift in (1, count // 2, count - 1, count, -1, -count):
                value, out = base[count : 2 * count], base[count + shift : 2 * count + shift]
                comm.Barrier()
                if not per_node:
                    fill(strategy, value, step)
                elif strategy.topology.is_leader:
                    value[...] = numbers(0, step, count)
                comm.Barrier()
                all_reduce(strategy, "SUM", value, out=out)
                right = strategy.topology.size * numbers(0, step, count) if per_node else total(strategy, step, count)
                assert (out == right).all(), shift


@one_and_two_nodes
def test_arguments_that_swap_their_places(strategy: Strategy) -> None:
    """Two arrays of one window, of two windows, and the halves of one array."""
    for count in (SMALL, LARGE):
        one, other = strategy.symmetric_empty_like([np.zeros(count), np.zeros(count)])
        third, base = strategy.symmetric_empty(count, np.float64), strategy.symmetric_empty(2 * count, np.float64)
        for step in steps(strategy, 3):
            for first, second in ((one, other), (one, third), (base[:count], base[count:])):
                fill(strategy, first, step)
                fill(strategy, second, step + 1)
                all_reduce(strategy, "SUM", [first, second], out=[second, first])
                assert (second == total(strategy, step, count)).all()
                assert (first == total(strategy, step + 1, count)).all()


@one_and_two_nodes
def test_arrays_that_come_and_go(strategy: Strategy) -> None:
    """A new one may have the identity of one that is gone; it does not lie where that lay."""
    for step in steps(strategy, 12):
        count = (SMALL, LARGE)[step % 2]
        arrays = [np.zeros(count), strategy.symmetric_empty(count, np.float64)]
        base = strategy.symmetric_empty(2 * count, np.float64)
        for value in (arrays[step // 2 % 2], arrays.pop(), base[:count], base[count:], arrays.pop()):
            check_sum(strategy, value, step, value)
            del value
        gc.collect(0)


# The life of a strategy


@one_and_two_nodes
def test_arrays_outlive_their_strategy(comm: Intracomm, placement: tuple[int, ...]) -> None:
    """And serve the next one, as arrays like any other."""
    count = LARGE
    strategy = Strategy(comm=comm)
    array = strategy.symmetric_empty(count, np.float64)
    together = strategy.symmetric_empty(count, np.float64, per_node=True)
    fill(strategy, array, 1)
    all_reduce(strategy, "SUM", array, out=array)
    all_reduce(strategy, "SUM", fill(strategy, np.zeros(count), 2), out=together)
    strategy.close()
    right = total(strategy, 1, count)
    assert (array == right).all()
    assert (together == total(strategy, 2, count)).all()
    del strategy, together
    gc.collect()
    with Strategy(comm=comm) as strategy:
        assert (array == right).all()
        check_sum(strategy, array, 3, array)


@one_and_two_nodes
def test_arrays_outlive_a_reset(strategy: Strategy) -> None:
    for count in (SMALL, LARGE):
        array, out = strategy.symmetric_empty(count, np.float64), strategy.symmetric_empty(count, np.float64)
        for step in steps(strategy, 3):
            for target in (array, out, None):
                check_sum(strategy, array, step, target)
            strategy.reset()


@one_and_two_nodes
def test_arrays_outlive_a_call_that_failed(strategy: Strategy, comm: Intracomm) -> None:
    """One rank gave up; the others had staged, or not even come."""
    array = strategy.symmetric_empty(LARGE, np.float64)
    fill(strategy, array, 0)
    soon = CommunicationOptions(timeout_seconds=0.1)
    if comm.rank == 0:
        with pytest.raises(DeadlineExceededError):
            all_reduce(strategy, "SUM", array, out=array, options=soon)
    comm.Barrier()
    if comm.rank:
        with pytest.raises(DeadlineExceededError):
            all_reduce(strategy, "SUM", array, out=array, options=soon)
    assert (array == numbers(comm.rank, 0, LARGE)).all(), "nothing was added"
    comm.Barrier()
    strategy.reset()
    all_reduce(strategy, "SUM", array, out=array)
    assert (array == total(strategy, 0, LARGE)).all()


@one_and_two_nodes
def test_arrays_of_megabytes(comm: Intracomm, placement: tuple[int, ...]) -> None:
    """With the sizes that the machine likes."""
    with Strategy(comm=comm) as strategy:
        count = 700_001
        array = strategy.symmetric_empty(count, np.float32)
        for out in (array, strategy.symmetric_empty(count, np.float32, per_node=True)):
            for step in steps(strategy, 2):
                check_sum(strategy, array, step, out)


def some(random_: random.Random, whole: list[Any]) -> list[int]:
    """Some of the arrays of a list, in some order."""
    chosen = [index for index in range(len(whole)) if random_.random() < 0.8] or [0]
    if random_.random() < 0.5:
        random_.shuffle(chosen)
    return chosen


@pytest.mark.ranks(3)
@pytest.mark.parametrize("per_node", [False, True])
@pytest.mark.parametrize("parity", [0, 1])
def test_arrays_that_lie_side_by_side_are_added_together_and_nothing_else(
    on_one_node: Strategy, comm: Intracomm, per_node: bool, parity: int
) -> None:
    """Arrays of one window in any choice and order, wholly or in part, into themselves or into another window."""
    for seed in range(parity, 12, 2):
        random_ = random.Random(seed)  # of all ranks alike
        counts = [random_.choice([0, 1, 16, 31, 32, 33, 100, 400]) for _ in range(9)]
        dtypes = [random_.choice([np.float32, np.float32, np.float32, np.int64]) for _ in counts]
        like = [np.zeros(count, dtype) for count, dtype in zip(counts, dtypes, strict=True)]
        sources = on_one_node.symmetric_empty_like(like)
        is_in_place = bool(seed % 2) and not per_node
        shifts = [0 if is_in_place else random_.choice([0, 16]) for _ in like]  # outs lie elsewhere in their arrays
        longer = [np.zeros(array.size + shift, array.dtype) for array, shift in zip(like, shifts, strict=True)]
        outs = sources if is_in_place else on_one_node.symmetric_empty_like(longer, per_node=per_node)
        for step in range(4):
            chosen = some(random_, sources)
            starts = [random_.choice([0, 0, 1, 16]) for _ in chosen]
            ends = [random_.choice([counts[at], counts[at], max(0, counts[at] - 1), 16]) for at in chosen]
            comm.Barrier()
            for at, source in enumerate(sources):
                fill(on_one_node, source, step + at)
                if outs is not sources and (not per_node or comm.rank == 0):
                    outs[at][...] = 77
            comm.Barrier()
            want = [out.copy() for out in outs]
            for at, start, end in zip(chosen, starts, ends, strict=True):
                part = total(on_one_node, step + at, counts[at])[start:end]
                want[at][shifts[at] + start :][: part.size] = part
            values = [sources[at][start:end] for at, start, end in zip(chosen, starts, ends, strict=True)]
            places = zip(chosen, starts, values, strict=True)
            into = [outs[at][shifts[at] + start :][: value.size] for at, start, value in places]
            all_reduce(on_one_node, "SUM", values, out=into)
            for at, out in enumerate(outs):
                assert np.array_equal(out, want[at]), (step, at)
            comm.Barrier()


@pytest.mark.ranks(3)
def test_many_small_arrays_are_one_run(on_one_node: Strategy) -> None:
    arrays = on_one_node.symmetric_empty_like([np.zeros(index % 40 + 1, np.float32) for index in range(500)])
    shared = parts_of(on_one_node).group.shared
    if on_one_node.topology.size > 1:
        places = shared.places(arrays[::-1])
        assert len(shared.runs(places, places, np.dtype(np.float32))) == 1
        assert len(shared.runs(places[::2], places[::2], np.dtype(np.float32))) == 250
    for step in steps(on_one_node):
        for at, array in enumerate(arrays):
            fill(on_one_node, array, step + at)
        all_reduce(on_one_node, "SUM", arrays, out=arrays)
        assert all((array == total(on_one_node, step + at, array.size)).all() for at, array in enumerate(arrays))


@pytest.mark.ranks(3)
def test_ops_of_arrays_where_they_lie(on_one_node: Strategy) -> None:
    rank = on_one_node.topology.rank
    for dtype, op in product((*HALVES, *REALS), ("MEAN", "MIN", "MAX", "PROD")):
        arrays = on_one_node.symmetric_empty_like([np.zeros(count, dtype) for count in (70, 1, 200)])
        for array in arrays:
            array[...] = 1 + (rank + np.arange(array.size)) % 2
        want = on_one_node.reduce(op, [array.copy() for array in arrays])
        all_reduce(on_one_node, op, arrays, out=arrays)
        assert all(bits(array) == bits(right) for array, right in zip(arrays, want, strict=True))


# Views that do not look like symmetric arrays.
HIDDEN: tuple[Callable[[Any], Any], ...] = (
    lambda part: np.lib.stride_tricks.as_strided(part, part.shape, part.strides),
    lambda part: np.asarray(memoryview(part)),
    np.from_dlpack,
)


@pytest.mark.ranks(3)
def test_views_that_hide_what_they_are_of_are_kept_apart(on_one_node: Strategy) -> None:
    """The out overlaps a value that does not look like a symmetric array: other ranks write it early."""
    whole, together = (
        on_one_node.symmetric_empty(LARGE + 7, np.float64, per_node=per_node) for per_node in (False, True)
    )
    for step, hide in product(steps(on_one_node, 8), HIDDEN):
        fill(on_one_node, whole[7:], step)
        value, out = hide(whole[7:]), whole[:LARGE]
        all_reduce(on_one_node, "SUM", value, out=out)
        assert (out == total(on_one_node, step, LARGE)).all()
        on_one_node.reduce("SUM", 0)
        value = fill(on_one_node, np.empty(LARGE), step)
        all_reduce(on_one_node, "SUM", value, out=hide(together[7:]))
        assert (together[7:] == total(on_one_node, step, LARGE)).all()
        on_one_node.reduce("SUM", 0)


@pytest.mark.ranks(2)
def test_arrays_that_change_their_dtype(on_one_node: Strategy) -> None:
    """What was found of an array in one call is not taken for true in the next."""
    array = on_one_node.symmetric_empty(LARGE, np.float32)
    for dtype in (np.float32, np.int32, np.float32):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            array.dtype = dtype
        check_sum(on_one_node, array, 3, array)


@pytest.mark.ranks(3)
def test_views_of_other_libraries_are_known_by_their_place(on_one_node: Strategy) -> None:
    """What they share memory with, they do not tell; so they are known by their addresses."""
    for count in (SMALL, LARGE):
        shared = parts_of(on_one_node).group.shared
        arrays = on_one_node.symmetric_empty_like([np.zeros(count), np.zeros(3)])
        views = [np.from_dlpack(Tensor(array)) for array in arrays]
        assert [view.flags.owndata for view in views] == [False] * 2
        digest = places_digest(shared.places(arrays))
        assert digest != places_digest(None)
        assert places_digest(shared.places(views)) == digest
        assert shared.places([np.from_dlpack(Tensor(np.zeros(count)))]) is None
        for step in steps(on_one_node):
            fill(on_one_node, arrays[0], step)
            assert all_reduce(on_one_node, "SUM", views[0], out=views[0]) is views[0]
            assert (arrays[0] == total(on_one_node, step, count)).all()
