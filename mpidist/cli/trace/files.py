"""The traces of a job, read from the files that its ranks wrote, with all times on one clock."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from mpidist.transport.trace.clocks import ClockSample
from mpidist.transport.trace.trace import TRACE_VERSION

__all__ = ["JobTrace", "RankTrace", "StrategyTrace", "TraceFileError", "TracedCall", "find_trace", "load_trace"]

_FILE: Final = re.compile(r"rank-\d+-\w+\.jsonl")
_NUMBERED: Final = 1 << 40  # calls from here on, and call 0, are not among those that all ranks count


class TraceFileError(Exception):
    """A folder without traces, or a file that holds something else."""


@final
class TracedCall(NamedTuple):
    """One call of a rank. Times in nanoseconds; 0 for what has not happened.

    Attributes:
        sequence: The number of the call among those that all ranks make together; 0 for other calls.
        name: The name of the call.
        details: What the flight recorder says of the call.
        entered: When the rank began to stage arrays.
        begun: When the rank joined the call.
        agreed: When all ranks had joined.
        ended: When the call ended; if it did not, when the rank was seen last.
        end: `"done"`, `"failed"` or `"not seen"`.
        waits: The beginnings and ends of the rank's waits, in order, all within the call.
    """

    sequence: int
    name: str
    details: str
    entered: int
    begun: int
    agreed: int
    ended: int
    end: str
    waits: list[tuple[int, int]]


@final
class RankTrace(NamedTuple):
    """The calls of one rank in one strategy, in order.

    Attributes:
        rank: The rank in the strategy.
        world_rank: The rank in the world.
        host: Its host.
        begun: When the trace begins.
        ended: When the rank was seen last.
        calls: The calls.
        note: What is missing in the file, for people; "" if nothing is.
    """

    rank: int
    world_rank: int
    host: str
    begun: int
    ended: int
    calls: list[TracedCall]
    note: str


@final
class StrategyTrace(NamedTuple):
    """The ranks of one strategy that have a trace; `size` counts the others, too."""

    group: str
    size: int
    ranks: dict[int, RankTrace]

    @property
    def missing(self) -> list[int]:
        """The ranks without a trace."""
        return [rank for rank in range(self.size) if rank not in self.ranks]


@final
class JobTrace(NamedTuple):
    """The traces of a job.

    Attributes:
        folder: Where they are.
        strategies: The strategies, large ones first.
        num_clocks: How many clocks there are.
        error: By how many nanoseconds times of two ranks may be wrong to each other.
        notes: What is wrong with clocks or files, for people.
    """

    folder: Path
    strategies: list[StrategyTrace]
    num_clocks: int
    error: int
    notes: list[str]


@final
class _File(NamedTuple):
    """What a file says, as far as it can be understood; `damage` says what cannot."""

    path: Path
    header: Mapping[str, Any]
    pieces: Sequence[Mapping[str, Any]]
    damage: str


def find_trace(folder: Path) -> tuple[Path, int]:
    """Choose the folder of a trace: the one given, or the newest one in it; and count the others.

    Raises:
        TraceFileError: If neither has files.
    """
    if not folder.is_dir():
        if folder.exists():
            raise TraceFileError(f"{folder} is no folder; name its folder, {folder.parent}")
        raise TraceFileError(
            f"there is no folder {folder}: ranks write traces with MPIDIST_TRACE=FOLDER, or strategy.trace(FOLDER)"
        )
    if _files_in(folder):
        return folder, 0
    found = {one: _files_in(one) for one in folder.iterdir() if one.is_dir()}
    times = {one: max(path.stat().st_mtime for path in paths) for one, paths in found.items() if paths}
    if not times:
        raise TraceFileError(f"{folder} has no files rank-N-....jsonl, and no folder that has")
    return max(times, key=lambda one: (times[one], one.name)), len(times) - 1


def load_trace(folder: Path) -> JobTrace:
    """Read the files of a trace. What cannot be understood is left out, and told in the notes.

    Raises:
        TraceFileError: If none can be understood, or the files are of several traces.
    """
    files, notes = _read_all(folder)
    names = {str(file.header["trace"]): file for file in files}
    if len(names) != 1:
        which = "; ".join(f"{name} ({file.path.name} and others)" for name, file in sorted(names.items()))
        raise TraceFileError(
            f"{folder} has files of {len(names)} traces: {which or 'all are empty'}; give each a folder"
        )
    files.sort(key=lambda file: (-file.header["size"], file.header["group"], file.header["rank"]))
    clocks = _Clocks(files)
    strategies: dict[str, StrategyTrace] = {}
    problems: list[str] = []
    for file in files:
        header = file.header
        try:
            trace = _rank_trace(file, clocks)
        except (KeyError, TypeError, ValueError) as error:
            problems.append(f"{file.path} cannot be understood: {type(error).__name__}: {error}")
            continue
        strategy = strategies.setdefault(header["group"], StrategyTrace(header["group"], header["size"], {}))
        strategy.ranks[header["rank"]] = trace
    if not strategies:
        raise TraceFileError(problems[0])
    notes += [f"{problem}; it is left out" for problem in problems]
    return JobTrace(folder, list(strategies.values()), clocks.count, clocks.error, notes + clocks.notes)


def _read_all(folder: Path) -> tuple[list[_File], list[str]]:
    """Read the files that can be read, and say of the others why not.

    Raises:
        TraceFileError: If there are files, and none can be understood.
    """
    files, notes, problems = list[_File](), list[str](), list[str]()
    for path in _files_in(folder):
        try:
            file = _read(path)
        except (TraceFileError, OSError) as problem:
            problems.append(str(problem))
            continue
        if file is None:
            notes.append(f"{path.name} is empty: its rank was ended at once")
            continue
        files.append(file)
        if file.damage:
            notes.append(f"{path.name}, {file.damage}; what follows is left out")
    if problems and not files:
        raise TraceFileError(problems[0])
    return files, notes + [f"{problem}; it is left out" for problem in problems]


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _FILE.fullmatch(path.name))


def _read(path: Path) -> _File | None:
    """Read a file up to a line that cannot be understood; `None` if not even its first line was finished."""
    *lines, _ = path.read_bytes().split(b"\n")
    pieces: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            piece = json.loads(line)
            if number == 1 and piece["version"] != TRACE_VERSION:
                raise ValueError(f"it has version {piece['version']}; this mpidist reads version {TRACE_VERSION}")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            damage = f"line {number}, cannot be understood: {error}"
            if not pieces:
                raise TraceFileError(f"{path}, {damage}") from error
            return _File(path, pieces[0], pieces[1:], damage)
        pieces.append(piece)
    return _File(path, pieces[0], pieces[1:], "") if pieces else None


@final
class _Clocks:
    """Turns the times of each host into times of one clock: that of rank 0 in the largest strategy."""

    def __init__(self, files: Sequence[_File]) -> None:
        self.notes: list[str] = []
        base = files[0].header["clocks"][0][0]
        samples = {
            ClockSample(*sample)
            for file in files
            if file.header["clocks"][0][0] == base
            for piece in (file.header, *file.pieces)
            for sample in piece.get("clocks", ())
        }
        self._samples: dict[str, list[ClockSample]] = {}
        for sample in sorted(samples):
            self._samples.setdefault(sample.clock, []).append(sample)
        walls = {file.header["clock"]: file.header["wall"] for file in files}
        for clock in walls.keys() - self._samples.keys():
            self._samples[clock] = [ClockSample(clock, 0, walls[clock] - walls.get(base, 0))]
            self.notes.append("hosts that are in no strategy together are aligned by the time of day alone")
        self.count = len(walls)
        self.error = max(sample.error for of_clock in self._samples.values() for sample in of_clock)
        if any(len(of_clock) == 1 and of_clock[0].error for of_clock in self._samples.values()):
            self.notes.append("the clocks of hosts were compared at the beginning alone, and may have drifted since")

    def time_of(self, clock: str, time: int) -> int:
        """Return a host's time on the common clock. Between two samples the difference changes evenly."""
        first, last = self._samples[clock][0], self._samples[clock][-1]
        span = max(last.time - first.time, 1)
        return time + first.offset + (last.offset - first.offset) * (time - first.time) // span


