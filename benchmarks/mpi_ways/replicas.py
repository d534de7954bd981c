"""What a chosen number of replicas costs: one a rank, and eight, beside none, and beside what mpi4py alone offers."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI
from ranks.over_mpi import reduce
from ranks.way import Way

import mpidist
from mpi_ways.all_reduce import raw_ways, way_of
from mpidist.context_stack import parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ranks.over_mpi import Mpi
    from ranks.work import Work

__all__ = ["ways"]

_MANY = 8  # replicas
_MOST_BYTES = 128 << 20  # above, so many replicas need too much memory
_SMALL_BYTES = 4


def ways(mpi: Mpi, work: Work) -> dict[str, Way]:
    """List raw, mpidist without replicas and, where the commit has them, with replicas; of the smallest work, turns."""
    private, strategy = [work.empty() for _ in range(work.calls)], mpi.strategy()
    new = way_of(strategy, work, private, sent=_sent(strategy))
    found = {
        **raw_ways(mpi, private),
        "all_reduce": new,
        "all_reduce out=": way_of(strategy, work, private, private),
        "run": Way(private, lambda at: strategy.run(new.call, (at,)), "all_reduce", new.results),
    }
    if "replicas" not in inspect.signature(mpidist.MultiWorkerMirroredStrategy).parameters:
        return found
    for total in sorted({mpi.size, max(mpi.size, _MANY)}):
        if total == mpi.size or work.nbytes <= _MOST_BYTES:
            found |= _Replicas(mpi, work, total, private).ways()
    return found | (_turns() if work.nbytes <= _SMALL_BYTES else {})


class _Replicas:
    """A number of replicas over all ranks. Each has arrays of its own; those of one rank hold the same numbers."""

    def __init__(self, mpi: Mpi, work: Work, total: int, private: list[list[Any]]) -> None:
        self._comm, self._total, self._is_single = mpi.comm, total, work.kind == "size"
        self._strategy = mpi.strategy(replicas=total)
        self._counts = [len(its) for its in np.array_split(np.arange(total), mpi.size)]
        self._first = sum(self._counts[: mpi.rank])
        self._values = [private]  # [replicas here][calls], arrays
        self._values += [[work.empty() for _ in private] for _ in range(1, self._counts[mpi.rank])]
        self._rows = np.empty(total * max(array.size for array in private[0]), np.float32)

    def ways(self) -> dict[str, Way]:
        """List a call with new results, in place, and with a `run` of its own; then what mpi4py offers instead."""
        new, in_place = self._reduce, partial(self._reduce, is_in_place=True)
        name, sent = f"replicas={self._total}", _sent(self._strategy)
        return {
            name: self._way(new, "all_reduce", within=partial(self._within, new), sent=sent),
            f"{name} out=": self._way(in_place, "all_reduce out=", within=partial(self._within, in_place)),
            f"{name} run": self._way(lambda at: self._strategy.run(new, (at,)), "run", self._first_results),
            f"{self._total} gathered": self._way(self._gather, "raw"),
        }

    def _way(self, call: Callable[[int], Any], baseline: str, results: Any = None, **more: Any) -> Way:
        written = [arrays for own in self._values for arrays in own]
        more["results"] = results or (lambda result: [result] if self._is_single else result)
        return Way(written, call, baseline, expect=self._expect, **more)

    def _expect(self, written: Sequence[Any]) -> Any:
        return sum(count * number for count, number in zip(self._counts, written, strict=True))

    def _within(self, call: Callable[[int], Any], timed: Callable[[], Any]) -> Any:
        """Call a function in the first replica of this rank, and let the others make the same calls."""
        kept = []

        def replica() -> None:
            if self._at() == 0:
                kept.append(timed())
                return
            for at in range(len(self._values[0])):
                call(at)

        self._strategy.run(replica)
        return kept[0]

    def _at(self) -> int:
        context = mpidist.get_replica_context()
        assert context is not None  # inside strategy.run
        return context.replica_id_in_sync_group - self._first

    def _reduce(self, at: int, is_in_place: bool = False) -> Any:
        value = self._values[self._at()][at]
        value = value[0] if self._is_single else value
        return reduce("sum", value, value if is_in_place else None)

    def _first_results(self, result: Any) -> list[Any]:
        """Return the arrays of the first replica of this rank, of what `run` returns."""
        return [leaf.values[0] for leaf in ([result] if self._is_single else result)]

    def _gather(self, at: int) -> Any:
        """Add in order of replicas with mpi4py alone: any number of ranks gives the same bits, and moves most bytes."""
        results = []
        for parts in zip(*(own[at] for own in self._values), strict=True):
            shape, count = parts[0].shape, parts[0].size
            rows = self._rows[: self._total * count].reshape(self._total, count)
            for row, part in zip(rows[self._first :], parts, strict=False):
                row[...] = part.reshape(-1)
            self._comm.Allgatherv(MPI.IN_PLACE, [rows, [count * its for its in self._counts]])
            total = rows[0] + rows[1] if self._total > 1 else rows[0].copy()
            for row in rows[2:]:
                total += row
            results.append(total.reshape(shape))
        return results[0] if self._is_single else results


def _sent(strategy: mpidist.Strategy) -> Callable[[], list[int]]:
    """Count what this rank has sent or received by messages, whatever is more, since the strategy was made."""
    levels = parts_of(strategy).group.levels
    counted = {id(its): its for its in (levels.world.traffic, levels.within_node.traffic, levels.across_nodes.traffic)}
    return lambda: [sum(sum(traffic.nbytes.values()) for traffic in counted.values())]


def _turns() -> dict[str, Way]:
    """List meetings of replicas of one rank, at which nothing is exchanged."""
    from mpidist.replica_context.pending_writes import PendingWrites  # not in older commits
    from mpidist.replica_context.turns import Turns

    def way(count: int) -> Way:
        def replica(turns: Turns) -> None:
            for _ in range(1000):
                turns.meet("a meeting", lambda given, _: given, None)

        def call(_: int) -> Any:
            turns = Turns(range(count), ["cpu"] * count, PendingWrites(range(count)))
            return turns.run([partial(replica, turns)] * count)

        return Way([], call, "")

    return {f"1000 meetings of {count}": way(count) for count in (2, 4, 8)}
