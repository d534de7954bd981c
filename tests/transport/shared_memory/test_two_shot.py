"""Fused arrays through shared memory and across nodes: any arrays, any dtype, many chunks, at any pace.

Chunks have 128 bytes, so that a few hundred numbers take all slots in turn, several times.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

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
    flat_trees,
    in_tree_order,
    reduction_of,
    rows_of_this_rank,
    unlike_numbers,
)
from support.placements import one_and_two_nodes
from support.ranks import Intracomm
from support.transports import set_sizes

from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.transport.node_memory.symmetric import SharedArrays
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory.fused_reducer import FusedReducer
from mpidist.transport.shared_memory.in_place import InPlace
from mpidist.transport.shared_memory.two_shot import FusedArrays
from mpidist.transport.topology import Topology
from mpidist.transport.tree import ReplicaTree
from mpidist.transport.waiting import complete

pytestmark = [pytest.mark.core, pytest.mark.ranks(min=2)]

CHUNK_BYTES = 128
FINE_COUNT = 20  # smaller pieces, on average, are copied before they are added
LENGTHS = [[1], [300], [0, 5, 0, 64, 1, 1, 1, 130], [7] * 60, [3, 0, 200, 3]]  # pieces


@pytest.fixture
def strategy(
    comm: Intracomm, placement: object, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Strategy]:
    sizes = {"chunk_bytes": CHUNK_BYTES, "one_shot_bytes": getattr(request, "param", 0), "fine_count": FINE_COUNT}
    set_sizes(monkeypatch, **sizes, least_bytes=1, depth=2)
    with Strategy(comm=comm) as made:
        yield made
        comm.Barrier()  # arrays that all reach are compared


@pytest.fixture
def reducer(strategy: Strategy) -> FusedReducer:
    made = parts_of(strategy).group.levels.fused
    assert made is not None
    assert made.slots.slot_bytes == CHUNK_BYTES
    return made


@pytest.fixture
def shared(strategy: Strategy) -> SharedArrays:
    return parts_of(strategy).group.shared


def pieces(op: str, rank: int, lengths: Sequence[int], dtype: Any) -> list[Any]:
    """What a rank contributes: one list of numbers, cut into pieces, each an array of its own."""
    numbers = contribution(op, rank, sum(lengths), dtype)
    return [part.copy() for part in np.split(numbers, np.cumsum(lengths)[:-1])]


def expected(op: str, size: int, lengths: Sequence[int], dtype: Any) -> list[Any]:
    return np.split(reduction_of(op, size, sum(lengths), dtype), np.cumsum(lengths)[:-1])


def are_equal(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return all((one == other).all() for one, other in zip(some, others, strict=True))


def zeros(shared: SharedArrays, lengths: Sequence[int], dtype: Any, per_node: bool = False) -> list[Any]:
    """Arrays that all ranks of the node reach. Collective."""
    return shared.empty([((length,), dtype) for length in lengths], per_node, call="a test")


def everyones(shared: SharedArrays, arrays: Sequence[Any]) -> list[list[Any]]:
    """[ranks][pieces] of such arrays."""
    places = shared.places(arrays)
    assert places is not None
    return [list(row) for row in zip(*(place.arrays for place in places), strict=True)]


class Kind:
    """Where fused arrays lie."""

    def __init__(self, sources: str, results: str) -> None:
        self.sources, self.results = sources, results

    def fuse(self, shared: SharedArrays, values: list[Any], dtype: Any) -> tuple[FusedArrays, list[Any]]:
        """Fuse values; return also where the results will be. Collective."""
        lengths = [value.size for value in values]
        peers = None
        if self.sources == "symmetric":
            mine = zeros(shared, lengths, dtype)
            for array, value in zip(mine, values, strict=True):
                array[...] = value
            values, peers = mine, everyones(shared, mine)
        arrays = FusedArrays(dtype, values, peers=peers)
        if self.results == "in place":
            results = values
            if peers is None:
                arrays.results = values
            else:
                arrays.shared = peers
        elif self.results == "new":
            arrays.results = results = [np.full(length, 99, dtype) for length in lengths]
        else:
            results = zeros(shared, lengths, dtype, per_node=self.results == "per node")
            arrays.shared = everyones(shared, results)
        return arrays, results


KINDS = {
    f"{sources} to {results}": Kind(sources, results)
    for sources in ("private", "symmetric")
    for results in ("in place", "new", "symmetric", "per node")
}


# At any pace


class Dawdling:
    """A reduction that naps now and then, and is otherwise the one that it stands for."""

    def __init__(self, reduction: Reduction, nap: Callable[[], None]) -> None:
        self._reduction, self._nap = reduction, nap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reduction, name)

    @property
    def rest(self) -> Any:
        return Dawdling(self._reduction.rest, self._nap)

    def combine(self, parts: Any, out: Any) -> int:
        self._nap()
        overflowed = self._reduction.combine(parts, out)
        self._nap()
        return overflowed


def nap(random_: random.Random, often: float) -> None:
    if random_.random() < often:
        time.sleep(random_.choice([0, 0.0001, 0.001]))


def test_transfers_do_not_overtake_each_other(reducer: FusedReducer, shared: SharedArrays, comm: Intracomm) -> None:
    """One after the other with nothing in between, of all kinds and sizes, some ranks slow at any place."""
    same = random.Random(comm.size)  # on all ranks
    mine = random.Random(comm.rank)
    doze = partial(nap, mine, 0.1 if comm.rank == same.randrange(comm.size) else 0.01)
    work = []
    for number in range(25):
        kind = KINDS[same.choice(list(KINDS))]
        dtype = same.choice([REALS[0], INTEGERS[0], HALVES[0], COMPLEX[1]])
        lengths = same.choice([[1], [3, 4], [200], [5] * 40, [64, 0, 64], [33, 1, 1, 1, 90]])
        values = [value + dtype.type(number % 3) for value in pieces("sum", comm.rank, lengths, dtype)]
        right = [value + dtype.type(comm.size * (number % 3)) for value in expected("sum", comm.size, lengths, dtype)]
        work.append((*kind.fuse(shared, values, dtype), right))
    comm.Barrier()
    for arrays, _, _ in work:
        doze()
        transfer = reducer.two_shot(arrays, Dawdling(Reduction("sum"), doze))  # type: ignore[arg-type]
        has_passed_barrier = mine.random() < 0.5  # before it comes to the first barrier, or as it does
        if has_passed_barrier:
            transfer.begin()
            doze()
            reducer.synchronize()
            doze()
        with np.errstate(all="ignore"):
            for _ in transfer.steps(has_passed_barrier):
                doze()
                time.sleep(0)
    for number, (_, results, right) in enumerate(work):
        assert are_equal(results, right), number
    comm.Barrier()


@one_and_two_nodes
def test_a_transfer_may_have_begun_before_the_ranks_met(reducer: FusedReducer, comm: Intracomm) -> None:
    """The first chunk is staged; the barrier is somebody else's, as that of the agreement."""
    dtype = np.dtype(np.float64)
    for lengths in LENGTHS:
        for _ in range(2):
            values = pieces("sum", comm.rank, lengths, dtype)
            transfer = reducer.two_shot(FusedArrays(dtype, values), Reduction("sum"))
            transfer.begin()
            reducer.synchronize()
            transfer.arrays.results = [np.zeros(length) for length in lengths]
            complete(transfer.steps(has_passed_barrier=True), reducer.check_peers)
            assert are_equal(transfer.arrays.results, expected("sum", comm.size, lengths, dtype)), lengths


