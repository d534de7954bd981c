"""The rows that are recorded of a measurement, and the tables that are printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from harness.bounds import Bound, Link
from harness.cases import CASES
from harness.environments import MPIS
from harness.measuring import Timing
from harness.record import spread, text_of, text_of_bytes

Row = dict[str, str]
_HEADERS: Final = 14 + 20 + 32  # bytes of Ethernet, IP and TCP with its time stamps, in every packet


def _baseline(timing: Timing, timings: Sequence[Timing]) -> Timing | None:
    """Find the way that a way is compared with: of the same library, or of the case's rival, or of the faster MPI."""
    rival = CASES[timing.work.benchmark].rival
    found = [one for one in timings if one is not timing and one.way == timing.baseline]
    own = [one for one in found if one.peer == timing.peer]
    others = [one for one in found if one.peer in ((rival,) if rival else MPIS)]
    return min(own or others, key=lambda one: one.seconds, default=None)


def row_of(timing: Timing, timings: Sequence[Timing], bound: Bound | None) -> Row:
    """Make the row of a way, among those of the same work."""
    microseconds, nbytes = timing.rounds * 1e6, timing.work.nbytes
    row = {
        "benchmark": timing.work.benchmark,
        "kind": timing.work.kind,
        "work": timing.work.name,
        "bytes": str(nbytes),
        "arrays": str(len(timing.work.shapes)),
        "calls": str(timing.work.calls),
        "peer": timing.peer,
        "way": timing.way,
        "rounds": str(len(timing.rounds)),
        "steps": str(timing.steps),
        "first_us": f"{timing.first * 1e6:.1f}",
        **spread("us", microseconds, 2),
        "us_rounds": " ".join(f"{one:.2f}" for one in microseconds),
    }
    other = _baseline(timing, timings)
    if other is not None:
        row |= {"baseline": f"{other.way} ({other.peer})", **spread("ratio", other.rounds / timing.rounds, 3)}
    before = next((one for one in timings if one.way == timing.way and one.peer.startswith(f"{timing.peer}@")), None)
    if before is not None:
        row |= spread("old_by_new", before.rounds / timing.rounds, 3)
    idle_way = CASES[timing.work.benchmark].idle
    idle = next((one for one in timings if one.way == idle_way and one.peer == timing.peer), None)
    if other is not None and idle is not None:
        added, most = (np.median(one.rounds - idle.rounds) for one in (timing, other))
        row |= {"added": f"{added / most:.3f}"}
    seconds = bound.bound(timing.way, nbytes) if bound else None
    if seconds is not None:
        row |= {"bound_us": f"{seconds * 1e6:.2f}", "share_of_bound": f"{seconds / timing.seconds:.3f}"}
    if isinstance(bound, Link) and timing.sent:
        (sent, packets), least = timing.sent, bound.least(nbytes)
        row |= {"sent_bytes": f"{sent:.0f}", "sent_packets": f"{packets:.0f}", "sent_to_least": f"{sent / least:.4f}"}
        row |= {"net_sent_to_least": f"{(sent - _HEADERS * packets) / least:.4f}"}
    return row


def _numbers(row: Row, name: str) -> str:
    return f"{float(row[name]):.2f} ({float(row[f'{name}_low']):.2f} to {float(row[f'{name}_high']):.2f})"


def _time(row: Row) -> str:
    middle, low, high = (text_of(float(row[name])) for name in ("us", "us_low", "us_high"))
    return f"{middle:>7} ({low} to {high})"


# Columns: the field that a row must have, the head, and the cell.
_COLUMNS: Final[tuple[tuple[str, str, Callable[[Row], str]], ...]] = (
    ("us", "time", _time),
    ("ratio", "baseline / this", lambda row: f"{_numbers(row, 'ratio')}, {row['baseline']}"),
    ("added", "added / baseline's", lambda row: f"{float(row['added']):.2f}"),
    ("old_by_new", "old / new", lambda row: _numbers(row, "old_by_new")),
    ("share_of_bound", "bound / this", lambda row: f"{float(row['share_of_bound']):.0%}"),
    (
        "sent_to_least",
        "sent / least",
        lambda row: f"{row['sent_to_least']}, {row['net_sent_to_least']} without headers",
    ),
)


def lines_of(rows: Sequence[Row]) -> list[str]:
    """Make a table of the rows of one work: a line for each way, except those of an older commit."""
    rows = [row for row in rows if "@" not in row["peer"]]
    first = rows[0]
    arrays = f"{first['arrays']} arrays, " if first["kind"] == "list" else ""
    lines = ["", f"{first['work']}: {arrays}{text_of_bytes(int(first['bytes']))}"]
    columns = [column for column in _COLUMNS if any(column[0] in row for row in rows)]
    cells = [["", *(head for _, head, _ in columns)]]
    for row in rows:
        cells.append(
            [f"{row['way']} ({row['peer']})", *(cell(row) if name in row else "" for name, _, cell in columns)]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return lines + [" | ".join(f"{text:<{width}}" for text, width in zip(one, widths, strict=True)) for one in cells]
