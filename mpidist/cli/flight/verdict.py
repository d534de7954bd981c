"""Places of a strategy's ranks, and the ranks that are behind, or made another call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias, final

from mpidist.cli.flight.job import Call, RankFlight, StrategyFlight
from mpidist.transport.text import group_ranks, name_ranks, time_text

__all__ = ["Place", "Verdict", "judge", "some_of"]

_TOLERANCE_SECONDS: Final = 0.1  # by which clocks of hosts may differ, and ranks of a healthy job
_MOST: Final = 5
_PROCESSES: Final = {"gone": "gone: the process has ended", "stopped": "stopped, by a signal or a debugger"}
_STAGES: Final = {"moving": 1, "done": 2}  # how far a rank is in its call; 0 for waiting and failed
_NO_NAME: Final = ("a call", "")  # the recorder lost the text of the call

Position: TypeAlias = tuple[float, int]  # the number of a call, and the stage in the call
Difference: TypeAlias = tuple[int, list[tuple[str, str, list[int]]]]  # a number; the calls, their details, their ranks


@final
class Place(NamedTuple):
    """Ranks that stood at the same place when their files were written, and for how long, the shortest and the longest.

    `position` is (-1, 0) before the first call; `last` is the last call of one of them, and `process` the
    state of their processes.
    """

    ranks: list[int]
    position: Position
    last: Call | None
    process: str
    seconds: tuple[float, float]

    def __str__(self) -> str:
        """Describe the place: `rank 5 is in call 1041, all_reduce (SUM of ...), for 12.0 s: moving data`."""
        who = name_ranks(self.ranks) + (f" ({self.process})" if self.process in _PROCESSES else "")
        is_one, last = len(self.ranks) == 1, self.last
        if last is None:
            return f"{who} made no call"
        call, (short, long) = _with(last.name, last.details), map(time_text, self.seconds)
        span = long if short == long else f"{short} to {long}"
        if last.state == "done":
            return f"{who} finished {call}, and made no call for {span}"
        if last.state == "failed":
            return f"{who} failed in {call}, {span} ago"
        if self.process == "gone":
            return f"{who} {'was' if is_one else 'were'} in {call}, begun {span} ago: {last.state}"
        if last.state == "started":
            return f"{who} started {call}, and did not wait for it or make another call for {span}"
        if last.state == "waiting":
            return f"{who} {'waits' if is_one else 'wait'} in {call}, for {span}"
        return f"{who} {'is' if is_one else 'are'} in {call}, for {span}: moving data"


@final
class Verdict(NamedTuple):
    """Verdict on a strategy: where its ranks stood, those behind first, and the first different call.

    It has diverged if ranks are behind, lost, or made different calls. `lines` say which and when; if none, where all
    are.
    """

    strategy: StrategyFlight
    places: list[Place]
    difference: Difference | None
    has_diverged: bool
    lines: list[str]


def judge(strategy: StrategyFlight, are_files_damaged: bool = False) -> Verdict:
    """Find the ranks of a strategy that diverged. `are_files_damaged`: files of some ranks are left out."""
    places, difference, lines = _places(strategy), _find_difference(strategy), _leavers(strategy)
    for process, meaning in _PROCESSES.items():
        if ranks := [rank for place in places if place.process == process for rank in place.ranks]:
            lines.append(f"{_are(ranks)} {meaning}")
    if missing := strategy.missing:
        why = "gone, or stuck or in one long call, and no process on the node wrote one"
        lines.append(f"no file of {name_ranks(missing)}: {why}{', or damaged' * are_files_damaged}")
    if difference is not None:
        sides = [f"{name_ranks(ranks)} called {_with(call, details)}" for call, details, ranks in difference[1]]
        lines.append(f"at call {difference[0]} {', '.join(some_of(sides, _MOST, 'other calls'))}")
    rest = "no rank is lost: workers send requests to servers at any time"
    calls = [call for flight in strategy.ranks.values() for call in flight.calls]
    if not calls or any(call.sequence for call in calls):  # workers and parameter servers alone do not number theirs
        rest = _together(strategy.size, places)
        lines += some_of(_behind(strategy, places), _MOST, "places with ranks behind")
        if difference is None:
            lines += _latecomers(strategy)
    failed = [rank for place in places if place.last and place.last.state == "failed" for rank in place.ranks]
    if failed and not lines and len(failed) < len(strategy.ranks):
        lines.append(f"{name_ranks(failed)} failed, the others did not")
    return Verdict(strategy, places, difference, bool(lines), lines or [rest])


def _leavers(strategy: StrategyFlight) -> list[str]:
    """Name the ranks that exceptions of their own ended, unless they ended all ranks."""
    left = {rank: flight.file.reason for rank, flight in sorted(strategy.ranks.items()) if flight.file.has_left}
    texts = [f"{name_ranks(ranks)} left because of an exception: {why}" for why, ranks in group_ranks(left).items()]
    return some_of(texts, _MOST, "other exceptions") if len(left) < strategy.size else []


def some_of(texts: Sequence[str], most: int, others: str) -> list[str]:
    """Leave out the last of too many texts, and count these."""
    return [*texts] if len(texts) <= most else [*texts[: most - 1], f"and {len(texts) - most + 1} {others}"]


def _places(strategy: StrategyFlight) -> list[Place]:
    """Group the ranks by where they stood, those that were behind first."""
    flights = strategy.ranks
    resumed = sorted(
        after.sequence
        for flight in flights.values()
        for before, after in pairwise(flight.calls)
        if not before.is_numbered and after.is_numbered
    )
    # Details may differ from rank to rank in a call that all ranks agreed on.
    agreed = {flight.last.sequence for flight in flights.values() if flight.last and flight.last.agreed}
    kinds: dict[int, tuple[Any, ...]] = {}
    for rank, flight in flights.items():
        last = flight.last
        what = () if last is None else (last.call, last.sequence in agreed or last.details, last.state)
        kinds[rank] = (_position(flight, resumed), flight.process, *what)
    places = []
    for (position, process, *_), ranks in group_ranks(kinds).items():
        members = [flights[rank] for rank in ranks]
        spans = [one.file.written - (one.last.ended or one.last.begun) for one in members if one.last] or [0.0]
        places.append(Place(ranks, position, members[0].last, process, (max(min(spans), 0.0), max(*spans, 0.0))))
    return sorted(places, key=lambda place: (place.position, place.ranks))


def _position(flight: RankFlight, resumed: Sequence[int]) -> Position:
    """Return a rank's position. A reset stands before the calls after it, of any rank: their numbers are `resumed`."""
    if flight.last is None:
        return -1, 0
    number: float = flight.number
    if not flight.last.is_numbered:
        number = next((after - 0.5 for after in resumed if after > number), math.inf)
    return number, _STAGES.get(flight.last.state, 0)