@one_and_two_nodes
def test_a_transfer_may_be_left_after_its_beginning(reducer: FusedReducer, comm: Intracomm) -> None:
    """Ranks that learn that they differ begin again; one of them had not begun."""
    dtype = np.dtype(np.float64)
    for odd in range(comm.size):
        values = pieces("sum", comm.rank, [100], dtype)
        if comm.rank != odd:
            reducer.two_shot(FusedArrays(dtype, [np.full(100, -1.0)]), Reduction("sum")).begin()
        reducer.synchronize()
        results = [np.zeros(100)]
        reducer.run(reducer.two_shot(FusedArrays(dtype, values, results), Reduction("sum")))
        assert are_equal(results, expected("sum", comm.size, [100], dtype))


@pytest.mark.ranks(3)
def test_small_and_large_lists_take_turns(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one round share the slots with the others."""
    set_sizes(monkeypatch, chunk_bytes=CHUNK_BYTES, one_shot_bytes=CHUNK_BYTES, fine_count=FINE_COUNT)
    mine = random.Random(comm.rank)
    with Strategy(comm=comm) as strategy:
        reducer = parts_of(strategy).group.levels.fused
        assert reducer is not None
        for count in [1, 16, 17, 100, 3, 3, 3, 200, 16, 5] * 5:
            nap(mine, 0.1)
            buffer = contribution("sum", comm.rank, count, REALS[1])
            assert reducer.is_small(buffer.nbytes) == (count <= 16)
            reducer.all_reduce(buffer, Reduction("sum"))
            assert (buffer == reduction_of("sum", comm.size, count, REALS[1])).all()


one_round_and_two = pytest.mark.parametrize("strategy", [0, CHUNK_BYTES], indirect=True, ids=["two-shot", "one-shot"])

COUNTS = [1, 3, 16, 300]


@pytest.fixture
def topology(strategy: Strategy) -> Topology:
    return parts_of(strategy).group.topology


def folded(op: str, tree: ReplicaTree, in_rank_order: bool = False) -> Reduction:
    """A reduction in the order of the tree, also where one rank asks for that of ranks."""
    return Reduction(op, in_rank_order=in_rank_order, fold=tree.within_node, fold_across=tree.across_nodes)


@one_round_and_two
def test_all_reduces_of_a_node_follow_the_tree(reducer: FusedReducer, topology: Topology) -> None:
    for tree in flat_trees(topology):
        for op, dtype in [("sum", "f"), ("sum", "F"), ("sum", "h"), ("prod", "d"), ("max", "f"), ("min", "q")]:
            for count in COUNTS:
                numbers = unlike_numbers(tree.total, count, dtype)
                (buffer,) = rows_of_this_rank(tree, UFUNCS[op], numbers)
                reducer.all_reduce(buffer, folded(op, tree, in_rank_order=count == 300))
                assert bits(buffer) == bits(in_tree_order(UFUNCS[op], numbers)), (tree, op, dtype, count)


@one_round_and_two
def test_symmetric_arrays_follow_the_tree(
    reducer: FusedReducer, shared: SharedArrays, topology: Topology, comm: Intracomm
) -> None:
    """From and to shared memory, and in place; divided by those who add."""
    for tree, lengths in product(flat_trees(topology), ([300], [7] * 40, [3, 0, 200, 3])):
        numbers = unlike_numbers(tree.total, sum(lengths), np.float32)
        right = bits(in_tree_order(np.add, numbers) / np.float32(tree.total))
        for outs_are_new in (True, False):
            mine = zeros(shared, lengths, np.dtype(np.float32))
            outs = zeros(shared, lengths, np.dtype(np.float32)) if outs_are_new else mine
            fill(mine, rows_of_this_rank(tree, np.add, numbers)[0])
            comm.Barrier()
            arrays = FusedArrays(np.dtype(np.float32), mine, peers=everyones(shared, mine))
            arrays.shared = everyones(shared, outs)
            reducer.run(reducer.two_shot(arrays, folded("sum", tree), tree.total))
            assert bits(np.concatenate(outs)) == right, (tree, outs_are_new)
            comm.Barrier()
            if topology.num_nodes == 1:
                fill(mine, rows_of_this_rank(tree, np.add, numbers)[0])
                places, into = shared.places(mine), shared.places(outs)
                assert places is not None
                assert into is not None
                runs = shared.runs(places, into, np.dtype(np.float32))
                transfer = InPlace(runs, reducer.slots, folded("sum", tree), tree.total)
                complete(transfer.steps(has_passed_barrier=False), reducer.check_peers)
                assert bits(np.concatenate(outs)) == right, (tree, outs_are_new)
                comm.Barrier()


def fill(arrays: list[Any], numbers: Any) -> None:
    for array, part in zip(arrays, np.split(numbers, np.cumsum([array.size for array in arrays])[:-1]), strict=True):
        array[...] = part
