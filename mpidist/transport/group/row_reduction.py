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
    """Add this rank's rows [n], and those of all other ranks, in the order of the tree, to `out` [n]. Collective.

    For any tree. For a flat tree, a `Reduction` with folds moves as few bytes and is faster. `out` may be one of
    `rows`, which are flat, contiguous, of one dtype and in host memory; `levels` are without compression.
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
