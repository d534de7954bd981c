"""What is printed and recorded of parameter servers: rows, tables, and what was wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from contest.measuring import Timing
from record import text_of, text_of_bytes

__all__ = ["Row", "lines_of", "rows_of", "targets_of"]

Row = dict[str, str]

_TEXTS: Final = {"messages": "Isend/Irecv", "window": "Accumulate/Get", "tensorflow": "TensorFlow"}
_RATIOS: Final = {"by_tensorflow": "TensorFlow / ours at least 5", "by_copies": "two copies / ours at least 0.6"}


def rows_of(timings: Sequence[Timing]) -> list[Row]:
    """Make a row of text for each kind of servers and each way, with what it is held against."""
    found = {(one.peer, one.way): one for one in timings}
    rows = []
    for one in timings:
        microseconds, work = one.rounds * 1e6, one.work
        row = {
            "work": work.name,
            "bytes": str(work.nbytes),
            "arrays": str(len(work.shapes)),
            "kind": one.peer,
            "way": one.way,
            "rounds": str(len(one.rounds)),
            "steps": str(one.steps),
            **_spread("us", microseconds, 2),
            "us_rounds": " ".join(f"{number:.2f}" for number in microseconds),
        }
        for kind in (kind for kind in _TEXTS if (kind, one.way) in found and kind != one.peer):
            row |= _spread(f"by_{kind}", found[kind, one.way].rounds / one.rounds, 3)
        copies = found.get(("messages", "two copies"))
        if one.way == "push, pull" and copies is not None:
            row |= _spread("by_copies", copies.rounds / one.rounds, 3)
        rows.append(row)
    return rows


def _spread(name: str, rounds: np.ndarray[Any, Any], digits: int) -> Row:
    numbers = {name: np.median(rounds), f"{name}_low": rounds.min(), f"{name}_high": rounds.max()}
    return {key: f"{number:.{digits}f}" for key, number in numbers.items()}


def lines_of(rows: Sequence[Row]) -> list[str]:
    """Make a table of one work: a line for each way, a column for each kind, and the others' times / mpidist's."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    cells = [["", *_heads(kinds)]]
    for way in dict.fromkeys(row["way"] for row in rows):
        cells.append([way, *_cells({row["kind"]: row for row in rows if row["way"] == way}, kinds)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [" | ".join(f"{text:<{width}}" for text, width in zip(one, widths, strict=True)) for one in cells]
    return ["", _title(rows[0]), *lines]


def _title(row: Row) -> str:
    arrays = f"{row['arrays']} arrays, " if row["arrays"] != "1" else ""
    return f"{row['work']}: {arrays}{text_of_bytes(int(row['bytes']))}"


def _against(kinds: Sequence[str]) -> list[str]:
    return [*(kind for kind in kinds if kind != "mpidist"), *(["copies"] if "messages" in kinds else [])]


def _heads(kinds: Sequence[str]) -> list[str]:
    names = [_TEXTS.get(kind, kind) for kind in kinds]
    return [*names, *(f"{_TEXTS.get(kind, kind)} / ours" for kind in _against(kinds))]


def _ratio(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.1g}"


def _cells(of: dict[str, Row], kinds: Sequence[str]) -> list[str]:
    """Return the time of each kind, and the times of the others by mpidist's."""
    ours = of.get("mpidist", {})
    ratios = [_ratio(float(ours[f"by_{kind}"])) if ours.get(f"by_{kind}") else "" for kind in _against(kinds)]
    return [*(text_of(float(of[kind]["us"])) if kind in of else "" for kind in kinds), *ratios]


def targets_of(rows: Sequence[Row]) -> list[str]:
    """Say what was wanted of mpidist's servers, and what they reach."""
    ours = {(row["workers"], row["servers"], row["work"], row["way"]): row for row in rows if row["kind"] == "mpidist"}
    lines = ["", "wanted, and reached with so many workers and servers"]
    for (workers, servers, work, way), row in sorted(ours.items(), key=lambda item: (item[0][1], item[0][0])):
        reached: dict[str, str] = {}
        if (work, way) == ("resnet50", "push, pull"):
            for name, wanted in _RATIOS.items():
                reached |= {wanted: f"{float(row[name]):.2f}"} if row.get(name) else {}
        if work == "4" and way != "push, pull":
            rate = int(workers) / float(row["us"]) * 1e6
            reached["at most 15 us"] = f"{float(row['us']):.1f} us, {rate:.0f} requests a second"
        alone = ours.get(("1", servers, work, way))
        if workers == "2" and alone is not None and int(row["bytes"]) > 1 << 20:
            reached["at least 1.6 times as much as one worker"] = f"{2 * float(alone['us']) / float(row['us']):.2f}"
        lines += [f"{work}, {way}: {wanted}: {what} ({workers}, {servers})" for wanted, what in reached.items()]
    return lines
