"""Merge the traces of all ranks into one file for Perfetto, and find which ranks waited for which.

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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mpidist.cli.launching import RefusedError
from mpidist.cli.trace.files import JobTrace, RankTrace, StrategyTrace, load_trace
from mpidist.cli.trace.waits import ADDING, EXCHANGE, STAGING, WAITING, RankTimes, StrategyWaits, phases_of, waits_of
from mpidist.transport.text import count_text, group_ranks, name_ranks, time_text

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
        "-o", dest="out", metavar="FILE", help="output file (default: trace.json beside the files); packed, as .gz"
    )


def run(arguments: argparse.Namespace) -> int:
    """Merge."""
    named = Path(arguments.folder)
    try:
        job = load_trace(named)
        out = Path(arguments.out) if arguments.out else job.folder
        out = out / "trace.json" if out.is_dir() else out
        num_events = _write(out, job)
    except OSError as error:
        raise RefusedError(error) from None
    if job.num_others:
        others = count_text(job.num_others, "other one", "other ones")
        print(f"The newest trace in {named} is {job.folder.name}; {others}.")
    _print_page(job)
    print(f"\n{os.path.relpath(out)}: {num_events} events; open it at https://ui.perfetto.dev", flush=True)
    return 0


def _write(path: Path, job: JobTrace) -> int:
    """Write the events, one on a line. Returns how many there are."""
    target, num_events = Path(os.path.realpath(path)), 0
    is_file = path.is_file() or not path.exists()  # no pipe or device, which a rename would replace
    partial = target.with_name(f"{target.name}.{os.getpid()}") if is_file else path
    try:
        with gzip.open(partial, "wt") if path.suffix == ".gz" else partial.open("w") as file:
            separator = '{"displayTimeUnit":"ms","traceEvents":[\n'
            for event in _events(job):
                file.write(separator + json.dumps(event, separators=(",", ":")))
                separator, num_events = ",\n", num_events + 1
            file.write("\n]}\n")
        if is_file:
            partial.replace(target)  # readers find a whole file
    except OSError as error:
        with suppress(OSError):
            if is_file:
                partial.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written: {error.strerror}; name another file with -o") from error
    return num_events


def _events(job: JobTrace) -> Iterator[dict[str, Any]]:
    """Yield events of the Trace Event Format, with times from 0 on: a process for each rank of the world.

    In it are threads for each strategy, one more for each call that overlaps others. Perfetto takes number 0 for the
    idle process of the kernel, and a thread with its process's number for the main one, so numbers of both begin at
    the rank + 1.
    """
    base = min(trace.begun for strategy in job.strategies for trace in strategy.ranks.values())
    threads: dict[int, Iterator[int]] = {}
    for strategy in job.strategies:
        for trace in strategy.ranks.values():
            process = trace.world_rank + 1
            if process not in threads:
                threads[process] = count(process)
                args: dict[str, Any] = {"name": f"rank {trace.world_rank} on {trace.host}"}
                yield {"ph": "M", "pid": process, "name": "process_name", "args": args}
                args = {"sort_index": trace.world_rank}
                yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": args}
            name = f"strategy {strategy.group}, rank {trace.rank}"
            yield from _events_of_rank(trace, process, threads[process], name, base)


def _events_of_rank(
    trace: RankTrace, process: int, threads: Iterator[int], name: str, base: int
) -> Iterator[dict[str, Any]]:
    rows: list[tuple[int, int]] = []  # the thread of each, and when its last call ended
    for call in trace.calls:
        begun = call.entered or call.begun
        row = next((row for row, (_, free) in enumerate(rows) if free <= begun), len(rows))
        if row == len(rows):
            rows.append((next(threads), 0))
            yield {"ph": "M", "pid": process, "tid": rows[row][0], "name": "thread_name", "args": {"name": name}}
        thread, _ = rows[row]
        rows[row] = thread, call.ended
        where = {"ph": "X", "pid": process, "tid": thread}
        details = {"call": call.sequence, "details": call.details, "end": call.end}
        yield {**where, "name": call.name, "cat": "call", **_span(begun, call.ended, base), "args": details}
        for phase in phases_of(call):
            yield {**where, "name": phase.name, "cat": "phase", **_span(phase.begun, phase.ended, base)}


def _span(begun: int, ended: int, base: int) -> dict[str, float]:
    return {"ts": (begun - base) / 1000, "dur": (ended - begun) / 1000}


def _print_page(job: JobTrace) -> None:
    console = Console(highlight=False, width=_WIDTH)
    with console.capture() as capture:
        clocks = "one clock" if job.num_clocks == 1 else f"clocks aligned to {time_text(job.error / 1e9)}"
        names = {trace.host for strategy in job.strategies for trace in strategy.ranks.values()}
        hosts = count_text(max(len(names), job.num_clocks), "host")  # containers of a host share its clock
        console.print(Text(f"{job.folder}: {hosts}, {clocks}", style="bold"))
        for strategy in job.strategies:
            waits = waits_of(strategy)
            calls = f"{count_text(waits.num_calls, 'call')} that all made together"
            if not waits.num_calls:
                number = sum(times.num_calls for times in waits.ranks.values())
                calls = f"{count_text(number, 'request')}, none made together"
            title = f"Strategy {strategy.group}, {count_text(strategy.size, 'rank')}: {calls}"
            console.print(Text(f"\n{title}", style="bold"))
            console.print(_table(strategy, waits))
            for line in _verdict(waits):
                console.print(Text(f"=> {line}"))
        for note in [*job.notes, *_notes(job)]:
            console.print(Text(f"note: {note}", style="yellow"))
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


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
        most = f"rank {late}: {time_text(longest / 1e9)}"
    share = round(100 * times.in_calls / times.in_all) if times.in_all else 0
    in_calls = f"{time_text(times.in_calls / 1e9)} ({share} %)"
    phases = (times.phases[phase] for phase in (STAGING, WAITING, EXCHANGE, ADDING))
    staging, waiting, exchange, adding, others = (time_text(one / 1e9) for one in (*phases, waits.waits_for(rank)))
    return name, trace.host, str(times.num_calls), in_calls, staging, waiting, most, exchange, adding, others


def _verdict(waits: StrategyWaits) -> list[str]:
    if not waits.num_calls:
        return ["each rank makes its requests by itself: a server's answer is the exchange"]
    if waits.longest is None:
        return ["no rank waited for another"]
    sums = {rank: waits.waits_for(rank) for rank in waits.came_last}
    total, late = sum(sums.values()), max(sums, key=lambda rank: sums[rank])
    who = f"rank {late}, which came last to {waits.came_last[late]} of {count_text(waits.num_calls, 'call')}"
    most = f"{time_text(sums[late] / 1e9)} of it" if sums[late] >= _OFTEN * total else "for no rank above all; most"
    first = f"ranks waited {time_text(total / 1e9)} in all for others to come, {most} for {who}"
    longest, rank, its_late, call = waits.longest
    what = f"call {call.sequence}, {call.name}" + (f" ({call.details})" if call.details else "")
    return [first, f"the longest wait: rank {rank} waited {time_text(longest / 1e9)} for rank {its_late} in {what}"]


def _notes(job: JobTrace) -> Iterable[str]:
    for strategy in job.strategies:
        if strategy.missing:
            who = f"{name_ranks(strategy.missing)} of strategy {strategy.group}"
            yield f"{who} left no file that can be read: waits for it are nobody's"
        notes = group_ranks({rank: trace.note for rank, trace in strategy.ranks.items() if trace.note})
        for note, ranks in notes.items():
            yield f"{name_ranks(ranks)} of strategy {strategy.group}: {note}"
