"""The all-reduces that the cost model predicts, by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ranks.way import Way

from mpi_ways.all_reduce import raw_ways, way_of
from mpidist import HierarchicalCopyAllReduce
from mpidist.context_stack import parts_of
from mpidist.transport.mpi.ring import ring_all_reduce
from mpidist.transport.reduction import Reduction

if TYPE_CHECKING:
    from collections.abc import Callable

    from ranks.over_mpi import Mpi
    from ranks.work import Work

__all__ = ["ways"]


def ways(mpi: Mpi, work: Work) -> dict[str, Way]:
    """List mpidist as a program calls it, the algorithms alone, and MPI's own; all in place."""
    strategy = mpi.strategy(cross_device_ops=HierarchicalCopyAllReduce())
    levels, private = parts_of(strategy).group.levels, [work.empty()]
    node, nodes, fused, total = levels.within_node, levels.across_nodes, levels.fused, Reduction()

    def leader(array: Any) -> None:
        node.reduce(array, total, root=0)
        if node.rank == 0:
            nodes.all_reduce(array, total)
        node.broadcast(array, root=0)

    def hierarchical(array: Any) -> None:
        nodes.all_reduce(node.reduce_scatter(array, total), total)
        node.all_gather(array)

    def way(function: Callable[[Any], None]) -> Way:
        def call(at: int) -> Any:
            function(private[at][0])
            return private[at]

        return Way(private, call)

    found = {"mpidist": way_of(strategy, work, private, private), "leader": way(leader)}
    if levels.is_even:
        found["hierarchical"] = way(hierarchical)
    if fused is not None:
        found["two_shot"] = way(lambda array: fused.all_reduce(array, total))
    found["ring"] = way(lambda array: ring_all_reduce(levels.world, array, total))
    return {**found, "raw in place": raw_ways(mpi, private)["raw in place"]}
