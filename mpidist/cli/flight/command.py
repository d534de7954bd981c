"""Merge the flight recorders of a job, and find where its ranks diverged.

Every rank keeps its last calls in memory, and writes them to a file when a call fails, when its program crashes, or
when it is sent the signal SIGUSR1. Give the folder of a job, or the one that holds the folders of jobs:

    python -m mpidist flight mpidist-flight

The exit status is 0 if no rank diverged, 1 if ranks did, and 2 if there are no files, or none can be understood.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mpidist.cli.flight.job import Call, JobFlight, StrategyFlight, load_job
from mpidist.cli.flight.verdict import Verdict, judge, some_of
from mpidist.cli.launching import RefusedError, count
from mpidist.transport.failures.flight_files import FLIGHT_FOLDER, chosen_folder
from mpidist.transport.stacks import together
from mpidist.transport.text import count_text, group_ranks, name_ranks, time_text

__all__ = ["add_arguments", "run"]


_WIDTH: Final = 100
_MOST_PLACES: Final = 10
_MOST_REASONS: Final = 5
_TOGETHER_SECONDS: Final = 5e-5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    where = f"the files of a job, or the folders of jobs (default: MPIDIST_FLIGHT_DIR, else {FLIGHT_FOLDER})"
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help=where)
    parser.add_argument(
        "--calls", type=count, default=0, metavar="K", help="show the last K calls too, and who came to each last"
    )
    parser.add_argument("--rank", type=int, metavar="R", help="show all recorded calls of rank R of the job instead")
    parser.add_argument("--json", action="store_true", help="print the places and the verdicts as JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Report."""
    folder = arguments.folder or chosen_folder(os.environ)
    if folder is None:
        raise RefusedError("MPIDIST_FLIGHT_DIR=off, so ranks write no flight recorders; unset it, or name a folder")
    named = Path(folder)
    try:
        job = load_job(named)
    except OSError as error:
        raise RefusedError(error) from None
    if arguments.rank is not None and arguments.rank not in job.files:
        absent = f"{job.folder} has no file of rank {arguments.rank}; it has {name_ranks(job.files)}"
        raise RefusedError(job.damaged.get(arguments.rank, absent))
    verdicts = [judge(strategy, bool(job.damaged)) for strategy in job.strategies]
    notes = [f"{problem}; it is left out" for problem in job.damaged.values()]
    if arguments.json:
        text = json.dumps({"folder": str(job.folder), "notes": notes, "strategies": [*map(_plain, verdicts)]}, indent=1)
    elif arguments.rank is not None:
        text = "\n".join(_calls_of(job, arguments.rank))
    else:
        choice = [] if job.folder == named else [f"The newest job in {named} is {job.folder.name}."]
        text = "\n".join([*choice, *_report(job, verdicts, arguments.calls), *(_wrap(it, "note: ") for it in notes)])
    print(text, flush=True)
    return int(any(verdict.has_diverged for verdict in verdicts))


def _report(job: JobFlight, verdicts: Sequence[Verdict], num_calls: int) -> list[str]:
    lines = [_head(job)]
    for verdict in verdicts:
        *places, last = map(str, verdict.places)
        lines += ["", _wrap(_title(verdict.strategy), "")]
        lines += [_wrap(text, "  ") for text in [*some_of(places, _MOST_PLACES - 1, "more places"), last]]
        lines += [_wrap(text, "=> ") for text in verdict.lines]
        if num_calls:
            lines += ["", *_table(verdict.strategy, num_calls)]
    if not verdicts:
        lines += ["", "No strategy was in use."]
    stacks = {rank: file.stack for rank, file in job.files.items() if file.stack.frames}
    if stacks:
        lines += ["", "Where the ranks were in their programs (the whole stack: --rank R):"]
        lines += [_wrap(f"{ranks}: {stack.place}", "  ") for ranks, stack in together(stacks)]
    return [*lines, "", "Why the files were written:", *_reasons(job)]


def _head(job: JobFlight) -> str:
    times = [file.written for file in job.files.values()]
    missing = max(max((strategy.size for strategy in job.strategies), default=0) - len(job.files), 0)
    line = f"{job.folder}: {count_text(len(job.files), 'file')}"
    line += f", {count_text(missing, 'rank')} without one" if missing else ", of all ranks"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(times)))
    span = f", within {time_text(max(times) - min(times))}" if len(times) > 1 else ""
    return _wrap(f"{line}; written {when}{span}", "")


def _title(strategy: StrategyFlight) -> str:
    title = f"Strategy {strategy.group}, {count_text(strategy.size, 'rank')}"
    world = {rank: flight.file.world_rank for rank, flight in strategy.ranks.items()}
    if any(rank != of_job for rank, of_job in world.items()):
        verb = "is" if len(world) == 1 else "are"
        title += f"; {name_ranks(world)} here {verb} {name_ranks(world.values())} of the job"
    return title


