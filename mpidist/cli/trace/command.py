"""Merge the traces of all ranks into one file for Perfetto, and say who waited for whom.

Ranks record their calls while `strategy.trace(FOLDER)` is open, or from the beginning with the variable
MPIDIST_TRACE=FOLDER. Then:

    python -m mpidist trace merge FOLDER

writes trace.json beside the files of the newest trace in the folder: open it at https://ui.perfetto.dev or in
chrome://tracing. Files that cannot be understood are named and left out. The exit status is 0, and 2 if there is no
file that can.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mpidist.cli.trace.events import events_of
from mpidist.cli.trace.files import JobTrace, StrategyTrace, TraceFileError, find_trace, load_trace
from mpidist.cli.trace.phases import ADDING, EXCHANGE, STAGING, WAITING
from mpidist.cli.trace.waits import RankTimes, StrategyWaits, waits_of
from mpidist.transport.text import count_text, name_ranks

__all__ = ["add_arguments", "run"]


_WIDTH: Final = 10_000  # lines are not broken, nor columns cut
_MOST_FOR: Final = "most of it for"
_MOST_RANKS: Final = 32  # in a table
_OFTEN: Final = 0.5  # of the waits: who causes as much is named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    merge = actions.add_parser("merge", help="write one file for Perfetto", description=__doc__)
    merge.formatter_class = argparse.RawDescriptionHelpFormatter
    merge.add_argument("folder", metavar="FOLDER", help="the files of a trace, or the folders of traces")
    merge.add_argument(
        "-o", dest="out", metavar="FILE", help="what to write (default: trace.json beside the files); packed, as .gz"
    )


def run(arguments: argparse.Namespace) -> int:
    """Merge."""
    named = Path(arguments.folder)
    try:
        folder, num_others = find_trace(named)
        job = load_trace(folder)
        out = Path(arguments.out) if arguments.out else folder
        out = out / "trace.json" if out.is_dir() else out
        num_events = _write(out, job)
    except (TraceFileError, OSError) as error:
        print(f"mpidist trace: {error}", file=sys.stderr)
        return 2
    if num_others:
        print(f"The newest trace in {named} is {folder.name}; {count_text(num_others, 'other one', 'other ones')}.")
    _print_page(job)
    print(f"\n{os.path.relpath(out)}: {num_events} events; open it at https://ui.perfetto.dev", flush=True)
    return 0


def _write(path: Path, job: JobTrace) -> int:
    """Write the events, one on a line. Returns how many there are."""
    partial, count = path.with_name(f"{path.name}.{os.getpid()}"), 0
    try:
        with gzip.open(partial, "wt") if path.suffix == ".gz" else partial.open("w") as file:
            separator = '{"displayTimeUnit":"ms","traceEvents":[\n'
            for event in events_of(job):
                file.write(separator + json.dumps(event, separators=(",", ":")))
                separator, count = ",\n", count + 1
            file.write("\n]}\n")
        partial.replace(path)  # readers find a whole file
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written: {error.strerror}; name another file with -o") from error
    return count


def _print_page(job: JobTrace) -> None:
    console = Console(highlight=False, width=_WIDTH)
    with console.capture() as capture:
        clocks = "one clock" if job.num_clocks == 1 else f"clocks aligned to {_time_text(job.error)}"
        names = {trace.host for strategy in job.strategies for trace in strategy.ranks.values()}
        hosts = count_text(max(len(names), job.num_clocks), "host")  # containers of a host share its clock
        console.print(Text(f"{job.folder}: {hosts}, {clocks}", style="bold"))
        for strategy in job.strategies:
            waits = waits_of(strategy)
            console.print(Text(f"\n{_title(strategy, waits)}", style="bold"))
            console.print(_table(strategy, waits))
            for line in _verdict(waits):
                console.print(Text(f"=> {line}"))
        for note in [*job.notes, *_notes(job)]:
            console.print(Text(f"note: {note}", style="yellow"))
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _title(strategy: StrategyTrace, waits: StrategyWaits) -> str:
    what = f"{count_text(waits.num_calls, 'call')} that all made together"
    if not waits.num_calls:
        what = f"{count_text(sum(times.num_calls for times in waits.ranks.values()), 'request')}, none made together"
    return f"Strategy {strategy.group}, {count_text(strategy.size, 'rank')}: {what}"


def _table(strategy: StrategyTrace, waits: StrategyWaits) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    titles = ("rank", "host", "calls", "in calls", STAGING, WAITING, _MOST_FOR, EXCHANGE, ADDING, "others for it")
    for title in titles:
        table.add_column(title, justify="left" if title in ("host", _MOST_FOR) else "right", no_wrap=True)
    shown = list(waits.ranks)
    if len(shown) > _MOST_RANKS:
        shown.sort(key=lambda rank: -waits.waits_for(rank))
        shown = sorted(shown[:_MOST_RANKS])
    for rank in shown:
        table.add_row(*_row(strategy, waits, rank, waits.ranks[rank]))
    if len(shown) < len(waits.ranks):
        table.add_row("...", f"{len(waits.ranks) - len(shown)} other ranks, for which others waited less")
    return table


def _row(strategy: StrategyTrace, waits: StrategyWaits, rank: int, times: RankTimes) -> Sequence[str]:
    trace = strategy.ranks[rank]
    name = f"{rank}" if trace.world_rank == rank else f"{rank} ({trace.world_rank} of the job)"
    most = "-"
    if times.waited_for:
        late, longest = times.waited_for.most_common(1)[0]
        most = f"rank {late}: {_time_text(longest)}"
    share = round(100 * times.in_calls / times.in_all) if times.in_all else 0
    in_calls = f"{_time_text(times.in_calls)} ({share} %)"
    spans = {phase: _time_text(times.phases[phase]) for phase in (STAGING, WAITING, EXCHANGE, ADDING)}
    others = _time_text(waits.waits_for(rank))
    first, second = (spans[STAGING], spans[WAITING]), (spans[EXCHANGE], spans[ADDING])
    return name, trace.host, str(times.num_calls), in_calls, *first, most, *second, others


def _verdict(waits: StrategyWaits) -> list[str]:
    if not waits.num_calls:
        return ["each rank makes its requests by itself: a server's answer is the exchange"]
    if waits.longest is None:
        return ["nobody waited for another rank"]
    sums = {rank: waits.waits_for(rank) for rank in waits.came_last}
    total, late = sum(sums.values()), max(sums, key=lambda rank: sums[rank])
    who = f"rank {late}, which came last to {waits.came_last[late]} of {count_text(waits.num_calls, 'call')}"
    if sums[late] >= _OFTEN * total:
        first = f"ranks waited {_time_text(total)} in all for others to come, {_time_text(sums[late])} of it for {who}"
    else:
        first = f"ranks waited {_time_text(total)} in all for others to come, for no rank above all; most for {who}"
    longest = waits.longest
    details = f" ({longest.call.details})" if longest.call.details else ""
    what = f"call {longest.call.sequence}, {longest.call.name}{details}"
    return [
        first,
        f"the longest wait: rank {longest.rank} waited {_time_text(longest.time)} for rank {longest.late} in {what}",
    ]


def _notes(job: JobTrace) -> Iterable[str]:
    for strategy in job.strategies:
        if strategy.missing:
            who = f"{name_ranks(strategy.missing)} of strategy {strategy.group}"
            yield f"{who} left no file that can be read: waits for it are nobody's"
        notes: dict[str, list[int]] = {}
        for rank, trace in strategy.ranks.items():
            if trace.note:
                notes.setdefault(trace.note, []).append(rank)
        for note, ranks in notes.items():
            yield f"{name_ranks(ranks)} of strategy {strategy.group}: {note}"


def _time_text(nanoseconds: float) -> str:
    """Write a time in a unit of suitable size: `0`, `12 us`, `3.4 ms`, `1.5 s`."""
    if nanoseconds < 1_000:
        return "0" if nanoseconds < 50 else f"{nanoseconds / 1e3:.1f} us"
    if nanoseconds < 1_000_000:
        return f"{nanoseconds / 1e3:.3g} us"
    return f"{nanoseconds / 1e6:.3g} ms" if nanoseconds < 999_500_000 else f"{nanoseconds / 1e9:.4g} s"
