"""Who parted, in sentences for people who were woken up by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, final

from mpidist.cli.flight_report import (
    Call,
    Standing,
    StrategyFlight,
    find_difference,
    find_latecomers,
    seconds_behind,
    standings_of,
)
from mpidist.transport import name_ranks

__all__ = ["Verdict", "judge_all", "name_call", "place_text", "seconds_text", "some_of"]

_TOLERANCE_SECONDS: Final = 0.1  # by which clocks of hosts may differ, and ranks that are well
_MOST: Final = 5
_PROCESSES: Final = {"gone": "gone: the process has ended", "stopped": "stopped, by a signal or a debugger"}


@final
class Verdict(NamedTuple):
    """What is to be said of a strategy.

    Attributes:
        strategy: This one.
        standings: Where its ranks stood.
        parted: Whether ranks parted.
        lines: Who, how and when; if nobody did, where all are.
    """

    strategy: StrategyFlight
    standings: list[Standing]
    parted: bool
    lines: list[str]


def judge_all(strategies: Sequence[StrategyFlight]) -> list[Verdict]:
    """Say of each strategy of a job who parted."""
    open_calls = {
        flight.world_rank: f"{name_call(flight.calls[-1])} of strategy {strategy.group}"
        for strategy in strategies
        for flight in strategy.ranks.values()
        if flight.calls and flight.calls[-1].state in ("waiting", "moving")
    }
    return [_judge(strategy, open_calls) for strategy in strategies]


def _judge(strategy: StrategyFlight, open_calls: Mapping[int, str]) -> Verdict:
    standings = standings_of(strategy)
    lines = []
    for process, meaning in _PROCESSES.items():
        if ranks := [rank for standing in standings if standing.process == process for rank in standing.ranks]:
            lines.append(f"{_are(ranks)} {meaning}")
    if missing := strategy.missing:
        lines.append(f"no file tells of {name_ranks(missing)}: gone, or stuck with nobody on the node to write one")
    difference = find_difference(strategy)
    if difference is not None:
        sides = [f"{name_ranks(ranks)} called {_with(call, details)}" for call, details, ranks in difference.sides]
        lines.append(f"at call {difference.sequence} {', '.join(some_of(sides, _MOST, 'other calls'))}")
    lines += some_of(_behind(strategy, standings, open_calls), _MOST, "places with ranks behind")
    late, seconds = find_latecomers(strategy)
    if late and difference is None:
        lines.append(f"{name_ranks(late)} came when others had given up, {seconds_text(seconds)} after the first rank")
    failed = [
        rank for standing in standings if standing.last and standing.last.state == "failed" for rank in standing.ranks
    ]
    if failed and not lines and len(failed) < len(strategy.ranks):
        lines.append(f"{name_ranks(failed)} failed, the others did not")
    return Verdict(strategy, standings, bool(lines), lines or [_together(strategy.size, standings)])


def place_text(standing: Standing) -> str:
    """Say where ranks stood: `rank 5 is in call 1041, all_reduce (SUM of ...), for 12.0 s: moving data`."""
    ranks, _, last, process, spans = standing
    who = name_ranks(ranks) + (f" ({process})" if process in _PROCESSES else "")
    one = len(ranks) == 1
    if last is None:
        return f"{who} made no call"
    call, (short, long) = _with(name_call(last), last.details), map(seconds_text, spans)
    span = long if short == long else f"{short} to {long}"
    if last.state == "done":
        return f"{who} finished {call}, and made no call for {span}"
    if last.state == "failed":
        return f"{who} failed in {call}, {span} ago"
    if process == "gone":
        return f"{who} {'was' if one else 'were'} in {call}, begun {span} ago: {last.state}"
    if last.state == "waiting":
        return f"{who} {'waits' if one else 'wait'} in {call}, for {span}"
    return f"{who} {'is' if one else 'are'} in {call}, for {span}: moving data"


def name_call(call: Call) -> str:
    """Name a call by its number, if it has one: `call 1041, all_reduce`."""
    return f"call {call.sequence}, {call.call}" if call.is_numbered else call.call


def seconds_text(seconds: float) -> str:
    """Say how long that is, in the unit that people would choose."""
    if seconds < 9.95e-3:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 119.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def some_of(texts: Sequence[str], most: int, others: str) -> list[str]:
    """Leave out the last of too many texts, and say how many these were."""
    return [*texts] if len(texts) <= most else [*texts[: most - 1], f"and {len(texts) - most + 1} {others}"]


def _behind(strategy: StrategyFlight, standings: Sequence[Standing], open_calls: Mapping[int, str]) -> list[str]:
    leaders = [standing for standing in standings if standing.position == standings[-1].position]
    ahead = [rank for standing in leaders for rank in standing.ranks]
    furthest = leaders[-1].last
    if furthest is None:
        return []
    lines = []
    for standing in standings[: -len(leaders)]:
        is_same_call = int(standing.position) == int(leaders[-1].position)
        has_failed = standing.last is not None and standing.last.state == "failed"
        seconds = seconds_behind(strategy, standing, ahead)
        is_lost = standing.process in _PROCESSES or (has_failed and not is_same_call)
        if not is_lost and (has_failed or seconds <= _TOLERANCE_SECONDS):
            continue
        when = f" {seconds_text(seconds)} ago" if seconds > 0 else ""
        where = "within" if is_same_call else "as far as"
        line = f"{_are(standing.ranks)} behind: {name_ranks(ahead)} went on{when}, {where} {name_call(furthest)}"
        is_out = standing.process not in _PROCESSES and (standing.last is None or standing.last.state == "done")
        elsewhere = {open_calls.get(strategy.ranks[rank].world_rank, "") for rank in standing.ranks}
        if is_out and "" not in elsewhere:
            line += f". {'It is' if len(standing.ranks) == 1 else 'They are'} in {' or '.join(sorted(elsewhere)[:3])}"
        elif is_out and len(ahead) * 2 < len(strategy.ranks):
            line += ". Is that a call which only some ranks make?"
        lines.append(line)
    return lines


def _together(size: int, standings: Sequence[Standing]) -> str:
    first, last = standings[0].last, standings[-1].last
    ranks = f"all {size} ranks" if size > 1 else "the only rank"
    if last is None:
        return f"nobody parted: {ranks} made no call"
    if first is None or first.sequence != last.sequence:
        least = name_call(first) if first else "the start"
        return (
            f"nobody parted: the ranks are between {least}, and {name_call(last)}; when its file was written, "
            f"none was behind for more than {seconds_text(_TOLERANCE_SECONDS)}"
        )
    states = {standing.last.state for standing in standings if standing.last}
    verb = {"done": "finished", "failed": "failed in"}.get(states.pop(), "are in") if len(states) == 1 else "are in"
    return f"nobody parted: {ranks} {verb if size > 1 else verb.replace('are', 'is')} {name_call(last)}"


def _are(ranks: Sequence[int]) -> str:
    return f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'}"


def _with(call: str, details: str) -> str:
    return f"{call} ({details})" if details else call
