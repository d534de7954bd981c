"""Chooses how the rows of a replica tree are all-reduced: through shared memory, or by messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidist.transport.communicator import Array
from mpidist.transport.group.levels import Levels
from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.mpi.rows import all_reduce_rows as all_reduce_by_messages
from mpidist.transport.shared_memory.communicator import SharedMemoryCommunicator
from mpidist.transport.shared_memory.rows import RowsInSlots, fits_into_slots
from mpidist.transport.tree import ReplicaTree

__all__ = ["all_reduce_rows"]


def all_reduce_rows(levels: Levels, tree: ReplicaTree, ufunc: np.ufunc, rows: Sequence[Array], out: Array) -> None:
    """Add the rows of all ranks, in the order of the tree, on every rank. Collective.

    For any tree. For a flat tree, a `Reduction` with folds moves as few bytes and is faster.

    Args:
        levels: The levels for host memory, without compression.
        tree: The order, of the ranks and nodes of the levels.
        ufunc: The operation on two arrays.
        rows: This rank's rows, `tree.num_rows[rank]` arrays [n] of host memory: flat, contiguous and of one dtype.
        out: [n], takes the sum. May be one of `rows`.
    """
    topology, fused = tree.topology, levels.fused
    world = levels.world.mpi if isinstance(levels.world, SharedMemoryCommunicator) else levels.world
    if topology.size == 1:
        tree.world.combine(ufunc, rows, (out,))
    elif not isinstance(world, MpiCommunicator):
        raise TypeError(f"rows cannot go through a {type(world).__name__}; pass the levels for host memory")
    elif fused is not None and topology.num_nodes < topology.size and fits_into_slots(fused, tree, out.dtype):
        across_nodes = levels.across_nodes if isinstance(levels.across_nodes, MpiCommunicator) else None
        RowsInSlots(fused, across_nodes, tree, ufunc, rows, out).run()
    else:
        all_reduce_by_messages(world, tree.world, tree.num_rows, ufunc, rows, out)
