"""What is printed and recorded of a measurement."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from record import text_of, text_of_bytes

from contest.bounds import Bound, Link
from contest.environments import MPIS
from contest.measuring import Timing

__all__ = ["lines_of", "row_of"]


def held_against(timing: Timing, timings: Sequence[Timing]) -> Timing | None:
    """Find the way that a way is held against: of the same library, or else of the faster MPI."""
    found = [one for one in timings if one.work == timing.work and one.way == timing.baseline != timing.way]
    own = [one for one in found if one.peer == timing.peer]
    return min(own or [one for one in found if one.peer in MPIS], key=lambda one: one.seconds, default=None)


def older(timing: Timing, timings: Sequence[Timing]) -> Timing | None:
    """Find the same way of an older commit."""
    found = [one for one in timings if (one.work, one.way) == (timing.work, timing.way)]
    return next((one for one in found if one.peer.startswith(f"{timing.peer}@")), None)


def row_of(timing: Timing, timings: Sequence[Timing], bound: Bound | None) -> dict[str, str]:
    """Make one row of text for a way and a work."""
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
        **_spread("us", microseconds, 2),
        "us_rounds": " ".join(f"{one:.2f}" for one in microseconds),
    }
    other = held_against(timing, timings)
    if other is not None:
        row |= {"baseline": f"{other.way} ({other.peer})", **_spread("ratio", other.rounds / timing.rounds, 3)}
    before = older(timing, timings)
    if before is not None:
        row |= _spread("old_by_new", before.rounds / timing.rounds, 3)
    seconds = bound.bound(timing.way, nbytes) if bound else None
    if seconds is not None:
        row |= {"bound_us": f"{seconds * 1e6:.2f}", "share_of_bound": f"{seconds / timing.seconds:.3f}"}
    if timing.sent:
        row |= {"sent_bytes": f"{timing.sent[0]:.0f}", "mean_sent_bytes": f"{timing.mean_sent[0]:.0f}"}
    if isinstance(bound, Link) and timing.sent:
        sent, packets = timing.sent
        row |= {"sent_packets": f"{packets:.0f}"}
        row |= {"sent_to_least": f"{bound.to_least(sent, nbytes):.4f}"}
        row |= {"net_sent_to_least": f"{bound.to_least(sent, nbytes, packets):.4f}"}
    return row


def _spread(name: str, rounds: np.ndarray, digits: int) -> dict[str, str]:
    numbers = {name: np.median(rounds), f"{name}_low": rounds.min(), f"{name}_high": rounds.max()}
    return {key: f"{number:.{digits}f}" for key, number in numbers.items()}


def lines_of(rows: Sequence[dict[str, str]]) -> list[str]:
    """Make a table of the rows of one work: a line for each way, but for those of an older commit."""
    rows = [row for row in rows if "@" not in row["peer"]]
    first = rows[0]
    arrays = f"{first['arrays']} arrays, " if first["kind"] == "list" else ""
    lines = ["", f"{first['work']}: {arrays}{text_of_bytes(int(first['bytes']))}"]
    heads = {"time": _time}
    heads |= {"baseline / this": _ratio} if any("ratio" in row for row in rows) else {}
    heads |= {"old / new": _by_old} if any("old_by_new" in row for row in rows) else {}
    heads |= {"bound / this": _share} if any("share_of_bound" in row for row in rows) else {}
    heads |= {"sent / least": _sent} if any("sent_to_least" in row for row in rows) else {}
    heads |= {"sent: most, mean": _bytes} if any(map(_bytes, rows)) else {}
    cells = [
        ["", *heads],
        *([f"{row['way']} ({row['peer']})", *(cell(row) for cell in heads.values())] for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return lines + [" | ".join(f"{text:<{width}}" for text, width in zip(one, widths, strict=True)) for one in cells]


def _time(row: dict[str, str]) -> str:
    middle, low, high = (text_of(float(row[name])) for name in ("us", "us_low", "us_high"))
    return f"{middle:>7} ({low} to {high})"


def _ratio(row: dict[str, str]) -> str:
    return f"{_numbers(row, 'ratio')}, {row['baseline']}" if "ratio" in row else ""


def _by_old(row: dict[str, str]) -> str:
    return _numbers(row, "old_by_new") if "old_by_new" in row else ""


def _numbers(row: dict[str, str], name: str) -> str:
    return f"{float(row[name]):.2f} ({float(row[f'{name}_low']):.2f} to {float(row[f'{name}_high']):.2f})"


def _share(row: dict[str, str]) -> str:
    return f"{float(row['share_of_bound']):.0%}" if "share_of_bound" in row else ""


def _bytes(row: dict[str, str]) -> str:
    most, mean = (float(row.get(name) or 0) for name in ("sent_bytes", "mean_sent_bytes"))
    return f"{text_of_bytes(most)}, {text_of_bytes(mean)}" if most else ""


def _sent(row: dict[str, str]) -> str:
    if "sent_to_least" not in row:
        return ""
    return f"{float(row['sent_to_least']):.3f}, {float(row['net_sent_to_least']):.3f} without headers"
