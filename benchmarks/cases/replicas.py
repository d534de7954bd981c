"""The cost of a chosen number of replicas: one a rank, and eight, compared with none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from backends.mpi import Mpi, context, reduce
from harness.work import Way, Work

from cases.sums import raw_ways, way_of

__all__ = ["ways"]

_MANY = 8  # replicas
_MOST_BYTES = 128 << 20  # above, so many replicas need too much memory


def ways(mpi: Mpi, work: Work) -> dict[str, Way]:
    """List raw, and mpidist without replicas and with replicas."""
    private, strategy = [work.empty() for _ in range(work.calls)], mpi.strategy()
    new = way_of(strategy, work, private)
    found = {
        **raw_ways(mpi, private),
        "all_reduce": new,
        "all_reduce out=": way_of(strategy, work, private, private),
        "run": Way(private, lambda at: strategy.run(new.call, (at,)), "all_reduce", new.results),
    }
    for total in sorted({mpi.size, max(mpi.size, _MANY)}):
        if total == mpi.size or work.nbytes <= _MOST_BYTES:
            found |= _Replicas(mpi, work, total, private).ways(f"replicas={total}")
    return found


class _Replicas:
    """A number of replicas over all ranks. Each has arrays of its own; those of one rank hold the same numbers."""

    def __init__(self, mpi: Mpi, work: Work, total: int, private: list[list[Any]]) -> None:
        self._is_single = work.kind == "size"
        self._strategy = mpi.strategy(replicas=total)
        self._counts = [len(its) for its in np.array_split(np.arange(total), mpi.size)]
        self._first = sum(self._counts[: mpi.rank])
        self._values = [private]  # [replicas here][calls], arrays
        self._values += [[work.empty() for _ in private] for _ in range(1, self._counts[mpi.rank])]

    def ways(self, name: str) -> dict[str, Way]:
        """List a call with new results, in place, and with a `run` of its own."""
        new, in_place = self._reduce, partial(self._reduce, is_in_place=True)
        return {
            name: self._way(new, "all_reduce", within=partial(self._within, new)),
            f"{name} out=": self._way(in_place, "all_reduce out=", within=partial(self._within, in_place)),
            f"{name} run": self._way(lambda at: self._strategy.run(new, (at,)), "run", self._first_results),
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
        return int(context().replica_id_in_sync_group) - self._first

    def _reduce(self, at: int, is_in_place: bool = False) -> Any:
        value = self._values[self._at()][at]
        value = value[0] if self._is_single else value
        return reduce("sum", value, value if is_in_place else None)

    def _first_results(self, result: Any) -> list[Any]:
        """Return the arrays of the first replica of this rank, of what `run` returns."""
        return [leaf.values[0] for leaf in ([result] if self._is_single else result)]
