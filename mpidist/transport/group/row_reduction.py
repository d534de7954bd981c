"""All-reduce of the rows of a replica tree: over all ranks, or within nodes and then across them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from mpidist.transport.communicator import Array, Communicator
from mpidist.transport.group.levels import Levels
from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.mpi.rows import exchange_rows
from mpidist.transport.shared_memory.communicator import SharedMemoryCommunicator
from mpidist.transport.tree import ReplicaTree

__all__ = ["all_reduce_rows"]


def all_reduce_rows(levels: Levels, tree: ReplicaTree, ufunc: np.ufunc, rows: Sequence[Array], out: Array) -> None:
    """Add this rank's rows [n], and those of all other ranks, in the order of the tree, to `out` [n]. Collective.

    For any tree. For a flat tree, a `Reduction` with folds moves as few bytes and is faster. `out` may be one of
    `rows`, which are flat, contiguous, of one dtype and in host memory; `levels` are without compression.
    """
    topology = tree.topology
    if topology.size == 1:
        tree.world.combine(ufunc, rows, (out,))
        return
    world = _over_mpi(levels.world)
    if topology.num_nodes in (1, topology.size):
        exchange_rows(world, tree.num_rows, rows, out, partial(tree.world.combine, ufunc))
        return

    def add(parts: Sequence[Array], outs: Sequence[Array]) -> None:
        """Add the rows of this node to as few rows as the tree allows, and those to the rows of the other nodes."""
        fold, (shard,) = tree.within_node, outs
        sums = list(np.empty((fold.num_rows, shard.size), shard.dtype))
        fold.combine(ufunc, parts, sums)
        across = _over_mpi(levels.across_nodes)
        exchange_rows(across, tree.num_node_rows, sums, shard, partial(tree.across_nodes.combine, ufunc))

    if topology.local_size > 1:
        num_rows = [tree.num_rows[rank] for rank in topology.nodes[topology.node]]
        exchange_rows(_over_mpi(levels.within_node), num_rows, rows, out, add, min(topology.node_sizes))
    elif out.size:
        add(rows, (out,))


def _over_mpi(level: Communicator) -> MpiCommunicator:
    mpi = level.mpi if isinstance(level, SharedMemoryCommunicator) else level
    if not isinstance(mpi, MpiCommunicator):
        raise TypeError(f"rows cannot go through a {type(mpi).__name__}; pass the levels for host memory")
    return mpi
