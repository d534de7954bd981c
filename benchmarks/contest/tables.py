"""What is printed and recorded of a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from record import text_of, text_of_bytes

from contest.measuring import Timing
from contest.roofline import Roofline
from contest.targets import MPIS, Verdict

__all__ = ["lines_of_roofline", "lines_of_timings", "lines_of_verdicts", "row_of"]

_SHORT: Final = {
    "raw": "raw",
    "mpidist symmetric per node": "sym.per node",
    "mpidist symmetric": "symmetric",
    "mpidist in place": "in place",
    "mpidist per node": "per node",
    "mpidist": "mpidist",
}


def row_of(timing: Timing, roofline: Roofline) -> dict[str, str]:
    """Make one row of text for a way and a work."""
    microseconds = timing.rounds * 1e6
    row = {
        "kind": timing.work.kind,
        "work": timing.work.name,
        "bytes": str(timing.work.nbytes),
        "arrays": str(len(timing.work.shapes)),
        "calls": str(timing.work.calls),
        "peer": timing.peer,
        "way": timing.way,
        "rounds": str(len(timing.rounds)),
        "steps": str(timing.steps),
        "first_us": f"{timing.first * 1e6:.1f}",
        "us": f"{np.median(microseconds):.2f}",
        "us_low": f"{microseconds.min():.2f}",
        "us_high": f"{microseconds.max():.2f}",
        "us_rounds": " ".join(f"{one:.2f}" for one in microseconds),
    }
    bound = roofline.bound(timing.way, timing.work.nbytes)
    if bound is not None:
        row |= {"bound_us": f"{bound * 1e6:.2f}", "share_of_bound": f"{bound / timing.seconds:.3f}"}
    return row


def lines_of_timings(timings: Sequence[Timing]) -> list[str]:
    """Make a table for each MPI, and one for all others: a row for each work, a column for each way."""
    tables = []
    for mpi in (*MPIS, ""):
        chosen = [one for one in timings if one.peer == mpi or (not mpi and one.peer not in MPIS)]
        ways = list(dict.fromkeys(one.way for one in chosen))
        if not chosen:
            continue
        heads = [_SHORT.get(way, way) if mpi else way for way in ways]
        width = max(10, *map(len, heads))
        tables += ["", f"{mpi:>10} | " + " | ".join(f"{head:>{width}}" for head in heads)]
        for work in dict.fromkeys(one.work for one in chosen):
            of = {one.way: text_of(one.seconds * 1e6) for one in chosen if one.work == work}
            tables.append(f"{work.name:>10} | " + " | ".join(f"{of.get(way, '-'):>{width}}" for way in ways))
    return tables


def lines_of_roofline(roofline: Roofline, timings: Sequence[Timing]) -> list[str]:
    """Say what the memory does, and what share of it the ways of mpidist reach."""
    lines = ["", "memory, GB/s of reads and writes by each rank: copy, add in place; one rank alone, copy, add"]
    for size in sorted({size for _, size in roofline.seconds}):
        passes = ("copy", "add", "copy alone", "add alone")
        rates = " ".join(f"{roofline.traffic(one, size) / 1e9:>8.1f}" for one in passes)
        lines.append(f"{text_of_bytes(size):>10} | {rates}")
    ways = list(dict.fromkeys(one.way for one in timings if roofline.bound(one.way, one.work.nbytes) is not None))
    if not ways:
        return lines
    lines += ["", "share of what the memory allows (the faster MPI)"]
    lines.append(f"{'':>10} | " + " | ".join(f"{_SHORT[way]:>12}" for way in ways))
    for work in dict.fromkeys(one.work for one in timings):
        cells = []
        for way in ways:
            seconds = min((one.seconds for one in timings if (one.work, one.way) == (work, way)), default=np.inf)
            bound = roofline.bound(way, work.nbytes)
            cells.append(f"{bound / seconds:>12.0%}" if bound and np.isfinite(seconds) else f"{'-':>12}")
        if any(cell.strip() != "-" for cell in cells):
            lines.append(f"{work.name:>10} | " + " | ".join(cells))
    return lines


def lines_of_verdicts(found: Sequence[Verdict], what: str = "asked and got, theirs / ours") -> list[str]:
    """Make the table of what is asked and got, in the order given, with a head that says what."""
    if not found:
        return []
    asked = [one for one in found if one.is_met is not None]
    width = max(len(one.text) for one in found)
    lines = ["", f"{what}: {sum(bool(one.is_met) for one in asked)} of {len(asked)} are met"]
    for one in found:
        mark = {True: "yes", False: "NO", None: ""}[one.is_met]
        lines.append(f"{mark:>3} | {one.text:<{width}} | {one.asked:>11} | {one.got}")
    return lines
