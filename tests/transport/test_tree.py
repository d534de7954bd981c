"""The tree over replicas: rows, folds, and the same bits however replicas are spread."""

import math
import random
from functools import reduce
from itertools import pairwise

import numpy as np
import pytest
from support.contributions import bits, contribution, in_tree_order, unlike_numbers
from support.placements import PLACEMENTS

from mpidist.transport.communicator import shard_bounds
from mpidist.transport.topology import Topology
from mpidist.transport.tree import Fold, ReplicaTree, rows_of

pytestmark = pytest.mark.no_mpi

MOST_REPLICAS = 16
LARGE = 100_003  # elements: several blocks


def topology_of(rank, nodes):
    return Topology.from_labels(rank, nodes, ["host"] * len(nodes))


def nodes_of(size):
    """Every kind of nodes that tests pretend, of `size` ranks."""
    yield from dict.fromkeys(tuple(place(rank, size) for rank in range(size)) for place in PLACEMENTS.values())


def trees(total, size, nodes):
    """The tree as each rank has it."""
    return [ReplicaTree(tuple(shard_bounds(total, size)), topology_of(rank, nodes)) for rank in range(size)]


def combined(fold, ufunc, parts):
    outs = [np.full_like(parts[0], 99) for _ in range(fold.num_rows)]
    assert len(parts) == fold.num_parts
    fold.combine(ufunc, parts, outs)
    return outs


def rows_of_ranks(of, ufunc, numbers):
    bounds = of[0].bounds
    return [
        combined(tree.local, ufunc, numbers[start:stop])
        for tree, (start, stop) in zip(of, pairwise(bounds), strict=True)
    ]


def joined(of, ufunc, numbers):
    """The sum, by way of the ranks, and by way of the nodes."""
    rows = rows_of_ranks(of, ufunc, numbers)
    (flat,) = combined(of[0].world, ufunc, [row for its in rows for row in its])
    topology = of[0].topology
    of_nodes = [
        combined(of[ranks[-1]].within_node, ufunc, [row for rank in ranks for row in rows[rank]])
        for ranks in topology.nodes
    ]
    (by_nodes,) = combined(of[-1].across_nodes, ufunc, [row for its in of_nodes for row in its])
    assert of[0].num_rows == tuple(map(len, rows))
    assert of[0].num_node_rows == tuple(map(len, of_nodes))
    return {"world": flat, "nodes": by_nodes}


def subtrees(start, stop):
    yield start, stop
    if stop - start > 1:
        middle = max(start + 2**power for power in range(10) if 2**power < stop - start)
        yield from subtrees(start, middle)
        yield from subtrees(middle, stop)


def test_rows_are_the_largest_subtrees_of_a_set():
    choose = random.Random(1)
    for total in range(1, 34):
        for _ in range(30):
            replicas = sorted(choose.sample(range(total), choose.randint(1, total)))
            inside = [row for row in subtrees(0, total) if {*range(*row)} <= {*replicas}]
            largest = [
                row for row in inside if not any(row != other and {*range(*row)} < {*range(*other)} for other in inside)
            ]
            assert rows_of(total, replicas) == sorted(largest), (total, replicas)


def test_tree_bits_do_not_depend_on_the_spread_of_replicas():
    for total in range(1, MOST_REPLICAS + 1):
        numbers = unlike_numbers(total, 50, np.float32)
        right = bits(in_tree_order(np.add, numbers))
        for size in range(1, total + 1):
            for nodes in nodes_of(size):
                for way, result in joined(trees(total, size, nodes), np.add, numbers).items():
                    assert bits(result) == right, (size, nodes, way)


def test_tree_order_holds_for_all_operations():
    """Integers wrap around. Which of two zeros is the least depends on their order, not on how replicas are spread."""
    ufuncs = [(np.add, "Q"), (np.multiply, "i"), (np.add, "F"), (np.maximum, "q")]
    choose = np.random.default_rng(3)
    for total, size in [(7, 3), (8, 3), (13, 5), (16, 4)]:
        signed = list(choose.choice([0.0, -0.0, np.nan, 1.0, -1.0], (total, 64), p=[0.4, 0.4, 0.02, 0.09, 0.09]))
        work = [(ufunc, unlike_numbers(total, 33, dtype)) for ufunc, dtype in ufuncs]
        for ufunc, numbers in [*work, (np.minimum, signed), (np.maximum, signed)]:
            for nodes in nodes_of(size):
                for way, result in joined(trees(total, size, nodes), ufunc, numbers).items():
                    assert result.dtype == numbers[0].dtype
                    assert bits(result) == bits(in_tree_order(ufunc, numbers)), (ufunc, total, nodes, way)
    powers = [contribution("prod", replica, 33, np.dtype("F")) for replica in range(13)]  # exact, of 2 and of i
    for nodes in nodes_of(5):
        for result in joined(trees(13, 5, nodes), np.multiply, powers).values():
            assert (result == in_tree_order(np.multiply, powers)).all(), nodes


