"""Reductions of arrays in memory that all ranks of a node reach: into themselves, each other, and anything else.

Such arrays are added where they lie, by whichever rank has its turn. So every test overwrites its arguments as soon
as a call returns: no other rank may still read them.
"""

import gc
import random
import time
import warnings
from itertools import product

import numpy as np
import pytest
from support.contributions import (
    COMPLEX,
    HALVES,
    INTEGERS,
    REALS,
    UFUNCS,
    bits,
    contribution,
    in_rank_order,
    reduction_of,
)
from support.placements import one_and_two_nodes
from support.reductions import all_reduce
from support.transports import set_sizes
from tensors import Tensor

from mpidist import CommunicationOptions
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.errors import DeadlineExceededError
from mpidist.transport.node_memory.symmetric import places_digest
from mpidist.transport.shared_memory.two_shot import TwoShot

pytestmark = pytest.mark.core

SMALL, LARGE = 5, 300  # elements: one round, and many chunks
UNTOUCHED = -5


def use_small_chunks(monkeypatch):
    set_sizes(monkeypatch, chunk_bytes=128, least_bytes=1, one_shot_bytes=64, depth=2, fine_count=20)


@pytest.fixture
def on_one_node(comm, monkeypatch):
    """A strategy with chunks of 128 bytes."""
    use_small_chunks(monkeypatch)
    with Strategy(comm=comm) as made:
        yield made


@pytest.fixture
def strategy(placement, on_one_node):
    """The same on pretended nodes."""
    return on_one_node


def numbers(rank, step, count):
    """What a rank contributes in one step of a test."""
    return (np.arange(count) + 3 * rank + 7 * step) % 11.0


def total(strategy, step, count, op="SUM"):
    return UFUNCS[op.lower()].reduce([numbers(rank, step, count) for rank in range(strategy.topology.size)])


def steps(strategy, number=4):
    """Count, at another pace on every rank."""
    random_ = random.Random(strategy.topology.rank)
    for step in range(number):
        yield step
        if random_.random() < 0.2:
            time.sleep(random_.choice([0, 0.0005]))


def fill(strategy, array, step):
    array[...] = numbers(strategy.topology.rank, step, array.size).reshape(array.shape)
    return array


def listed(value):
    return value if isinstance(value, list) else [value]


def check(strategy, value, step, out=None, op="SUM"):
    """Fill a value, or a list of them, reduce it, look at the result, and overwrite the value."""
    values, outs = listed(value), [] if out is None else listed(out)
    before = [fill(strategy, array, step + at).copy() for at, array in enumerate(values)]
    right = [total(strategy, step + at, array.size, op) for at, array in enumerate(values)]
    result = all_reduce(strategy, op, value, out=out)
    assert out is None or result is out
    assert all((one == other).all() for one, other in zip(listed(result), right, strict=True))
    if not any(np.may_share_memory(one, other) for one, other in product(values, outs)):
        for array, its in zip(values, before, strict=True):
            assert (array == its).all()
            array[...] = UNTOUCHED
        assert all((one == other).all() for one, other in zip(listed(result), right, strict=True))


class Arrays:
    """Arrays that the table below takes its values and outs from; `is_odd` is true on another rank in each step."""

    def __init__(self, strategy, count):
        self.count, self.rank, self.is_odd = count, strategy.topology.rank, False
        self.first, self.second, self.third = strategy.symmetric_empty_like([np.zeros(count)] * 3)
        self.apart = strategy.symmetric_empty(count, np.float64)  # in another window
        self.base = strategy.symmetric_empty(3 * count + 100, np.float64)
        self.matrix = strategy.symmetric_empty((count, 4), np.float64)
        self.of_node = strategy.symmetric_empty(count, np.float64, per_node=True)
        self.private, self.own = np.zeros(count), np.zeros(count)
        self.of_rank = [self.first, self.second, self.third, self.apart, self.base, self.matrix]

    def part(self, start):
        return self.base[start : start + self.count]

    def parts(self):
        """Return a slice, the end, every second number, a slice backwards, a column, and one of another dtype."""
        base, count = self.base, self.count
        real = base[: 2 * count].view(np.complex128).real
        return [self.part(count), base[-count:], base[: 2 * count : 2], base[count - 1 :: -1], self.matrix[:, 1], real]


