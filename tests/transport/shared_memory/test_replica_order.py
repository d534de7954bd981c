"""Where every rank and node has one row of the replica tree, reductions of a node give the bits of the tree."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.contributions import UFUNCS, bits, flat_trees, in_tree_order, rows_of_this_rank, unlike_numbers
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
COUNTS = [1, 3, 16, 300]


@pytest.fixture(params=[0, CHUNK_BYTES], ids=["two-shot", "one-shot"])
def strategy(
    comm: Intracomm, placement: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Strategy]:
    set_sizes(monkeypatch, chunk_bytes=CHUNK_BYTES, least_bytes=1, one_shot_bytes=request.param, depth=2, fine_count=20)
    with Strategy(comm=comm) as made:
        yield made
        comm.Barrier()  # arrays that all reach are compared


@pytest.fixture
def reducer(strategy: Strategy) -> FusedReducer:
    made = parts_of(strategy).group.levels.fused
    assert made is not None
    return made


@pytest.fixture
def topology(strategy: Strategy) -> Topology:
    return parts_of(strategy).group.topology


@pytest.fixture
def shared(strategy: Strategy) -> SharedArrays:
    return parts_of(strategy).group.shared


def folded(op: str, tree: ReplicaTree, in_rank_order: bool = False) -> Reduction:
    """A reduction in the order of the tree, also where one rank asks for that of ranks."""
    return Reduction(op, in_rank_order=in_rank_order, fold=tree.within_node, fold_across=tree.across_nodes)


def test_all_reduces_of_a_node_follow_the_tree(reducer: FusedReducer, topology: Topology) -> None:
    for tree in flat_trees(topology):
        for op, dtype in [("sum", "f"), ("sum", "F"), ("sum", "h"), ("prod", "d"), ("max", "f"), ("min", "q")]:
            for count in COUNTS:
                numbers = unlike_numbers(tree.total, count, dtype)
                (buffer,) = rows_of_this_rank(tree, UFUNCS[op], numbers)
                reducer.all_reduce(buffer, folded(op, tree, in_rank_order=count == 300))
                assert bits(buffer) == bits(in_tree_order(UFUNCS[op], numbers)), (tree, op, dtype, count)


def test_symmetric_arrays_follow_the_tree(
    reducer: FusedReducer, shared: SharedArrays, topology: Topology, comm: Intracomm
) -> None:
    """From and to shared memory, and in place; divided by those who add."""
    for tree, lengths in product(flat_trees(topology), ([300], [7] * 40, [3, 0, 200, 3])):
        numbers = unlike_numbers(tree.total, sum(lengths), np.float32)
        right = bits(in_tree_order(np.add, numbers) / np.float32(tree.total))
        for outs_are_new in (True, False):
            like = [((length,), np.dtype(np.float32)) for length in lengths]
            mine = shared.empty(like, per_node=False, call="a test")
            outs = shared.empty(like, per_node=False, call="a test") if outs_are_new else mine
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


def everyones(shared: SharedArrays, arrays: list[Any]) -> list[list[Any]]:
    """[ranks][pieces]"""
    places = shared.places(arrays)
    assert places is not None
    return [list(row) for row in zip(*(place.arrays for place in places), strict=True)]
