"""All-reduce of the rows of a replica tree by messages: over all ranks, or within nodes and then across them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Final

import numpy as np

from mpidist.transport.communicator import Array, Communicator, shard_bounds
from mpidist.transport.group.levels import Levels
from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.shared_memory.communicator import SharedMemoryCommunicator
from mpidist.transport.tree import ReplicaTree

__all__ = ["all_reduce_rows", "exchange_rows", "row_traffic"]

_CHUNK_BYTES: Final = 4 << 20  # of the sum: what the rows of a shard take is a few times as much


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


def exchange_rows(
    communicator: MpiCommunicator,
    num_rows: Sequence[int],
    rows: Sequence[Array],
    out: Array,
    add: Callable[[Sequence[Array], Sequence[Array]], None],
    lanes: int | None = None,
) -> None:
    """Add the rows of all ranks on every rank, and write the sum to `out` [n], which may be one of `rows`. Collective.

    Every rank sends the first `lanes` ranks, by default all, its rows of their shards; each of these adds its own
    shard, and sends the sum to all: two rounds of messages, of which the first has one message for each row. With P
    ranks, S bytes and k rows on this rank, whose shard has s bytes, it sends k (S - s) + (P - 1) s bytes.

    `add`, as `Fold.combine`, adds parts, of all `num_rows` in rank order, to one shard, which may be one of them.
    """
    rank, others = communicator.rank, communicator.others
    lanes = communicator.size if lanes is None else lanes
    first = list(accumulate(num_rows, initial=0))  # of the parts of each rank
    nbytes = 0
    step = max(1, min(_CHUNK_BYTES, communicator.max_chunk_bytes) // out.itemsize)
    for begin in range(0, out.size, step):
        end = min(begin + step, out.size)
        bounds = [*(begin + bound for bound in shard_bounds(end - begin, lanes)), *[end] * (communicator.size - lanes)]
        shards = [slice(start, stop) for start, stop in pairwise(bounds)]
        own = out[shards[rank]]
        parts = list(communicator.scratch(first[-1] * own.size, out.dtype).reshape(first[-1], own.size))
        parts[first[rank] : first[rank + 1]] = [row[shards[rank]] for row in rows]
        communicator.transfer(
            [(row[shards[other]], other) for other in others for row in rows],
            [(part, other) for other in others for part in parts[first[other] : first[other + 1]]],
        )
        if own.size:
            add(parts, (own,))
        communicator.transfer([(own, other) for other in others], [(out[shards[other]], other) for other in others])
        nbytes += own.nbytes
    communicator.traffic.add("all_reduce", max(row_traffic(num_rows, rank, out.nbytes, nbytes)))


def row_traffic(num_rows: Sequence[int], rank: int, nbytes: int, own: int) -> tuple[int, int]:
    """Return how many bytes a rank sends and receives if ranks exchange rows, and then the sums of shards.

    Rows have `nbytes`, and the rank's own shard of each has `own` bytes.
    """
    of_others = sum(num_rows) - num_rows[rank]
    return num_rows[rank] * (nbytes - own) + (len(num_rows) - 1) * own, of_others * own + nbytes - own
