"""What a part of the check found out: rows of a table, written as they come, and the table for people."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from harness import record

NOT_MEASURED, WRONG = "not measured", "**wrong**"


@dataclass(frozen=True)
class Row:
    """One answer."""

    question: str
    got: str
    verdict: str = ""  # a goal and whether it is met or missed, or of tests `right` or `WRONG`
    note: str = ""


class Report:
    """The rows of one part, written to `path` and shown as they come. Goals are left open, unless it `judges`."""

    def __init__(self, path: Path | None, shows: bool = True, judges: bool = True) -> None:
        self.rows: list[Row] = []
        self._path, self._shows, self._judges = path, shows, judges

    def add(self, question: str, got: str, goal: tuple[str, bool] | None = None, note: str = "") -> None:
        """Note an answer, and perhaps a goal: what was wanted, and whether it was met."""
        verdict = "" if goal is None else f"{goal[0]}: {('missed', 'met')[goal[1]] if self._judges else 'open'}"
        row = Row(question, got, verdict, note)
        self.rows.append(row)
        if self._shows:
            print(f"  {question}: {got} {verdict}".rstrip(), flush=True)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")

    def at_most(self, question: str, times: np.ndarray | float, most: float) -> None:
        """Note times whose median is to be at most so many seconds."""
        goal = f"at most {record.text_of(1e6 * most)}", bool(np.median(times) <= most)
        self.add(question, text_of(times), goal)

    @contextmanager
    def question(self, question: str) -> Iterator[None]:
        """Ask one; an error becomes its answer, and the next one is asked."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            line = (str(error).strip().splitlines() or [""])[0]
            self.add(question, NOT_MEASURED, note=f"{type(error).__name__}: {line}"[:300])


def read_rows(path: Path) -> list[Row]:
    """Read what a part has written so far, but for a line that was cut off."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [Row(**json.loads(line)) for line in lines]


def table(facts: Mapping[str, str], rows: Mapping[str, Sequence[Row]], notes: Sequence[str]) -> str:
    """Write Markdown: facts of the run, the answers of each part, and lines to be shown after it."""
    every = [row for its in rows.values() for row in its]
    wrong, missing = sum(row.verdict == WRONG for row in every), sum(row.got == NOT_MEASURED for row in every)
    lines = ["# GPU check", "", *(f"* {name}: {value}" for name, value in facts.items()), ""]
    lines += [f"{len(every)} answers: {wrong} wrong, {missing} not measured. Times are medians (5 % to 95 %).", ""]
    lines += ["| part | question | result | verdict | note |", "| --- " * 5 + "|"]
    for part, its in rows.items():
        for row in its:
            cells = (" ".join(cell.replace("|", "\\|").split()) for cell in (part, *asdict(row).values()))
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *notes, ""])


def text_of(times: np.ndarray | float) -> str:
    """Write as `47.5 us (47.1 us to 48.9 us)`: the median, and where the middle 90 % lie."""
    low, median, high = (record.text_of(1e6 * one) for one in np.percentile(times, (5, 50, 95)))
    return f"{median} ({low} to {high})"
