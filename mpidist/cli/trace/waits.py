"""Who waited, how long, and for whom?"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, final

from mpidist.cli.trace.files import StrategyTrace, TracedCall
from mpidist.cli.trace.phases import phases_of

__all__ = ["LongestWait", "RankTimes", "StrategyWaits", "waits_of"]


@final
class RankTimes(NamedTuple):
    """What one rank did, in nanoseconds.

    Attributes:
        num_calls: Number of calls.
        in_calls: The time in them.
        in_all: The time from the beginning of the trace to its end.
        phases: The time in each phase of calls.
        waited_for: How long this rank waited until each other rank had joined a call, the last one of all.
    """

    num_calls: int
    in_calls: int
    in_all: int
    phases: Counter[str]
    waited_for: Counter[int]


@final
class LongestWait(NamedTuple):
    """The longest wait of a rank for another one in one call, in nanoseconds."""

    time: int
    rank: int
    late: int
    call: TracedCall


@final
class StrategyWaits(NamedTuple):
    """The waits in one strategy.

    Attributes:
        ranks: What each rank did.
        came_last: How often a rank was the last one, by a wait of others.
        num_calls: The number of calls that all ranks made together.
        longest: The longest wait; `None` if nobody waited.
    """

    ranks: dict[int, RankTimes]
    came_last: Counter[int]
    num_calls: int
    longest: LongestWait | None

    def waits_for(self, late: int) -> int:
        """Sum up how long all other ranks waited for a rank."""
        return sum(times.waited_for[late] for times in self.ranks.values())


def waits_of(strategy: StrategyTrace) -> StrategyWaits:
    """Compare when the ranks joined each call that they made together.

    A rank waits for the one that joins last, from its own joining to that of the last. What passes afterwards, until
    the rank has learnt of it, is nobody's fault.
    """
    ranks = {rank: _times(trace.calls, trace.ended - trace.begun) for rank, trace in strategy.ranks.items()}
    together: dict[int, dict[int, TracedCall]] = {}
    for rank, trace in strategy.ranks.items():
        for call in trace.calls:
            if call.sequence:
                together.setdefault(call.sequence, {})[rank] = call
    came_last: Counter[int] = Counter()
    longest: LongestWait | None = None
    for sequence, calls in together.items():
        late, joined = _last_of(strategy, sequence, calls)
        if late is None:
            continue
        for rank, call in calls.items():
            waited = min(joined, call.agreed or call.ended) - call.begun
            if rank == late or waited <= 0 or call.name.startswith("start_"):
                continue
            ranks[rank].waited_for[late] += waited
            if longest is None or waited > longest.time:
                longest = LongestWait(waited, rank, late, call)
        came_last[late] += len(calls) > 1 or late not in calls
    return StrategyWaits(ranks, came_last, len(together), longest)


def _last_of(strategy: StrategyTrace, sequence: int, calls: dict[int, TracedCall]) -> tuple[int | None, int]:
    """Return the rank that joined a call last, and when; a rank that never did, if all have a trace of that time."""
    absent = [rank for rank in range(strategy.size) if rank not in calls]
    if not absent:
        late = max(calls, key=lambda rank: calls[rank].begun)
        return late, calls[late].begun
    if any(rank not in strategy.ranks for rank in absent):
        return None, 0
    behind = [rank for rank in absent if all(call.sequence < sequence for call in strategy.ranks[rank].calls)]
    return (behind[0], max(call.ended for call in calls.values())) if behind else (None, 0)


def _times(calls: list[TracedCall], in_all: int) -> RankTimes:
    phases: Counter[str] = Counter()
    in_calls = last = 0
    for call in calls:
        for phase in phases_of(call):
            phases[phase.name] += phase.ended - phase.begun
        begun = max(call.entered or call.begun, last)  # calls may overlap
        in_calls += max(call.ended - begun, 0)
        last = max(last, call.ended)
    return RankTimes(len(calls), in_calls, in_all, phases, Counter())
