"""All-reduce in two levels: within each node, across nodes, and within each node again."""

from __future__ import annotations

from typing import Any, final

from mpidist.cross_device_ops.cross_device_ops import CrossDeviceOps
from mpidist.transport.costs.cost_model import LEADER_BYTES
from mpidist.transport.group.levels import Levels
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory.fused_reducer import FusedReducer

__all__ = ["HierarchicalCopyAllReduce"]


@final
class HierarchicalCopyAllReduce(CrossDeviceOps):
    """Reduce within each node, all-reduce across nodes, copy within each node.

    Large messages, from a size on that the machine's cost model gives, are sent chunk by chunk, so that network and
    memory work at the same time. If the smallest node has L ranks, L ranks of each node add one of L shards of each
    chunk through shared memory; the ranks of all nodes that have the same shard all-reduce it; every rank copies the
    sums out. With S bytes and K nodes, 2 S (K - 1) / K bytes per node on the network, the least possible. Nodes are
    added in order.

    Smaller messages, and all messages without shared memory, with G ranks on each node: reduce-scatter within the
    node, S (G - 1) / G bytes; all-reduce of a shard across nodes, 2 (S / G) (K - 1) / K; all-gather within the node,
    S (G - 1) / G. If nodes have different numbers of ranks, or S is at most 16 KiB, one leader per node communicates:
    reduce to the leader, S bytes; all-reduce among leaders, 2 S (K - 1) / K; broadcast from the leader, S.

    On one node, or with one rank per node, the algorithm is a single all-reduce of 2 S (P - 1) / P bytes.

    Args:
        num_packs: As in `CrossDeviceOps`.

    Source: the two-level scheme is folklore of MPI libraries; its halves are those of Rabenseifner, "Optimization of
    collective reduction operations", ICCS 2004. The name is tf.distribute's.
    """

    _compresses_between_nodes = True

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__(num_packs)

    def _all_reduce(self, levels: Levels, buffer: Any, reduction: Reduction) -> None:
        node = levels.within_node
        if node.size == levels.world.size or (levels.is_even and node.size == 1):
            levels.world.all_reduce(buffer, reduction)
        elif levels.is_even and buffer.nbytes > LEADER_BYTES:
            shard = node.reduce_scatter(buffer, reduction)
            levels.across_nodes.all_reduce(shard, reduction.rest)
            node.all_gather(buffer)
        else:
            node.reduce(buffer, reduction, root=0)
            if node.rank == 0:
                levels.across_nodes.all_reduce(buffer, reduction.rest)
            node.broadcast(buffer, root=0)

    def _fused_reducer_of(self, levels: Levels) -> FusedReducer | None:
        return levels.fused
