"""Rows of any replica tree, all-reduced over any transport: the bits of the tree on any number of ranks."""

import random
import time

import numpy as np
import pytest
from support.contributions import (
    UFUNCS,
    bits,
    cancelling,
    in_tree_order,
    replica_tree,
    rows_of_this_rank,
    unlike_numbers,
)
from support.placements import one_and_two_nodes
from support.transports import set_sizes

from mpidist.transport.group.levels import Levels
from mpidist.transport.group.row_reduction import all_reduce_rows
from mpidist.transport.topology import Topology

pytestmark = [pytest.mark.core]

CHUNK_BYTES = 512
MAX_CHUNK_BYTES = 400  # of messages
TRANSPORTS = ["shared_memory", "mpi", "mpi in chunks"]


@pytest.fixture
def topology(comm, placement):
    return Topology.from_labels(comm.rank, placement, ["host"] * comm.size)


@pytest.fixture(params=TRANSPORTS)
def levels(request, comm, topology, monkeypatch):
    if comm.size == 1:
        yield Levels.solo()
        return
    set_sizes(monkeypatch, chunk_bytes=CHUNK_BYTES, least_bytes=1, one_shot_bytes=0, depth=2)
    made = Levels.from_mpi(comm, topology, transport=request.param.split()[0])
    if "chunks" in request.param:
        for level in (made.world, made.within_node, made.across_nodes):
            level.max_chunk_bytes = MAX_CHUNK_BYTES
    yield made
    comm.Barrier()
    made.free()


def trees(topology):
    for total in (4, 5, 7, 8, 13, 16):
        if total >= topology.size:
            yield replica_tree(total, topology)


def reduced(levels, tree, op, numbers, in_place=False):
    rows = rows_of_this_rank(tree, UFUNCS[op], numbers)
    pace = random.Random(f"{tree.total} {op} {len(rows[0])} {levels.world.rank}")
    time.sleep(pace.choice([0] * 10 + [0.0001, 0.002]))  # no call may overtake another one
    out = rows[0] if in_place else np.empty_like(rows[0])
    all_reduce_rows(levels, tree, UFUNCS[op], rows, out)
    return out


def test_row_reduction_has_the_bits_of_its_tree(levels, topology):
    """Of lists of no number, fewer than ranks, and several chunks with a shorter last one."""
    for tree in trees(topology):
        for count in sorted({0, 1, topology.size - 1, topology.size, topology.size + 1, 130, 1000}):
            numbers = unlike_numbers(tree.total, count, np.float64)
            result = reduced(levels, tree, "sum", numbers, in_place=bool(count % 2))
            assert bits(result) == bits(in_tree_order(np.add, numbers)), (tree, count)
        for op, dtype in [("sum", "h"), ("sum", "f"), ("sum", "F"), ("prod", "i"), ("min", "f"), ("max", "Q")]:
            numbers = unlike_numbers(tree.total, 70, dtype)
            result = reduced(levels, tree, op, numbers)
            assert result.dtype == np.dtype(dtype)
            assert bits(result) == bits(in_tree_order(UFUNCS[op], numbers)), (tree, op, dtype)


@pytest.mark.no_mpi
def test_rows_of_one_rank_are_added_in_the_order_of_the_tree():
    tree = replica_tree(8, Topology.from_labels(0, [0], ["host"]))
    assert (reduced(Levels.solo(), tree, "sum", cancelling(100)) == 4).all()


@pytest.mark.ranks(min=2)
def test_traffic_is_that_of_rows_and_of_sums(levels, topology):
    """For the busier direction of this rank's link; shards of whole elements and whole chunks on one node."""
    tree, rank, size, count = replica_tree(13, topology), topology.rank, topology.size, 960
    reduced(levels, tree, "sum", unlike_numbers(13, count, np.float32))
    calls, nbytes = levels.world.traffic.calls["all_reduce"], levels.world.traffic.nbytes["all_reduce"]
    total, own = 4 * count, 4 * count // size
    sent = tree.num_rows[rank] * (total - own) + (size - 1) * own
    received = (sum(tree.num_rows) - tree.num_rows[rank]) * own + total - own
    if topology.num_nodes in (1, size):
        assert calls == 1
        assert nbytes == pytest.approx(max(sent, received), rel=0.02)  # chunks are not all cut into equal shards
    else:
        assert calls == 0
        assert levels.within_node.traffic.calls["all_reduce"] == (topology.local_size > 1)
        lanes = min(topology.node_sizes)
        has_lane = topology.local_rank < lanes
        across = levels.across_nodes.traffic.nbytes["all_reduce"]
        assert (across >= 2 * total // lanes * (topology.num_nodes - 1) // topology.num_nodes - 64) == has_lane


@one_and_two_nodes
def test_waits_check_on_peers(comm, levels, topology):
    """So that they end when a peer is lost."""
    checks = []

    def check_peers():
        if not checks:
            comm.send(None, 0)
        checks.append(True)

    if topology.rank > 0:
        levels.set_wait_hook(check_peers)
    else:
        for other in range(1, comm.size):
            comm.recv(source=other)
    assert (reduced(levels, replica_tree(8, topology), "sum", cancelling(100)) == 4).all()


@one_and_two_nodes
def test_levels_that_compress_are_refused(levels, topology):
    tree = replica_tree(8, topology)
    rows = rows_of_this_rank(tree, np.add, unlike_numbers(8, 10, np.float32))
    with pytest.raises(TypeError, match="CompressingCommunicator; pass the levels for host memory"):
        all_reduce_rows(levels.compressed(np.dtype(np.float16)), tree, np.add, rows, rows[0])