def _find_difference(strategy: StrategyFlight) -> Difference | None:
    """Find the first number at which ranks made different calls, or passed what they did not agree on."""
    seen: dict[int, dict[tuple[str, str], list[int]]] = {}
    agreed = set()
    for rank, flight in sorted(strategy.ranks.items()):
        for call in flight.calls:
            if call.is_numbered and call[1:3] != _NO_NAME:
                seen.setdefault(call.sequence, {}).setdefault((call.call, call.details), []).append(rank)
                if call.agreed:
                    agreed.add(call.sequence)
    for sequence, sides in sorted(seen.items()):
        by_name: dict[str, tuple[str, str, list[int]]] = {}
        for (name, details), ranks in sides.items():
            by_name.setdefault(name, (name, details, []))[2].extend(ranks)
        if len(by_name) > 1:
            return sequence, [(name, details, sorted(ranks)) for name, details, ranks in by_name.values()]
        if len(sides) > 1 and sequence not in agreed:
            return sequence, [(*side, ranks) for side, ranks in sides.items()]
    return None


def _behind(strategy: StrategyFlight, places: Sequence[Place]) -> list[str]:
    leaders = [place for place in places if place.position == places[-1].position]
    ahead, furthest = [rank for place in leaders for rank in place.ranks], leaders[-1].last
    lines = []
    for place in places[: -len(leaders)]:
        is_same_call = place.position[0] == leaders[-1].position[0]
        has_failed = place.last is not None and place.last.state == "failed"
        seconds = _seconds_behind(strategy, place, ahead)
        is_lost = place.process in _PROCESSES or (has_failed and not is_same_call)
        if furthest is not None and (is_lost or (seconds > _TOLERANCE_SECONDS and not has_failed)):
            when = f" {time_text(seconds)} ago" if seconds > 0 else ""
            where = "within" if is_same_call else "as far as"
            lines.append(f"{_are(place.ranks)} behind: {name_ranks(ahead)} went on{when}, {where} {furthest.name}")
    return lines


def _seconds_behind(strategy: StrategyFlight, place: Place, ahead: Sequence[int]) -> float:
    """Return how long before the files were written the first of the ranks ahead continued; below zero if none did."""
    flight = strategy.ranks[place.ranks[0]]
    sequence = flight.last.sequence if flight.last else 0
    went_on = []
    for rank in ahead:
        later = 0.0
        for call in reversed(strategy.ranks[rank].calls):
            if call.sequence == sequence:  # a rank that moves data, or has finished, is ahead in the same call
                later = later or call.ended or call.agreed
            if call.sequence == sequence or (call.is_numbered and call.sequence <= flight.number):
                break
            later = call.begun
        if later:
            went_on.append(later)
    return max(strategy.ranks[rank].file.written for rank in place.ranks) - min(went_on, default=math.inf)


def _latecomers(strategy: StrategyFlight) -> list[str]:
    """Name the ranks that came to their last call after another rank had given the call up."""
    lasts = {rank: flight.last for rank, flight in sorted(strategy.ranks.items()) if flight.last}
    if len({call.sequence for call in lasts.values()}) != 1 or any(call.agreed for call in lasts.values()):
        return []
    given_up = min((call.ended for call in lasts.values() if call.state == "failed"), default=math.inf)
    late = [rank for rank, call in lasts.items() if call.begun > given_up]
    begun = [call.begun for call in lasts.values()]
    after = f"{time_text(max(begun) - min(begun))} after the first rank"
    return [f"{name_ranks(late)} came when others had given up, {after}"] if late else []


def _together(size: int, places: Sequence[Place]) -> str:
    first, last = places[0].last, places[-1].last
    ranks = f"all {size} ranks" if size > 1 else "the only rank"
    if last is None:
        return f"nobody diverged: {ranks} made no call"
    if first is None or first.sequence != last.sequence:
        least = first.name if first else "the start"
        return f"nobody diverged: the ranks are between {least}, and {last.name}, and none stayed behind"
    states = {place.last.state for place in places if place.last}
    verb = {"done": "finished", "failed": "failed in"}.get(states.pop(), "") if len(states) == 1 else ""
    return f"nobody diverged: {ranks} {verb or ('are in' if size > 1 else 'is in')} {last.name}"


def _are(ranks: Sequence[int]) -> str:
    return f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'}"


def _with(call: str, details: str) -> str:
    return f"{call} ({details})" if details else call
