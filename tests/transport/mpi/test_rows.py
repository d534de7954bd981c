"""Rows of a replica tree as messages: how many bytes they are."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.contributions import bits, in_tree_order, replica_tree, rows_of_this_rank, unlike_numbers
from support.ranks import Intracomm

from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.mpi.rows import all_reduce_rows, row_traffic
from mpidist.transport.reduction import Reduction
from mpidist.transport.topology import Topology

Messages = Sequence[tuple[Any, int]]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("limit", [1 << 30, 300])
def test_as_many_bytes_move_as_are_counted(comm: Intracomm, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = Topology.from_labels(comm.rank, [0] * comm.size, ["host"] * comm.size)
    communicator = MpiCommunicator(comm.Dup(), "all", limit)
    moved = [0, 0]
    transfer = MpiCommunicator.transfer

    def counting(self: MpiCommunicator, sends: Messages, receives: Messages) -> None:
        for at, messages in enumerate((sends, receives)):
            moved[at] += sum(part.nbytes for part, _ in messages)
        transfer(self, sends, receives)

    monkeypatch.setattr(MpiCommunicator, "transfer", counting)
    for total in (comm.size, 8, 13):
        tree = replica_tree(total, topology)
        count = 600  # whole shards, of every chunk too
        numbers = unlike_numbers(total, count, np.float32)
        (out, *_) = rows = rows_of_this_rank(tree, np.add, numbers)
        moved[:] = 0, 0
        communicator.traffic.clear()
        all_reduce_rows(communicator, tree.world, tree.num_rows, np.add, rows, out)
        assert bits(out) == bits(in_tree_order(np.add, numbers))
        nbytes, own = count * 4, count * 4 // comm.size
        if limit > nbytes:
            assert tuple(moved) == row_traffic(tree.num_rows, comm.rank, nbytes, own), total
            assert communicator.traffic.nbytes == {"all_reduce": max(moved)}
        assert communicator.traffic.calls == {"all_reduce": 1}
        if tree.num_rows == (1,) * comm.size:
            counted = communicator.traffic.nbytes["all_reduce"]
            communicator.traffic.clear()
            communicator.all_reduce(out, Reduction(in_rank_order=True))
            assert communicator.traffic.nbytes == {"all_reduce": counted}
    communicator.free()


@pytest.mark.no_mpi
def test_other_numbers_of_ranks_than_divisors_of_the_replicas_cost_more_rows() -> None:
    """8 replicas on 4 ranks: 2 S (P - 1) / P. On 3: 5 / 3 of the reduce-scatter half, 4 / 3 in all."""
    assert {row_traffic((1, 1, 1, 1), rank, 1200, 300) for rank in range(4)} == {(1800, 1800)}
    tree = replica_tree(8, Topology.from_labels(0, [0, 0, 0], ["host"] * 3))
    sent, received = zip(*(row_traffic(tree.num_rows, rank, 900, 300) for rank in range(3)), strict=True)
    in_rank_order = 3 * 2 * 900 * 2 // 3
    assert sum(sent) == sum(received) == in_rank_order * 4 // 3
    half = 3 * 900 * 2 // 3
    assert sum(sent) - half == half * 5 // 3
