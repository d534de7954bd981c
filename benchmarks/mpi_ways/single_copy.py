"""Large arrays within a node: through shared memory, by single copies, and by the way that a trial takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_ways.all_reduce import raw_ways, way_of

if TYPE_CHECKING:
    from ranks.over_mpi import Mpi
    from ranks.way import Way
    from ranks.work import Work

__all__ = ["ways"]

_NAMES = {"never": "shared memory", "always": "single copies", "auto": "by trial"}


def ways(mpi: Mpi, work: Work) -> dict[str, Way]:
    """List raw ways, and both ways of mpidist, into new results and in place."""
    private = [work.empty() for _ in range(work.calls)]
    found = raw_ways(mpi, private)
    for value, name in _NAMES.items():
        for place, outs in (("", None), (", in place", private)):  # each finds its way by itself
            strategy = mpi.strategy({"MPIDIST_SINGLE_COPY": value})
            found[f"{name}{place}"] = way_of(strategy, work, private, outs)
    return found
