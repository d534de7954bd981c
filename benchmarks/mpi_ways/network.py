"""Sums between hosts, in place: by default, the same bits on any placement, and compressed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_ways.all_reduce import raw_ways, way_of
from mpidist import CommunicationOptions

if TYPE_CHECKING:
    from ranks.over_mpi import Mpi
    from ranks.way import Way
    from ranks.work import Work

__all__ = ["ways"]


def ways(mpi: Mpi, work: Work) -> dict[str, Way]:
    """List raw, and mpidist with its options. Compressed numbers are rounded twice."""
    private, strategy = [work.empty() for _ in range(work.calls)], mpi.strategy()
    default, same = CommunicationOptions(), CommunicationOptions(reproducible=True)
    bf16, fp16 = (CommunicationOptions(compression=name) for name in ("bf16", "fp16"))
    of = "mpidist in place"
    return {
        "raw in place": raw_ways(mpi, private)["raw in place"],
        of: way_of(strategy, work, private, private, default),
        "mpidist reproducible": way_of(strategy, work, private, private, same, baseline=of),
        "mpidist bf16": way_of(strategy, work, private, private, bf16, baseline=of, tolerance=2.0**-7),
        "mpidist fp16": way_of(strategy, work, private, private, fp16, baseline=of, tolerance=2.0**-10),
    }
