"""Phases of calls: staging, waiting for ranks, exchange, adding; which ranks waited, how long, and for which."""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple, final

from mpidist.cli.trace.files import StrategyTrace, TracedCall

__all__ = [
    "ADDING",
    "EXCHANGE",
    "STAGING",
    "WAITING",
    "Phase",
    "RankTimes",
    "StrategyWaits",
    "phases_of",
    "waits_of",
]

STAGING: Final = "staging"
WAITING: Final = "waiting for ranks"
EXCHANGE: Final = "exchange"
ADDING: Final = "adding"


@final
class Phase(NamedTuple):
    """A part of a call, in nanoseconds."""

    name: str
    begun: int
    ended: int


@final
class RankTimes(NamedTuple):
    """Times of one rank, in nanoseconds: in calls, in all from the beginning to the end, and by phases of calls.

    `waited_for`: how long this rank waited until each other rank had joined a call, the last one of all.
    """

    num_calls: int
    in_calls: int
    in_all: int
    phases: Counter[str]
    waited_for: Counter[int]


@final
class StrategyWaits(NamedTuple):
    """The waits in one strategy, by rank; how often each rank came last, and others waited.

    `num_calls` counts the calls that all ranks made together. `longest` is the longest wait in nanoseconds, the rank
    that waited, the one that it waited for, and the call; `None` if nobody waited.
    """

    ranks: dict[int, RankTimes]
    came_last: Counter[int]
    num_calls: int
    longest: tuple[int, int, int, TracedCall] | None

    def waits_for(self, late: int) -> int:
        """Sum up how long all other ranks waited for a rank."""
        return sum(times.waited_for[late] for times in self.ranks.values())


def phases_of(call: TracedCall) -> list[Phase]:
    """Cut a call into its phases.

    `STAGING` is before the rank joins the call, `WAITING` until all ranks have. Then `EXCHANGE` is waiting for data of
    other ranks, and `ADDING` all else: this rank adds and copies. Of a call that was started, and of what a program
    does meanwhile, only waits are known. A call that not all ranks make together is a request: all of it is exchange.
    """
    phases = [Phase(STAGING, call.entered, call.begun)] if call.entered else []
    if not call.sequence:
        return [*phases, Phase(EXCHANGE, call.begun, call.ended)]
    agreed = call.agreed or call.ended
    is_started = call.name.startswith("start_")
    if not is_started:
        phases.append(Phase(WAITING, call.begun, agreed))
    at = agreed
    for begun, ended in call.waits:
        if is_started and begun < agreed:
            phases.append(Phase(WAITING, begun, min(ended, agreed)))
        if ended <= at:
            continue
        begun = max(begun, at)
        if begun > at and not is_started:
            phases.append(Phase(ADDING, at, begun))
        phases.append(Phase(EXCHANGE, begun, ended))
        at = ended
    if call.ended > at and not is_started:
        phases.append(Phase(ADDING, at, call.ended))
    return [phase for phase in phases if phase.ended > phase.begun]


def waits_of(strategy: StrategyTrace) -> StrategyWaits:
    """Compare when the ranks joined each call that they made together.

    A rank waits for the one that joins last, from its own joining to that of the last. The time from then until
    the rank has noticed it is no rank's fault.
    """
    ranks = {rank: _times(trace.calls, trace.ended - trace.begun) for rank, trace in strategy.ranks.items()}
    together: dict[int, dict[int, TracedCall]] = {}
    for rank, trace in strategy.ranks.items():
        for call in trace.calls:
            if call.sequence:
                together.setdefault(call.sequence, {})[rank] = call
    came_last: Counter[int] = Counter()
    longest: tuple[int, int, int, TracedCall] | None = None
    for sequence, calls in together.items():
        late, joined = _last_of(strategy, sequence, calls)
        if late is None:
            continue
        for rank, call in calls.items():
            waited = min(joined, call.agreed or call.ended) - call.begun
            if rank == late or waited <= 0 or call.name.startswith("start_"):
                continue
            ranks[rank].waited_for[late] += waited
            if longest is None or waited > longest[0]:
                longest = waited, rank, late, call
        came_last[late] += len(calls) > 1 or late not in calls
    return StrategyWaits(ranks, came_last, len(together), longest)


def _last_of(strategy: StrategyTrace, sequence: int, calls: dict[int, TracedCall]) -> tuple[int | None, int]:
    """Return the rank that joined a call last, and when; a rank that never did, if all have a trace of that time."""
    absent = [rank for rank in range(strategy.size) if rank not in calls]
    if not absent:
        late = max(calls, key=lambda rank: calls[rank].begun)
        return late, calls[late].begun
    if any(rank not in strategy.ranks for rank in absent) or any(call.agreed for call in calls.values()):
        return None, 0  # all joined it: the end of a killed rank's trace is missing
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
