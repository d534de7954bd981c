"""Where did the ranks of a job part? Read from the flight recorders that they left on disk."""

from __future__ import annotations

import gc
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from mpidist.transport import FILE_VERSION

__all__ = [
    "Call",
    "Difference",
    "FlightFile",
    "FlightFileError",
    "JobFlight",
    "Meeting",
    "RankFlight",
    "Standing",
    "StrategyFlight",
    "find_difference",
    "find_job",
    "find_latecomers",
    "last_meetings",
    "load_job",
    "seconds_behind",
    "standings_of",
]

_FILE: Final = re.compile(r"rank-(\d+)\.json")
_NUMBERED: Final = 1 << 40  # calls from here on, and call 0, are not among those that all ranks count
_NO_NAME: Final = ("a call", "")  # the recorder lost its text
_KINDS: Final = (int, str, str, str, float, float, float)
_STAGES: Final = {"moving": 0.2, "done": 0.4}


class FlightFileError(Exception):
    """A folder without flight recorders, or a file that is none."""


@final
class Call(NamedTuple):
    """One call of a rank. Times in seconds since 1970; 0 for what has not happened."""

    sequence: int
    call: str
    details: str
    state: str
    begun: float
    agreed: float
    ended: float

    @property
    def is_numbered(self) -> bool:
        """Whether it is among the calls that all ranks count."""
        return 0 < self.sequence < _NUMBERED

    @property
    def changed(self) -> float:
        """When it came to be in its state, or began, if it is not over."""
        return self.ended or self.begun


@final
class RankFlight(NamedTuple):
    """The calls of one rank in one strategy, oldest first. `written` is when they were written down."""

    world_rank: int
    rank: int
    written: float
    process: str
    calls: list[Call]


@final
class StrategyFlight(NamedTuple):
    """The ranks of one strategy of which a file tells, by their rank in it; `size` counts the others, too."""

    group: str
    size: int
    ranks: dict[int, RankFlight]

    @property
    def missing(self) -> list[int]:
        """The ranks of which no file tells."""
        return [rank for rank in range(self.size) if rank not in self.ranks]


@final
class FlightFile(NamedTuple):
    """What a file says beside its calls."""

    world_rank: int
    written_by: int
    host: str
    written: float
    reason: str


@final
class JobFlight(NamedTuple):
    """The files of a job, by rank of the world, and what they say of its strategies."""

    folder: Path
    files: dict[int, FlightFile]
    strategies: list[StrategyFlight]


@final
class Standing(NamedTuple):
    """Ranks that stood at the same place when their files were written.

    Attributes:
        ranks: These ranks.
        position: The number of their last call, and a fraction for how far they are in it; -1 before the first.
        last: That call of one of them; `None` before the first.
        process: What the operating system said of them.
        seconds: For how long they had been there, the shortest and the longest.
    """

    ranks: list[int]
    position: float
    last: Call | None
    process: str
    seconds: tuple[float, float]


@final
class Difference(NamedTuple):
    """A number at which ranks made different calls: each with its details and its ranks."""

    sequence: int
    sides: list[tuple[str, str, list[int]]]


@final
class Meeting(NamedTuple):
    """One call of all ranks.

    Attributes:
        sequence: Its number.
        calls: It as each rank recorded it.
        first: The rank that came first.
        last: The rank that came last.
        late_seconds: How long after the first.
        data_seconds: How long the data took, on the slowest rank; `None` if it is not over anywhere.
    """

    sequence: int
    calls: dict[int, Call]
    first: int
    last: int
    late_seconds: float
    data_seconds: float | None


def find_job(folder: Path) -> Path:
    """Choose the folder of a job: the one given, or the newest one in it.

    Raises:
        FlightFileError: If neither has files.
    """
    if not folder.is_dir():
        raise FlightFileError(f"there is no folder {folder}")
    if any(_files_in(folder)):
        return folder
    jobs = {job: [path.stat().st_mtime for path in _files_in(job)] for job in folder.iterdir() if job.is_dir()}
    times = {job: max(found) for job, found in jobs.items() if found}
    if not times:
        raise FlightFileError(f"{folder} has no files rank-N.json, and no folder of a job that has")
    return max(times, key=lambda job: (times[job], job.name))


