"""What a part of the check found out: rows of a table, written as they come, and the table for people."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import record

__all__ = ["NOT_MEASURED", "WRONG", "Report", "Row", "read_rows", "table", "text_of", "time_text"]

NOT_MEASURED = "not measured"
WRONG = "**wrong**"


@dataclass(frozen=True)
class Row:
    """One answer; `verdict` is `right`, `WRONG`, or a goal and whether it is met or missed."""

    question: str
    got: str
    verdict: str = ""
    note: str = ""


class Report:
    """The rows of one part, on disk after each of them.

    Args:
        path: Where they go; `None` for nowhere.
        shows: Whether rows are printed, too: not by all ranks.
        judges: Whether goals are met or missed; else they are left open.
    """

    def __init__(self, path: Path | None, shows: bool = True, judges: bool = True) -> None:
        self.rows: list[Row] = []
        self._path, self._shows, self._judges = path, shows, judges

    def add(
        self,
        question: str,
        got: object,
        is_right: bool | None = None,
        goal: tuple[str, bool] | None = None,
        note: str = "",
    ) -> None:
        """Note an answer, and whether it is right, or a goal: what was wanted, and whether it was met."""
        verdict = {True: "right", False: WRONG, None: ""}[is_right]
        if goal is not None:
            verdict = f"{goal[0]}: {('met' if goal[1] else 'missed') if self._judges else 'open'}"
        row = Row(question, str(got), verdict, note)
        self.rows.append(row)
        if self._shows:
            print(f"  {question}: {got} {verdict}".rstrip(), flush=True)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")

    def at_most(self, question: str, times: np.ndarray, most: float, note: str = "") -> None:
        """Note times whose median is to be at most so many seconds."""
        goal = f"at most {time_text(most)}", bool(np.median(times) <= most)
        self.add(question, text_of(times), goal=goal, note=note)

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
            cells = (part, row.question, row.got, row.verdict, row.note)
            lines.append("| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |")
    return "\n".join([*lines, "", *notes, ""])


def text_of(times: np.ndarray) -> str:
    """Write as `47.5 us (47.1 us to 48.9 us)`: the median, and where the middle 90 % lie."""
    low, median, high = (time_text(float(one)) for one in np.percentile(times, (5, 50, 95)))
    return f"{median} ({low} to {high})"


def time_text(seconds: float) -> str:
    """Write a time with three digits and its unit."""
    return record.text_of(1e6 * seconds)