def _rank_trace(file: _File, clocks: _Clocks) -> RankTrace:
    header = file.header
    texts, rows = {}, dict[int, list[int]]()
    times: list[int] = [header["time"]]
    for piece in file.pieces:
        texts.update({int(number): text for number, text in piece.get("texts", {}).items()})
        times += [piece[name] for name in ("time", "end", "full") if name in piece]
        for row in piece.get("calls", ()):
            if row[-1] or row[0] not in rows:  # those that had not ended are written once more
                rows[row[0]] = row
    waits = list(chain.from_iterable(piece.get("waits", ()) for piece in file.pieces))
    entered = sorted(chain.from_iterable(piece.get("entered", ()) for piece in file.pieces))
    calls = _calls(
        [rows[number] for number in sorted(rows)],
        texts,
        entered,
        sorted(zip(waits[::2], waits[1::2], strict=True)),
        max(times),
    )

    def aligned(time: int) -> int:
        return clocks.time_of(header["clock"], time) if time else 0

    return RankTrace(
        header["rank"],
        header["world_rank"],
        header["host"],
        aligned(header["time"]),
        aligned(max(times)),
        [_aligned(call, aligned) for call in calls],
        _note(file),
    )


def _note(file: _File) -> str:
    last = file.pieces[-1] if file.pieces else {}
    if "full" in last:
        return "the trace was full before the end"
    if "end" not in last:
        return "the trace has no end: the process was ended, and up to a second of calls is missing"
    return ""