# What each rank passes, and where it takes the result: arrays, or lists of two.
PAIRS = {
    "anywhere to anywhere": lambda its: [
        (value, out) for value in (its.first, its.private) for out in (None, value, its.apart, its.of_node, its.own)
    ],
    # Ranks that differ in where their arrays lie: that is their own affair.
    "one rank's is private": lambda its: [
        (value, out)
        for value in [its.private if its.is_odd else its.first]
        for out in (None, value, its.apart, its.own, its.of_node)
    ],
    "one rank's result elsewhere": lambda its: [
        (value, odd if its.is_odd else its.apart)
        for value in (its.first, its.private)
        for odd in (its.own, its.first, its.first[::-1], its.apart[::-1])
    ],
    "other parts of one array": lambda its: [(its.part(its.rank), its.part(out)) for out in (50 - its.rank, its.rank)],
    "parts that take results": lambda its: [(value, part) for part in its.parts() for value in (its.private, part)],
    "over the value": lambda its: [(its.part(its.count), its.part(its.count + shift)) for shift in shifts(its.count)],
    "each in the other's place": lambda its: [
        ([one, other], [other, one])
        for one, other in ((its.first, its.second), (its.first, its.apart), (its.part(0), its.part(its.count)))
    ],
    # Ranks may not read values where they lie, as the results of others are copied out to some of them meanwhile.
    "outs of several kinds": lambda its: [
        ([its.first, its.second], outs)
        for outs in (
            [its.private, its.first],
            [its.of_node, its.first],
            [its.second, its.private],
            [its.second, its.of_node],
            [its.second, its.third],
            [its.third, its.first],
        )
    ],
}


def shifts(count):
    """Return by how much an out may lie beside its value, forwards and backwards, over a part of it or at its end."""
    return 1, count // 2, count - 1, count, -1, -count


@pytest.mark.parametrize("check_calls", ["0", "1"])
def test_symmetric_value_anywhere_into_out_anywhere_is_reduced_and_nothing_else_written(
    comm, placement, monkeypatch, check_calls
):
    """Neither here nor on another rank; with `MPIDIST_CHECK=0` as well."""
    monkeypatch.setenv("MPIDIST_CHECK", check_calls)
    use_small_chunks(monkeypatch)
    with Strategy(comm=comm) as strategy:
        for count, (name, pairs) in product((SMALL, LARGE), PAIRS.items()):
            its = Arrays(strategy, count)
            for step in steps(strategy):
                its.is_odd = comm.rank == step % comm.size
                for value, out in pairs(its):
                    for array in its.of_rank:
                        array[...] = UNTOUCHED
                    check(strategy, value, step, out, "MAX" if step == 3 else "SUM")
                    for array in [*listed(value), *listed(out)]:
                        if array is not None and array is not its.of_node:  # which others may still look at
                            array[...] = UNTOUCHED
                    assert all((array == UNTOUCHED).all() for array in its.of_rank), name


def test_symmetric_value_of_the_node_counts_once_for_each_rank(strategy, comm):
    """Into something else, into itself, and over a part of itself."""
    for count in (SMALL, LARGE):
        base, other = (strategy.symmetric_empty(size, np.float64, per_node=True) for size in (3 * count, count))
        value, *shifted = (base[count + shift : 2 * count + shift] for shift in (0, *shifts(count)))
        for step in steps(strategy):
            for out in (None, np.zeros(count), other, value, *shifted):
                comm.Barrier()
                if strategy.topology.is_leader:
                    value[...] = numbers(0, step, count)
                comm.Barrier()
                right = comm.size * numbers(0, step, count)
                assert (all_reduce(strategy, "SUM", value, out=out) == right).all()


@pytest.mark.ranks(min=2)
def test_symmetric_and_private_calls_do_not_overtake_each_other(strategy, comm, monkeypatch):
    """One after the other with nothing in between, of all kinds and sizes, some ranks slow at any place."""
    same, mine, steps_of = random.Random(comm.size), random.Random(comm.rank), TwoShot.steps

    def nap():
        time.sleep(mine.choice([0, 0.0001, 0.001]) * (mine.random() < 0.1))

    def slow_steps(transfer, has_passed_barrier):
        nap()
        for step in steps_of(transfer, has_passed_barrier):
            nap()
            yield step

    monkeypatch.setattr(TwoShot, "steps", slow_steps)
    work = []
    for number in range(25):
        dtype = same.choice([REALS[0], INTEGERS[0], HALVES[0], COMPLEX[1]])
        lengths = same.choice([[1], [3, 4], [200], [5] * 40, [64, 0, 64], [33, 1, 1, 1, 90]])
        value = [contribution("sum", comm.rank, length, dtype) + dtype.type(number % 3) for length in lengths]
        right = [
            reduction_of("sum", comm.size, length, dtype) + dtype.type(comm.size * (number % 3)) for length in lengths
        ]
        if same.random() < 0.5:
            values, value = value, strategy.symmetric_empty_like(value)
            for array, own in zip(value, values, strict=True):
                array[...] = own
        outs = [None, value, [np.zeros_like(array) for array in value]]
        outs += [strategy.symmetric_empty_like(value, per_node=per_node) for per_node in (False, True)]
        work.append((value, same.choice(outs), right))
    results = []
    for value, out, _ in work:
        nap()
        results.append(all_reduce(strategy, "SUM", value, out=out))
    for result, (_, _, right) in zip(results, work, strict=True):
        assert all((one == other).all() for one, other in zip(result, right, strict=True))
    comm.Barrier()  # before the arrays of the node go


