"""The cost of a chosen number of replicas: one a rank, and eight, compared with none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from backends.mpi import Mpi, context, reduce
from harness.work import Way, Work

from cases.sums import raw_ways

_MANY = 8
_MOST_BYTES = 128 << 20  # above, so many replicas need too much memory


def replicas(mpi: Mpi, work: Work) -> dict[str, Way]:
    """List raw, and `run` of a sum without replicas and with replicas, with new results and in place."""
    private = [work.empty() for _ in range(work.calls)]
    totals = [None, mpi.size, *([_MANY] if mpi.size < _MANY and work.nbytes <= _MOST_BYTES else [])]
    found = raw_ways(mpi, private)
    for total in totals:
        name = f"replicas={total}" if total else "run"
        found[name] = _way(mpi, work, private, total, in_place=False)
        found[f"{name}, out="] = _way(mpi, work, private, total, in_place=True)
    return found


def _way(mpi: Mpi, work: Work, private: list[list[Any]], total: int | None, in_place: bool) -> Way:
    """Sum over replicas. Each has its own arrays; those of one rank hold the same numbers."""
    strategy = mpi.strategy(replicas=total) if total else mpi.strategy()
    counts = [len(its) for its in np.array_split(np.arange(total or mpi.size), mpi.size)]
    first, is_single = sum(counts[: mpi.rank]), work.kind == "size"
    values = [private, *([work.empty() for _ in private] for _ in range(1, counts[mpi.rank]))]  # [replicas here][calls]

    def replica(at: int) -> Any:
        value = values[int(context().replica_id_in_sync_group) - first][at]
        value = value[0] if is_single else value
        return reduce("sum", value, value if in_place else None)

    def results(result: Any) -> list[Any]:
        """Return the arrays of the first replica of this rank."""
        leaves = [result] if is_single else result
        return [leaf.values[0] for leaf in leaves] if total else leaves

    def expect(written: Sequence[Any]) -> Any:
        return sum(count * number for count, number in zip(counts, written, strict=True))

    baseline = ("run, out=" if in_place else "run") if total else ("raw in place" if in_place else "raw")
    arrays = [arrays for own in values for arrays in own]
    return Way(arrays, lambda at: strategy.run(replica, (at,)), baseline, results, expect=expect)
