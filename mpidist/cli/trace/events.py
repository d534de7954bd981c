"""Traces in the Trace Event Format, which Perfetto and chrome://tracing read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpidist.cli.trace.files import JobTrace, RankTrace
from mpidist.cli.trace.phases import phases_of

__all__ = ["events_of"]

_ROWS = 100  # for calls of one strategy that overlap


def events_of(job: JobTrace) -> Iterator[dict[str, Any]]:
    """Yield the events: a process for each rank of the world, in it a thread for each strategy. Times from 0 on."""
    base = min(trace.begun for strategy in job.strategies for trace in strategy.ranks.values())
    named: set[int] = set()
    for number, strategy in enumerate(job.strategies):
        for trace in strategy.ranks.values():
            if trace.world_rank not in named:
                named.add(trace.world_rank)
                name = {"name": f"rank {trace.world_rank} on {trace.host}"}
                yield {"ph": "M", "pid": trace.world_rank, "name": "process_name", "args": name}
                yield {
                    "ph": "M",
                    "pid": trace.world_rank,
                    "name": "process_sort_index",
                    "args": {"sort_index": trace.world_rank},
                }
            yield from _events_of_rank(trace, number * _ROWS, f"strategy {strategy.group}, rank {trace.rank}", base)


def _events_of_rank(trace: RankTrace, thread: int, name: str, base: int) -> Iterator[dict[str, Any]]:
    free_at: list[int] = []  # of each row
    for call in trace.calls:
        begun = call.entered or call.begun
        row = next((row for row, free in enumerate(free_at) if free <= begun), len(free_at))
        if row == len(free_at):
            free_at.append(0)
            args = {"name": name}
            yield {"ph": "M", "pid": trace.world_rank, "tid": thread + row, "name": "thread_name", "args": args}
        free_at[row] = call.ended
        where = {"ph": "X", "pid": trace.world_rank, "tid": thread + row}
        details = {"call": call.sequence, "details": call.details, "end": call.end}
        yield {**where, "name": call.name, "cat": "call", **_span(begun, call.ended, base), "args": details}
        for phase in phases_of(call):
            yield {**where, "name": phase.name, "cat": "phase", **_span(phase.begun, phase.ended, base)}


def _span(begun: int, ended: int, base: int) -> dict[str, float]:
    return {"ts": (begun - base) / 1000, "dur": (ended - begun) / 1000}