@one_and_two_nodes
def test_rank_order_is_kept_to_the_bit(strategy):
    size, rank = strategy.topology.size, strategy.topology.rank
    for dtype in (*REALS, *HALVES):
        rows = np.random.default_rng(4).standard_normal((size, LARGE)).astype(dtype)
        array = strategy.symmetric_empty(LARGE, dtype)
        array[...] = rows[rank]
        all_reduce(strategy, "SUM", array, out=array, options=CommunicationOptions(reproducible=True))
        assert bits(array) == bits(in_rank_order(np.add, rows, dtype)), dtype


@one_and_two_nodes
def test_lists_of_all_kinds_of_arrays(strategy):
    """Tiny, large, empty and 0-d ones, of every layout; symmetric, private, and both."""
    shapes = [(LARGE,), (), (0,), (1,), (3, 50), (4, 0), (2,), (LARGE, 2)]
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


@one_and_two_nodes
def test_arrays_that_come_and_go(strategy):
    """A new one may have the identity of one that is gone; it does not lie where that lay."""
    for step in steps(strategy, 12):
        count = (SMALL, LARGE)[step % 2]
        arrays = [np.zeros(count), strategy.symmetric_empty(count, np.float64)]
        base = strategy.symmetric_empty(2 * count, np.float64)
        for value in (arrays[step // 2 % 2], arrays.pop(), base[:count], base[count:], arrays.pop()):
            check(strategy, value, step, value)
            del value
        gc.collect(0)


# The life of a strategy


@one_and_two_nodes
def test_arrays_outlive_their_strategy(comm, placement):
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
        check(strategy, array, 3, array)


@one_and_two_nodes
def test_arrays_outlive_a_call_that_failed(strategy, comm):
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


def some(random_, whole):
    """Some of the arrays of a list, in some order."""
    chosen = [index for index in range(len(whole)) if random_.random() < 0.8] or [0]
    if random_.random() < 0.5:
        random_.shuffle(chosen)
    return chosen


@pytest.mark.ranks(3)
@pytest.mark.parametrize("per_node", [False, True])
@pytest.mark.parametrize("parity", [0, 1])
def test_arrays_that_lie_side_by_side_are_added_together_and_nothing_else(on_one_node, comm, per_node, parity):
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
def test_many_small_arrays_are_one_run(on_one_node):
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
def test_ops_of_arrays_where_they_lie(on_one_node):
    rank = on_one_node.topology.rank
    for dtype, op in product((*HALVES, *REALS), ("MEAN", "MIN", "MAX", "PROD")):
        arrays = on_one_node.symmetric_empty_like([np.zeros(count, dtype) for count in (70, 1, 200)])
        for array in arrays:
            array[...] = 1 + (rank + np.arange(array.size)) % 2
        want = on_one_node.reduce(op, [array.copy() for array in arrays])
        all_reduce(on_one_node, op, arrays, out=arrays)
        assert all(bits(array) == bits(right) for array, right in zip(arrays, want, strict=True))
    large = on_one_node.symmetric_empty(LARGE, np.float16)
    large[...] = 60000
    all_reduce(on_one_node, "MEAN", large, out=large)
    assert (large == 60000).all(), "divided before it is rounded"


# Views that do not look like symmetric arrays.
HIDDEN = (
    lambda part: np.lib.stride_tricks.as_strided(part, part.shape, part.strides),
    lambda part: np.asarray(memoryview(part)),
    np.from_dlpack,
)


@pytest.mark.ranks(3)
def test_hidden_views_of_symmetric_arrays_are_reduced_right(on_one_node):
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
def test_arrays_that_change_their_dtype(on_one_node):
    """What was found of an array in one call is not taken for true in the next."""
    array = on_one_node.symmetric_empty(LARGE, np.float32)
    for dtype in (np.float32, np.int32, np.float32):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            array.dtype = dtype
        check(on_one_node, array, 3, array)


@pytest.mark.ranks(3)
def test_views_of_other_libraries_are_recognised_by_address(on_one_node):
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
