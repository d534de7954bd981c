"""Sums by each algorithm of mpidist."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mpidist
from mpi_ways.all_reduce import raw_ways, way_of

if TYPE_CHECKING:
    from ranks.over_mpi import Mpi
    from ranks.way import Way
    from ranks.work import Work

__all__ = ["ways"]


def ways(mpi: Mpi, work: Work) -> dict[str, Way]:
    """List the algorithms, all with new results, beside raw."""
    private = [work.empty() for _ in range(work.calls)]
    parts = {
        "CollectiveAllReduce": {"cross_device_ops": mpidist.CollectiveAllReduce()},
        "HierarchicalCopyAllReduce": {"cross_device_ops": mpidist.HierarchicalCopyAllReduce()},
        "ReductionToOneDevice": {"cross_device_ops": mpidist.ReductionToOneDevice()},
        "ring": {"communication_options": mpidist.CommunicationOptions(implementation="RING")},
        "reproducible": {"communication_options": mpidist.CommunicationOptions(reproducible=True)},
    }
    ours = {name: way_of(mpi.strategy(**its), work, private) for name, its in parts.items()}
    return {"raw": raw_ways(mpi, private)["raw"], **ours}
