"""Merge the flight recorders of a job, and say where its ranks parted.

Every rank keeps its last calls in memory, and writes them to a file when a call fails, when its program crashes, or
when it is sent the signal SIGUSR1. Give the folder of a job, or the one that holds the folders of jobs:

    python -m mpidist flight mpidist-flight

The exit status is 0 if nobody parted, 1 if ranks did, and 2 if there are no files, or one cannot be understood.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from mpidist.cli.flight_report import (
    Call,
    FlightFileError,
    JobFlight,
    Meeting,
    Standing,
    StrategyFlight,
    find_difference,
    find_job,
    last_meetings,
    load_job,
)
from mpidist.cli.flight_verdict import Verdict, judge_all, place_text, seconds_text, some_of
from mpidist.transport import name_ranks

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME: Final = "flight"
HELP: Final = "merge the flight recorders of a job, and say where its ranks parted"

_FOLDER: Final = "mpidist-flight"
_WIDTH: Final = 100
_MOST_PLACES: Final = 10
_MOST_REASONS: Final = 5
_LONG_SECONDS: Final = 60.0  # between files of one event
_TOGETHER_SECONDS: Final = 5e-5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    where = f"the files of a job, or the folders of jobs (default: MPIDIST_FLIGHT_DIR, else {_FOLDER})"
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help=where)
    parser.add_argument(
        "--calls", type=_count, default=0, metavar="K", help="show the last K calls too, and who came to each last"
    )
    parser.add_argument("--rank", type=int, metavar="R", help="show all recorded calls of rank R of the job instead")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Report."""
    named = Path(arguments.folder or os.environ.get("MPIDIST_FLIGHT_DIR", "").strip() or _FOLDER)
    try:
        folder = find_job(named)
        job = load_job(folder)
        if arguments.rank is not None and arguments.rank not in job.files:
            raise FlightFileError(f"{folder} has no file of rank {arguments.rank}; it has {name_ranks(job.files)}")
    except (FlightFileError, OSError) as error:
        print(f"python -m mpidist flight: {error}", file=sys.stderr)
        return 2
    verdicts = judge_all(job.strategies)
    if arguments.json:
        text = json.dumps(_merged(job, verdicts, arguments.calls, arguments.rank), indent=1)
    elif arguments.rank is not None:
        text = "\n".join(_calls_of(job, arguments.rank))
    else:
        choice = [] if folder == named else [f"The newest job in {named} is {folder.name}."]
        text = "\n".join([*choice, *_report(job, verdicts, arguments.calls)])
    with suppress(BrokenPipeError):  # of a pager that was left
        print(text, flush=True)
    return int(any(verdict.parted for verdict in verdicts))


def _report(job: JobFlight, verdicts: Sequence[Verdict], num_calls: int) -> list[str]:
    lines = _head(job)
    for verdict in verdicts:
        lines += ["", *_wrap(_title(verdict.strategy), "")]
        places = [place_text(standing) for standing in verdict.standings]
        for text in some_of(places[:-1], _MOST_PLACES - 1, "more places"):
            lines += _wrap(text, "  ")
        lines += _wrap(places[-1], "  ")
        for text in verdict.lines:
            lines += _wrap(text, "=> ")
        if num_calls:
            lines += ["", *_table(verdict.strategy, num_calls)]
    if not verdicts:
        lines += ["", "No strategy was in use."]
    return [*lines, "", *_reasons(job)]


def _head(job: JobFlight) -> list[str]:
    times = [file.written for file in job.files.values()]
    span = max(times) - min(times)
    missing = _num_missing(job)
    line = f"{job.folder}: {_counted(len(job.files), 'file')}"
    line += f", {_counted(missing, 'rank')} without one" if missing else ", of all ranks"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(times)))
    lines = _wrap(f"{line}; written {when}" + f", within {seconds_text(span)}" * (len(times) > 1), "")
    if span > _LONG_SECONDS:
        old = [rank for rank, file in job.files.items() if max(times) - file.written > _LONG_SECONDS]
        lines += _wrap(
            f"Not from one event? {name_ranks(old)} wrote more than {seconds_text(_LONG_SECONDS)} before the last.", ""
        )
    return lines


def _num_missing(job: JobFlight) -> int:
    return max(max((strategy.size for strategy in job.strategies), default=0) - len(job.files), 0)


def _title(strategy: StrategyFlight) -> str:
    title = f"Strategy {strategy.group}, {_counted(strategy.size, 'rank')}"
    world = {rank: flight.world_rank for rank, flight in strategy.ranks.items()}
    if any(rank != of_job for rank, of_job in world.items()):
        title += (
            f"; {name_ranks(world)} here {'is' if len(world) == 1 else 'are'} {name_ranks(world.values())} of the job"
        )
    return title


def _reasons(job: JobFlight) -> list[str]:
    ranks: dict[str, list[int]] = {}
    for rank, file in job.files.items():
        ranks.setdefault(re.sub(r" on rank \d+", "", file.reason), []).append(rank)
    often = sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1]))
    texts = [f"{name_ranks(of_reason)}: {reason or 'not said'}" for reason, of_reason in often]
    lines = ["Why the files were written:"]
    for text in some_of(texts, _MOST_REASONS, "other reasons"):
        lines += _wrap(text, "  ")
    return lines