def test_outs_may_be_any_of_the_parts():
    choose = random.Random(4)
    for _ in range(300):
        total = choose.randint(1, 16)
        size = choose.randint(1, min(total, 4))
        tree = choose.choice(trees(total, size, [choose.randrange(2) for _ in range(size)]))
        fold = choose.choice([tree.local, tree.world, tree.within_node, tree.across_nodes])
        parts = unlike_numbers(fold.num_parts, 10, np.float64)
        right = [bits(row) for row in combined(fold, np.add, [part.copy() for part in parts])]
        assert fold.num_rows <= fold.num_parts
        outs = choose.sample(parts, fold.num_rows)
        if choose.random() < 0.5:  # other objects, the same memory
            outs = [out[:] for out in outs]
        fold.combine(np.add, parts, outs)
        assert [bits(out) for out in outs] == right, (tree.bounds, fold.num_parts)


def test_large_parts_go_block_by_block():
    (tree, *_) = trees(8, 3, [0, 0, 0])
    numbers = unlike_numbers(8, LARGE, np.float32)
    assert bits(joined(trees(8, 3, [0, 1, 0]), np.add, numbers)["nodes"]) == bits(in_tree_order(np.add, numbers))
    right = [bits(row) for row in combined(tree.local, np.add, [part.copy() for part in numbers[:3]])]
    outs = [numbers[2], numbers[0]]
    tree.local.combine(np.add, numbers[:3], outs)
    assert [bits(out) for out in outs] == right


def test_few_partial_sums_are_held_at_once():
    for total in (2, 64, 63, 33):
        fold = Fold(total, [[replica] for replica in range(total)])
        made = 0

        def counting(one, other, out=None):
            nonlocal made
            made += out is None
            return np.add(one, other, out=out)

        (out, *parts) = [np.ones(4) for _ in range(total + 1)]
        fold.combine(counting, parts, [out])
        assert (out == total).all()
        assert made <= math.ceil(math.log2(total))


def test_overflows_raise_nothing():
    parts = [np.full(2, 3e38, np.float32) for _ in range(4)]
    with np.errstate(all="raise"):
        (result,) = combined(Fold(4, [range(1), range(1, 2), range(2, 3), range(3, 4)]), np.add, parts)
    assert np.isinf(result).all()


def test_flat_trees_have_one_row_a_rank_and_a_node():
    for total, nodes, is_flat in (
        (8, (0, 0, 0, 0), True),
        (8, (0, 0, 1, 1), True),
        (8, (0, 1, 0, 1), False),
        (8, (0, 0, 0, 1), False),
        (8, (0, 0, 0), False),
        (6, (0, 0, 1), True),
        (8, (0,), True),
    ):
        assert trees(total, len(nodes), nodes)[0].is_flat == is_flat


def test_ranks_can_compare_their_trees():
    made = trees(8, 3, [0, 0, 1])
    assert {repr(tree) for tree in made} == {"ReplicaTree(bounds=(0, 3, 6, 8))"}
    assert (made[0].total, made[0].num_rows) == (8, (2, 2, 1))


def test_wrong_bounds_and_groups_are_refused():
    for bounds in ((0, 4), (0, 4, 4, 8), (1, 3, 5, 8), (0, 5, 3, 8)):
        with pytest.raises(ValueError, match="3 ranks; needed 4 rising numbers"):
            ReplicaTree(bounds, topology_of(0, [0, 0, 0]))
    with pytest.raises(ValueError, match="in two groups"):
        Fold(4, [[0, 1], [1]])


def test_folds_in_order_need_no_tree():
    for total in range(1, 10):
        numbers = unlike_numbers(total, 40, np.float64)
        is_same = bits(reduce(np.add, numbers)) == bits(in_tree_order(np.add, numbers))
        assert Fold(total, [[replica] for replica in range(total)]).is_in_order == is_same == (total < 4)
    assert Fold(8, [range(4), range(4, 8)]).is_in_order
    assert not Fold(3, [[1], [0], [2]]).is_in_order
    assert not Fold(4, [[0], [1], [2]]).is_in_order  # two rows