def load_job(folder: Path) -> JobFlight:
    """Read the files of a job.

    Raises:
        FlightFileError: If one cannot be understood.
    """
    files: dict[int, FlightFile] = {}
    strategies: dict[str, StrategyFlight] = {}
    texts: dict[str, str] = {}
    was_enabled = gc.isenabled()
    gc.disable()  # it would look through millions of calls, again and again
    try:
        for path in sorted(_files_in(folder), key=_rank_in):
            try:
                file, flights = _read(path, texts)
                files[file.world_rank] = file
                for group, size, flight in flights:
                    strategy = strategies.setdefault(group, StrategyFlight(group, size, {}))
                    _require(strategy.size == size, f"{group} has {size} ranks, but {strategy.size} in other files")
                    _require(
                        flight.rank not in strategy.ranks, f"rank {flight.rank} of {group} is in another file, too"
                    )
                    strategy.ranks[flight.rank] = flight
            except (OSError, ValueError, RecursionError) as error:
                raise FlightFileError(f"{path} cannot be understood: {error}") from error
    finally:
        if was_enabled:
            gc.enable()
    return JobFlight(folder, files, sorted(strategies.values(), key=lambda strategy: (-strategy.size, strategy.group)))


def standings_of(strategy: StrategyFlight) -> list[Standing]:
    """Group the ranks by where they stood, those that were behind first."""
    resumed = sorted(_first_after_resets(strategy))
    lasts = {rank: flight.calls[-1] if flight.calls else None for rank, flight in strategy.ranks.items()}
    # Arrays may differ from rank to rank in a call that all ranks agreed on: that is no parting.
    settled = {last.sequence for last in lasts.values() if last and last.agreed}
    groups: dict[tuple[Any, ...], list[int]] = {}
    for rank, flight in sorted(strategy.ranks.items()):
        last = lasts[rank]
        state = () if last is None else (last.call, last.sequence in settled or last.details, last.state)
        groups.setdefault((_position(flight.calls, resumed), flight.process, *state), []).append(rank)
    standings = []
    for (position, process, *_), ranks in groups.items():
        flights = [strategy.ranks[rank] for rank in ranks]
        spans = [max(0.0, flight.written - flight.calls[-1].changed) for flight in flights if flight.calls] or [0.0]
        standings.append(Standing(ranks, position, lasts[ranks[0]], process, (min(spans), max(spans))))
    return sorted(standings, key=lambda standing: (standing.position, standing.ranks))


def seconds_behind(strategy: StrategyFlight, standing: Standing, ahead: Sequence[int]) -> float:
    """Say for how long ranks had been behind those ahead when their files were written.

    Returns:
        Seconds; below zero if the others went on later, or no one knows when.
    """
    own = strategy.ranks[standing.ranks[0]].calls
    number = next((call.sequence for call in reversed(own) if call.is_numbered), 0)
    sequence = own[-1].sequence if own else 0
    went_on = []
    for rank in ahead:
        later = 0.0
        for call in reversed(strategy.ranks[rank].calls):
            if call.sequence == sequence:  # in the same call, who has finished it is ahead, or who is moving data
                later = later or call.ended or call.agreed
            if call.sequence == sequence or (call.is_numbered and call.sequence <= number):
                break
            later = call.begun
        if later:
            went_on.append(later)
    return max(strategy.ranks[rank].written for rank in standing.ranks) - min(went_on, default=math.inf)


def find_difference(strategy: StrategyFlight) -> Difference | None:
    """Find the first number at which ranks made different calls."""
    seen: dict[int, tuple[str, str]] = {}
    mixed = {
        call.sequence
        for flight in strategy.ranks.values()
        for call in flight.calls
        if seen.setdefault(call.sequence, call[1:3]) != call[1:3]
    }
    calls: dict[int, dict[int, Call]] = {sequence: {} for sequence in sorted(mixed)}
    for rank, flight in sorted(strategy.ranks.items()):
        for call in flight.calls if mixed else ():
            if call.sequence in mixed and call.is_numbered and call[1:3] != _NO_NAME:
                calls[call.sequence][rank] = call
    for sequence, of_ranks in calls.items():
        if sides := _sides(of_ranks):
            return Difference(sequence, sides)
    return None


def find_latecomers(strategy: StrategyFlight) -> tuple[list[int], float]:
    """Find the ranks that came to their last call after another rank had given it up.

    Returns:
        The ranks, and how many seconds after the first rank the last of them came.
    """
    lasts = {rank: flight.calls[-1] for rank, flight in strategy.ranks.items() if flight.calls}
    if len({call.sequence for call in lasts.values()}) != 1 or any(call.agreed for call in lasts.values()):
        return [], 0.0
    ends = [call.ended for call in lasts.values() if call.state == "failed"]
    late = [rank for rank, call in sorted(lasts.items()) if ends and call.begun > min(ends)]
    begun = [call.begun for call in lasts.values()]
    return late, max(begun) - min(begun)