def _calls(
    rows: Sequence[Sequence[int]],
    texts: Mapping[int, Sequence[str]],
    entered: Sequence[int],
    waits: Sequence[tuple[int, int]],
    seen: int,
) -> list[TracedCall]:
    """Put the calls together, in the order in which they began."""
    calls: list[TracedCall] = []
    next_begun = [*(row[3] for row in rows[1:]), seen][: len(rows)]
    last_ended = at_wait = 0
    for row, until in zip(rows, next_begun, strict=True):
        _, sequence, text, begun, agreed, ended = row
        name, details = texts.get(text, ("a call", ""))
        stop = abs(ended) or max(until, begun, agreed)
        at = bisect_right(entered, begun) - 1
        staged = max(entered[at], last_ended) if at >= 0 else 0
        is_staged = at >= 0 and (not calls or entered[at] >= calls[-1].begun) and staged < begun
        while at_wait < len(waits) and waits[at_wait][1] <= begun:
            at_wait += 1
        within = [(max(one, begun), min(other, stop)) for one, other in _before(waits, at_wait, stop)]
        end = "not seen" if not ended else "done" if ended > 0 else "failed"
        number = sequence if 0 < sequence < _NUMBERED else 0
        calls.append(TracedCall(number, name, details, staged if is_staged else 0, begun, agreed, stop, end, within))
        last_ended = max(last_ended, stop)
    return calls


def _before(waits: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the waits from a place on that begin before a time."""
    return takewhile(lambda wait: wait[0] < stop, islice(waits, start, None))


def _aligned(call: TracedCall, aligned: Callable[[int], int]) -> TracedCall:
    return call._replace(
        entered=aligned(call.entered),
        begun=aligned(call.begun),
        agreed=aligned(call.agreed),
        ended=aligned(call.ended),
        waits=[(aligned(begun), aligned(ended)) for begun, ended in call.waits],
    )
