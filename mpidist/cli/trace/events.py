"""Traces in the Trace Event Format, which Perfetto and chrome://tracing read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from mpidist.cli.trace.files import JobTrace, RankTrace
from mpidist.cli.trace.phases import phases_of

__all__ = ["events_of"]


def events_of(job: JobTrace) -> Iterator[dict[str, Any]]:
    """Yield the events: a process for each rank of the world, in it threads for each strategy. Times from 0 on.

    A strategy has a thread more for each call that overlaps others. Perfetto takes number 0 for the idle process of the
    kernel, and a thread with its process's number for the main one, so numbers of both begin at the rank + 1.
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