def last_meetings(strategy: StrategyFlight, count: int) -> list[Meeting]:
    """Describe the last calls of a strategy, oldest first, as all its ranks recorded them."""
    numbers = {
        call.sequence for flight in strategy.ranks.values() for call in flight.calls[-count:] if call.is_numbered
    }
    chosen = sorted(numbers)[-count:]
    calls: dict[int, dict[int, Call]] = {sequence: {} for sequence in chosen}
    for rank, flight in sorted(strategy.ranks.items()):
        for call in reversed(flight.calls):
            if call.is_numbered and call.sequence < chosen[0]:
                break
            if call.sequence in calls:
                calls[call.sequence][rank] = call
    return [_meeting(sequence, of_ranks) for sequence, of_ranks in calls.items()]


def _meeting(sequence: int, calls: dict[int, Call]) -> Meeting:
    came = {rank: call.begun for rank, call in calls.items()}
    if all(call.agreed for call in calls.values()):
        # All ranks see the agreement at one moment: so counted, it does not matter that clocks of hosts differ.
        came = {rank: call.begun - call.agreed for rank, call in calls.items()}
    first, last = min(came, key=came.__getitem__), max(came, key=came.__getitem__)
    spans = [call.ended - call.agreed for call in calls.values() if call.agreed and call.state == "done"]
    return Meeting(sequence, calls, first, last, came[last] - came[first], max(spans, default=None))


def _sides(calls: Mapping[int, Call]) -> list[tuple[str, str, list[int]]]:
    """Tell those apart that made different calls, or passed different things that they did not agree on."""
    sides: dict[tuple[str, str], list[int]] = {}
    names = {call.call for call in calls.values()}
    if len(names) == 1 and any(call.agreed for call in calls.values()):
        return []
    for rank, call in calls.items():
        sides.setdefault((call.call, call.details if len(names) == 1 else ""), []).append(rank)
    if len(sides) < 2:
        return []
    return [(name, calls[ranks[0]].details, ranks) for (name, _), ranks in sides.items()]


def _position(calls: Sequence[Call], resumed: Sequence[int]) -> float:
    if not calls:
        return -1.0
    last = calls[-1]
    stage = _STAGES.get(last.state, 0.0)
    if last.is_numbered:
        return last.sequence + stage
    at = next((call.sequence for call in reversed(calls) if call.is_numbered), 0)
    return next((number - 0.5 for number in resumed if number > at), float(_NUMBERED)) + stage


def _first_after_resets(strategy: StrategyFlight) -> set[int]:
    return {
        after.sequence
        for flight in strategy.ranks.values()
        for before, after in pairwise(flight.calls)
        if not before.is_numbered and after.is_numbered
    }


def _files_in(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if _FILE.fullmatch(path.name))


def _rank_in(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _read(path: Path, texts: dict[str, str]) -> tuple[FlightFile, list[tuple[str, int, RankFlight]]]:
    told = json.loads(path.read_bytes())
    _require(isinstance(told, dict), f"it holds a {type(told).__name__}, not an object")
    version = _get(told, "version", int)
    _require(version == FILE_VERSION, f"it has version {version}; this mpidist reads version {FILE_VERSION}")
    world_rank = _get(told, "world_rank", int)
    _require(world_rank == _rank_in(path), f"it says that it is of rank {world_rank}")
    written = float(_get(told, "time", float))
    file = FlightFile(
        world_rank, _get(told, "written_by", int), _get(told, "host", str), written, _get(told, "reason", str)
    )
    flights = []
    for group in _get(told, "groups", list):
        _require(isinstance(group, dict), "a group is no object")
        rank, size, process = _get(group, "rank", int), _get(group, "size", int), _get(group, "process", str)
        _require(0 <= rank < size, f"rank {rank} of {size} ranks")
        calls = _calls(_get(group, "calls", list), texts)
        flights.append((_get(group, "group", str), size, RankFlight(world_rank, rank, written, process, calls)))
    return file, flights


def _calls(rows: list[Any], texts: dict[str, str]) -> list[Call]:
    _require(set(map(type, rows)) <= {list} and set(map(len, rows)) <= {len(_KINDS)}, "a call is no list of 7")
    for kind, name, column in zip(_KINDS, Call._fields, zip(*rows, strict=True), strict=False):
        _require(
            set(map(type, column)) <= {kind, int if kind is float else kind},
            f"{name!r} of a call is no {kind.__name__}",
        )
    keep = texts.setdefault  # equal texts once, not in millions of copies
    return [Call(row[0], keep(row[1], row[1]), keep(row[2], row[2]), keep(row[3], row[3]), *row[4:]) for row in rows]


def _get(told: Mapping[str, Any], name: str, kind: type) -> Any:
    _require(name in told, f"it has no {name!r}")
    kinds: Iterable[type] = (int, float) if kind is float else (kind,)
    _require(type(told[name]) in kinds, f"its {name!r} is no {kind.__name__}")
    return told[name]


def _require(is_met: bool, problem: str) -> None:
    if not is_met:
        raise ValueError(problem)
