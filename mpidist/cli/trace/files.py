"""The traces of a job, read from the files that its ranks wrote, with all times on one clock."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, final

from mpidist.cli.job_files import StrategyFiles, find_newest, list_files, parse
from mpidist.cli.launching import RefusedError
from mpidist.transport.failures.status_board import RESET
from mpidist.transport.trace.clocks import ClockSample
from mpidist.transport.trace.trace import TRACE_VERSION

__all__ = ["JobTrace", "RankTrace", "StrategyTrace", "TracedCall", "load_trace"]

_FILES: Final = re.compile(r"rank-(\d+)-\w+\.jsonl")
_HEADER: Final = {"trace", "group", "rank", "size", "world_rank", "host", "clock", "wall", "time", "clocks"}
_ADVICE: Final = "ranks write traces with MPIDIST_TRACE=FOLDER, or strategy.trace(FOLDER)"


@final
class TracedCall(NamedTuple):
    """One call of a rank. Times in nanoseconds; 0 for an event that has not happened.

    `sequence` is 0 for calls that not all ranks make together. The rank staged arrays from `entered` on, joined the
    call at `begun`, and all ranks had at `agreed`. `end` is `"done"`, `"failed"` or `"not seen"`: then `ended` is when
    the rank was seen last. `waits` are the beginnings and ends of the rank's waits, in order, all within the call.
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
    """The calls of one rank in one strategy, in order, from when the trace begins until the rank was seen last.

    `note` describes for people the missing part of the file; "" if it is whole.
    """

    rank: int
    world_rank: int
    host: str
    begun: int
    ended: int
    calls: list[TracedCall]
    note: str


StrategyTrace: TypeAlias = StrategyFiles[RankTrace]


@final
class JobTrace(NamedTuple):
    """The traces of a job: its strategies, large ones first; `notes` for people of what is wrong with clocks or files.

    Times of two ranks may be wrong to each other by `error` nanoseconds. `num_others` counts older traces beside it.
    """

    folder: Path
    num_others: int
    strategies: list[StrategyTrace]
    num_clocks: int
    error: int
    notes: list[str]


@final
class _File(NamedTuple):
    """Content of a file, as far as it can be parsed; `damage` describes the rest."""

    path: Path
    header: Mapping[str, Any]
    pieces: Sequence[Mapping[str, Any]]
    damage: str


def load_trace(named: Path) -> JobTrace:
    """Read the files of a trace, the newest one in a folder of several; leave out what cannot be understood."""
    folder, num_others = find_newest(named, _FILES, "rank-N-....jsonl", _ADVICE)
    files, notes = _read_all(folder)
    names = {str(file.header["trace"]): file for file in files}
    if len(names) != 1:
        which = "; ".join(f"{name} ({file.path.name} and others)" for name, file in sorted(names.items()))
        raise RefusedError(f"{folder} has files of {len(names)} traces: {which}; give each a folder")
    files.sort(key=lambda file: (-file.header["size"], file.header["group"], file.header["rank"]))
    clocks = _Clocks(files)
    strategies: dict[str, StrategyTrace] = {}
    problems: list[str] = []
    for file in files:
        try:
            trace = _rank_trace(file, clocks)
        except (KeyError, TypeError, ValueError) as error:
            problems.append(f"{file.path} cannot be understood: {type(error).__name__}: {error}")
            continue
        group, size = file.header["group"], file.header["size"]
        strategies.setdefault(group, StrategyFiles(group, size, {})).ranks[trace.rank] = trace
    if not strategies:
        raise RefusedError(problems[0])
    notes += [f"{problem}; it is left out" for problem in problems]
    return JobTrace(folder, num_others, list(strategies.values()), clocks.count, clocks.error, notes + clocks.notes)


def _read_all(folder: Path) -> tuple[list[_File], list[str]]:
    """Read the readable files, and explain the failures of the others; refuse a folder if none can be read."""
    files, notes, problems = list[_File](), list[str](), list[str]()
    for _, path in list_files(folder, _FILES):
        try:
            file = _read(path)
        except (RefusedError, OSError) as problem:
            problems.append(str(problem))
            continue
        if file is None:
            notes.append(f"{path.name} is empty: its rank was ended at once")
            continue
        files.append(file)
        if file.damage:
            notes.append(f"{path.name}, {file.damage}; the rest is left out")
    if not files:
        ended = f"all files in {folder} are empty: their ranks were ended at once; see why, and trace the job again"
        raise RefusedError([*problems, ended][0])
    return files, notes + [f"{problem}; it is left out" for problem in problems]


def _read(path: Path) -> _File | None:
    """Read a file up to a line that cannot be understood; `None` if not even its first line was finished."""
    *lines, _ = path.read_bytes().split(b"\n")
    pieces: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            piece = json.loads(line) if pieces else parse(line, TRACE_VERSION)
            if not isinstance(piece, dict) or not (pieces or piece.keys() >= _HEADER):
                raise ValueError("it is not a trace of a rank")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            damage = f"line {number}, cannot be understood: {error}"
            if not pieces:
                raise RefusedError(f"{path}, {damage}") from error
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

    def aligned(time: int) -> int:
        return clocks.time_of(header["clock"], time) if time else 0

    calls = _calls(
        [rows[number] for number in sorted(rows)],
        texts,
        entered,
        sorted(zip(waits[::2], waits[1::2], strict=True)),
        max(times),
        aligned,
    )
    last, note = file.pieces[-1] if file.pieces else {}, ""
    if "full" in last:
        note = "the trace was full before the end"
    elif "end" not in last:
        note = "the trace has no end: the process was ended, and up to a second of calls is missing"
    begun, ended = aligned(header["time"]), aligned(max(times))
    return RankTrace(header["rank"], header["world_rank"], header["host"], begun, ended, calls, note)


def _calls(
    rows: Sequence[Sequence[int]],
    texts: Mapping[int, Sequence[str]],
    entered: Sequence[int],
    waits: Sequence[tuple[int, int]],
    seen: int,
    aligned: Callable[[int], int],
) -> list[TracedCall]:
    """Put the calls together, in the order in which they began, with the times that `aligned` returns."""
    calls: list[TracedCall] = []
    next_begun = [*(row[3] for row in rows[1:]), seen][: len(rows)]
    last_begun = last_ended = at_wait = 0
    for row, until in zip(rows, next_begun, strict=True):
        _, sequence, text, begun, agreed, ended = row
        name, details = texts.get(text, ("a call", ""))
        stop = abs(ended) or max(until, begun, agreed)
        at = bisect_right(entered, begun) - 1
        staged = max(entered[at], last_ended) if at >= 0 else 0
        is_staged = at >= 0 and entered[at] >= last_begun and staged < begun
        while at_wait < len(waits) and waits[at_wait][1] <= begun:
            at_wait += 1
        within = [
            (aligned(max(one, begun)), aligned(min(other, stop)))
            for one, other in waits[at_wait : bisect_left(waits, (stop,))]
        ]
        end = "not seen" if not ended else "done" if ended > 0 else "failed"
        number = sequence if 0 < sequence < RESET else 0
        times = aligned(staged) if is_staged else 0, aligned(begun), aligned(agreed), aligned(stop)
        calls.append(TracedCall(number, name, details, *times, end, within))
        last_begun, last_ended = begun, max(last_ended, stop)
    return calls
