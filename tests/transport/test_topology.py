"""Ranks on nodes, from a label for each rank."""

import sys

import pytest

from mpidist.transport.text import name_ranks
from mpidist.transport.topology import Topology

pytestmark = pytest.mark.no_mpi

# Labels; then node of each rank, ranks of each node, place of each rank on its node, and whether nodes are even.
ROWS = [
    ("a", (0,), ((0,),), (0,), True),
    ("aabb", (0, 0, 1, 1), ((0, 1), (2, 3)), (0, 1, 0, 1), True),
    ("abcd", (0, 1, 2, 3), ((0,), (1,), (2,), (3,)), (0, 0, 0, 0), True),
    ("aaab", (0, 0, 0, 1), ((0, 1, 2), (3,)), (0, 1, 2, 0), False),
    ("abab", (0, 1, 0, 1), ((0, 2), (1, 3)), (0, 0, 1, 1), True),
    ("zzaza", (0, 0, 1, 0, 1), ((0, 1, 3), (2, 4)), (0, 1, 0, 2, 1), False),
]


def topology(labels, rank=0):
    return Topology.from_labels(rank, labels, [f"host-{label}" for label in labels])


def test_cache_groups_are_several_of_several_ranks():
    for caches, groups in (
        ("aabb", ((0, 1), (2, 3))),
        ("abab", ((0, 2), (1, 3))),
        ("aaabb", ((0, 1, 2), (3, 4))),
        ("aaab", ()),
        ("aaaabb", ()),
        ("abc", ()),
        ("aaaa", ()),
        (["", "", "a", "a"], ()),
        ("", ()),
    ):
        names = tuple(caches)
        assert Topology(0, (0,) * max(len(names), 1), ("host",), names).cache_groups == groups
    of_nodes = [Topology(rank, (0, 0, 0, 0, 1, 1, 1, 1), ("host",), tuple("aabbabab")) for rank in (0, 4)]
    assert [its.cache_groups for its in of_nodes] == [((0, 1), (2, 3)), ((0, 2), (1, 3))]


@pytest.mark.parametrize(("labels", "node_of_rank", "nodes", "local_ranks", "is_even"), ROWS)
def test_nodes_are_numbered_by_first_appearance(labels, node_of_rank, nodes, local_ranks, is_even):
    for rank in range(len(labels)):
        its = topology(labels, rank)
        assert (its.size, its.rank) == (len(labels), rank)
        assert its.node_of_rank == node_of_rank
        assert its.num_nodes == len(nodes)
        assert its.nodes == nodes
        assert its.node_sizes == tuple(map(len, nodes))
        assert its.local_ranks == local_ranks
        assert its.is_even is is_even
        assert its.node == node_of_rank[rank]
        assert its.local_rank == local_ranks[rank]
        assert its.local_size == len(nodes[its.node])
        assert its.is_leader == (rank in [ranks[0] for ranks in nodes])
        assert its.hostnames[rank] == f"host-{labels[rank]}"


def test_thousands_of_ranks_are_placed_in_one_pass():
    """Twice as many ranks take twice as many steps: a pass over the ranks for each node took seconds, on every rank."""
    its = topology([rank % 2048 for rank in range(16384)], rank=16383)
    assert (its.nodes[2047][:2], its.local_rank, its.is_even) == ((2047, 4095), 7, True)
    assert steps_of(1024) < 3 * steps_of(512)


def steps_of(size):
    """Count the lines that Python runs to place so many ranks, eight on each node."""
    number, labels = 0, [rank % (size // 8) for rank in range(size)]

    def note(_, event, __):
        nonlocal number
        number += event == "line"
        return note

    sys.settrace(note)
    try:
        its = topology(labels)
        assert its.local_ranks[-1] == 7
    finally:
        sys.settrace(None)
    return number


def test_any_label_will_do():
    labels = [[7, 7, -3], ["n1", "n1", "n0"], [(1, 2), (1, 2), None]]
    assert {topology(one).node_of_rank for one in labels} == {(0, 0, 1)}


def test_topology_str_lists_nodes_and_ranks():
    assert str(topology("a")) == "1 rank on 1 node; node 0 (host-a): rank 0"
    assert str(topology("aab")) == "3 ranks on 2 nodes; node 0 (host-a): ranks 0-1; node 1 (host-b): rank 2"


def test_ranks_are_named_in_few_words():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 2]) == "ranks 0, 2"
    assert name_ranks([5, 2, 1, 0]) == "ranks 0-2, 5"
    assert name_ranks([0, 1, 3, 4, 6]) == "ranks 0-1, 3-4, 6"
    assert name_ranks(range(1000)) == "ranks 0-999"
    assert name_ranks({9, 8}) == "ranks 8-9"
    assert name_ranks(rank for rank in (1, 0)) == "ranks 0-1"