def _reasons(job: JobFlight) -> list[str]:
    ranks = group_ranks({rank: re.sub(r" on rank \d+", "", file.reason) for rank, file in job.files.items()})
    often = sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1]))
    texts = [f"{name_ranks(of_reason)}: {reason or 'no reason given'}" for reason, of_reason in often]
    return [_wrap(text, "  ") for text in some_of(texts, _MOST_REASONS, "other reasons")]


def _table(strategy: StrategyFlight, num_calls: int) -> list[str]:
    """Show the last calls: when the first rank came, which rank came last, and how long the slowest data took."""
    numbers = {call.sequence for flight in strategy.ranks.values() for call in flight.calls if call.is_numbered}
    calls: dict[int, dict[int, Call]] = {sequence: {} for sequence in sorted(numbers)[-num_calls:]}
    for rank, flight in sorted(strategy.ranks.items()):
        for call in flight.calls:
            if call.sequence in calls:
                calls[call.sequence][rank] = call
    if not calls:
        return ["no calls"]
    lines = [f"{'call':>9}  {'first came':<12}  {'last came':<21}  {'data':>8}  what"]
    for sequence, of_ranks in calls.items():
        absent = [rank for rank, flight in strategy.ranks.items() if flight.number < sequence]
        what = _what(of_ranks) + (f" [not yet: {name_ranks(absent)}]" if absent else "")
        lines.append(_wrap(what, _row_of(sequence, of_ranks), 60))
    return lines


def _row_of(sequence: int, calls: Mapping[int, Call]) -> str:
    came = {rank: call.begun for rank, call in calls.items()}
    first = _clock(min(came.values()))
    if all(call.agreed for call in calls.values()):
        # All ranks see the agreement at one moment: counted from it, times do not depend on the clocks of hosts.
        came = {rank: call.begun - call.agreed for rank, call in calls.items()}
    last = max(came, key=came.__getitem__)
    late = came[last] - min(came.values())
    who = f"rank {last} +{time_text(late)}" if late > _TOGETHER_SECONDS else "-"
    spans = [call.ended - call.agreed for call in calls.values() if call.agreed and call.state == "done"]
    return f"{sequence:>9}  {first}  {who:<21}  {time_text(max(spans)) if spans else '-':>8}  "


def _what(calls: Mapping[int, Call]) -> str:
    kinds = dict.fromkeys(map(_called, calls.values()))
    states = group_ranks({rank: call.state for rank, call in calls.items()})
    text = " / ".join(some_of([*kinds], 3, "others"))
    if len(states) > 1:
        return f"{text} [{' | '.join(f'{state} {name_ranks(ranks)}' for state, ranks in states.items())}]"
    return text if "done" in states else f"{text} [{next(iter(states))}]"


def _calls_of(job: JobFlight, rank: int) -> list[str]:
    file = job.files[rank]
    writer = "" if file.written_by == rank else f" by rank {file.written_by}, because it could not itself"
    when = time.strftime("%Y-%m-%d", time.localtime(file.written))
    lines = [_wrap(f"Rank {rank} on {file.host}, written {when} {_clock(file.written)}{writer}: {file.reason}", "")]
    for strategy in job.strategies:
        for own, flight in strategy.ranks.items():
            if flight.file is file:
                lines += ["", f"Strategy {strategy.group}, rank {own} of {strategy.size}, {flight.process}"]
                lines.append(f"{'call':>9}  {'came':<12}  {'waited':>10}  {'data':>10}  {'state':<7}  what")
                lines += [_wrap(_called(call), _row(call), 60) for call in flight.calls]
    frames = [f"  {frame}" for frame in file.stack.frames]
    return [*lines, "", "Where it was, innermost first:", *frames] if frames else lines


def _called(call: Call) -> str:
    return f"{call.call}: {call.details}" if call.details else call.call


def _row(call: Call) -> str:
    waited = time_text(call.agreed - call.begun) if call.agreed else "-"
    data = time_text(call.ended - call.agreed) if call.agreed and call.ended else "-"
    number = str(call.sequence) if call.is_numbered else "-"
    return f"{number:>9}  {_clock(call.begun)}  {waited:>10}  {data:>10}  {call.state:<7}  "


def _plain(verdict: Verdict) -> dict[str, Any]:
    """Put a verdict into what JSON has. The calls themselves are in the files, which are JSON already."""
    strategy, difference = verdict.strategy, None
    places = [{**place._asdict(), "last": place.last and place.last._asdict()} for place in verdict.places]
    if verdict.difference is not None:
        sides = [dict(zip(("call", "details", "ranks"), side, strict=True)) for side in verdict.difference[1]]
        difference = {"sequence": verdict.difference[0], "sides": sides}
    told = {"group": strategy.group, "size": strategy.size, "missing": strategy.missing, "places": places}
    return {**told, "diverged": verdict.has_diverged, "difference": difference, "verdict": verdict.lines}


def _wrap(text: str, before: str, indent: int | None = None) -> str:
    """Break a text into lines, the first one after `before`, the others further to the right."""
    return textwrap.fill(
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