def _table(strategy: StrategyFlight, num_calls: int) -> list[str]:
    meetings = last_meetings(strategy, num_calls)
    reached = {
        rank: max((call.sequence for call in flight.calls), default=0) for rank, flight in strategy.ranks.items()
    }
    lines = [f"{'call':>9}  {'first came':<12}  {'last came':<21}  {'data':>8}  what"]
    for meeting in meetings:
        came = min(call.begun for call in meeting.calls.values())
        last = (
            f"rank {meeting.last} +{seconds_text(meeting.late_seconds)}"
            if meeting.late_seconds > _TOGETHER_SECONDS
            else "-"
        )
        data = "-" if meeting.data_seconds is None else seconds_text(meeting.data_seconds)
        row = f"{meeting.sequence:>9}  {_clock(came)}  {last:<21}  {data:>8}  "
        absent = [rank for rank, sequence in reached.items() if sequence < meeting.sequence]
        lines += _wrap(_what(meeting) + (f" [not yet: {name_ranks(absent)}]" if absent else ""), row, 60)
    return lines or ["no calls"]


def _what(meeting: Meeting) -> str:
    kinds: dict[tuple[str, str], None] = {}
    states: dict[str, list[int]] = {}
    for rank, call in meeting.calls.items():
        kinds[call.call, call.details] = None
        states.setdefault(call.state, []).append(rank)
    texts = some_of([f"{call}: {details}" if details else call for call, details in kinds], 3, "others")
    state = " | ".join(f"{name} {name_ranks(ranks)}" if len(states) > 1 else name for name, ranks in states.items())
    return f"{' / '.join(texts)} [{state}]" if states.keys() != {"done"} else " / ".join(texts)


def _calls_of(job: JobFlight, rank: int) -> list[str]:
    file = job.files[rank]
    writer = "" if file.written_by == rank else f" by rank {file.written_by}, because it could not itself"
    when = time.strftime("%Y-%m-%d", time.localtime(file.written))
    lines = _wrap(f"Rank {rank} on {file.host}, written {when} {_clock(file.written)}{writer}: {file.reason}", "")
    for strategy in job.strategies:
        for flight in [found for found in strategy.ranks.values() if found.world_rank == rank]:
            lines += ["", f"Strategy {strategy.group}, rank {flight.rank} of {strategy.size}, {flight.process}"]
            lines.append(f"{'call':>9}  {'came':<12}  {'waited':>10}  {'data':>10}  {'state':<7}  what")
            for call in flight.calls:
                lines += _wrap(f"{call.call}{': ' * bool(call.details)}{call.details}", _row(call), 60)
    return lines


def _row(call: Call) -> str:
    waited = seconds_text(call.agreed - call.begun) if call.agreed else "-"
    data = seconds_text(call.ended - call.agreed) if call.agreed and call.ended else "-"
    number = str(call.sequence) if call.is_numbered else "-"
    return f"{number:>9}  {_clock(call.begun)}  {waited:>10}  {data:>10}  {call.state:<7}  "


def _merged(job: JobFlight, verdicts: Sequence[Verdict], num_calls: int, rank: int | None) -> dict[str, Any]:
    return {
        "folder": str(job.folder),
        "parted": any(verdict.parted for verdict in verdicts),
        "num_missing": _num_missing(job),
        "files": [file._asdict() for file in job.files.values()],
        "strategies": [_merged_strategy(verdict, num_calls, rank) for verdict in verdicts],
    }


def _merged_strategy(verdict: Verdict, num_calls: int, world_rank: int | None) -> dict[str, Any]:
    strategy = verdict.strategy
    difference = find_difference(strategy)
    told: dict[str, Any] = {
        "group": strategy.group,
        "size": strategy.size,
        "missing": strategy.missing,
        "world_ranks": {rank: flight.world_rank for rank, flight in strategy.ranks.items()},
        "parted": verdict.parted,
        "verdict": verdict.lines,
        "places": [_merged_place(standing) for standing in verdict.standings],
        "difference": None,
    }
    if difference is not None:
        sides = [dict(zip(("call", "details", "ranks"), side, strict=True)) for side in difference.sides]
        told["difference"] = {"sequence": difference.sequence, "sides": sides}
    if num_calls:
        meetings = last_meetings(strategy, num_calls)
        told["calls"] = [
            {**meeting._asdict(), "calls": {rank: call._asdict() for rank, call in meeting.calls.items()}}
            for meeting in meetings
        ]
    if world_rank is not None:
        of_rank = [flight for flight in strategy.ranks.values() if flight.world_rank == world_rank]
        told["calls_of_rank"] = [call._asdict() for flight in of_rank for call in flight.calls]
    return told


def _merged_place(standing: Standing) -> dict[str, Any]:
    last = None if standing.last is None else standing.last._asdict()
    return {"ranks": standing.ranks, "process": standing.process, "seconds": standing.seconds, "last": last}


def _wrap(text: str, before: str, indent: int | None = None) -> list[str]:
    """Break a text into lines, the first one after `before`, the others further to the right."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=before,
        subsequent_indent=" " * (len(before) + 2 if indent is None else indent),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _clock(seconds: float) -> str:
    milliseconds = round(seconds * 1000)
    return time.strftime("%H:%M:%S", time.localtime(milliseconds // 1000)) + f".{milliseconds % 1000:03d}"


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' if count != 1 else ''}"


def _count(text: str) -> int:
    with suppress(ValueError):
        if int(text) > 0:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of calls: give one above 0")
