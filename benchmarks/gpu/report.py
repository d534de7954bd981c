"""What a part of the check found out: rows of a table, written as they come, and the table for people."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["NOT_MEASURED", "Report", "Row", "is_missing", "read_report", "table"]

NOT_MEASURED = "not measured"
NOT_HERE = (
    "Not measurable on one GPU: how fast NCCL is between GPUs and between nodes, GPUs that reach a network by "
    "themselves, and what ranks that share this GPU would take on GPUs of their own. Times of several ranks are those "
    "of ranks that take turns."
)
VERDICTS = {True: "yes", False: "**no**", None: ""}


@dataclass(frozen=True)
class Row:
    """One answer.

    Attributes:
        question: What was asked.
        got: What was found, in words.
        is_right: Whether results are right; `None` where something was measured, or nothing at all.
        note: What a reader must know beside it, or why there is no answer.
        numbers: The same for programs.
    """

    question: str
    got: str = ""
    is_right: bool | None = None
    note: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)


class Report:
    """The rows and facts of one part, on disk after each of them.

    Args:
        path: Where they go; `None` for nowhere.
        shows: Whether rows are printed, too: not by all ranks.
    """

    def __init__(self, path: Path | None, shows: bool = True) -> None:
        self.rows: list[Row] = []
        self.facts: dict[str, Any] = {}
        self.num_failed = 0
        self._path = path
        self._shows = shows

    def add(self, question: str, got: str, is_right: bool | None = None, note: str = "", **numbers: Any) -> None:
        """Note an answer."""
        self.rows.append(Row(question, got, is_right, note, numbers))
        if self._shows:
            print(f"  {question}: {got}{' WRONG' * (is_right is False)}", flush=True)
        self._write()

    def fact(self, name: str, value: Any) -> None:
        """Note what the machine is."""
        self.facts[name] = value
        self._write()

    @contextmanager
    def question(self, question: str) -> Iterator[None]:
        """Ask one; an error becomes its answer, and the next one is asked."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.num_failed += 1
            line = (str(error).strip().splitlines() or [""])[0]
            self.add(question, NOT_MEASURED, note=f"{type(error).__name__}: {line}"[:300])

    def _write(self) -> None:
        if self._path is None:
            return
        part = self._path.with_suffix(".part")
        text = json.dumps({"facts": self.facts, "rows": [asdict(row) for row in self.rows]}, indent=1, default=str)
        part.write_text(text)
        part.replace(self._path)


def read_report(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Read what a part has written so far: facts and rows; nothing if it has written none."""
    try:
        content = json.loads(path.read_text())
        return content["facts"], [Row(**row) for row in content["rows"]]
    except (OSError, ValueError, KeyError, TypeError):
        return {}, []


def table(facts: Mapping[str, Any], rows: Mapping[str, Sequence[Row]], notes: Sequence[str]) -> str:
    """Write Markdown.

    Args:
        facts: Of the machine and the run, in the order to be shown.
        rows: Answers of each part.
        notes: Lines to be shown after it, such as what became of the parts.
    """
    every = [row for its in rows.values() for row in its]
    wrong, missing = (sum(map(one, every)) for one in (lambda row: row.is_right is False, is_missing))
    lines = ["# GPU check", "", *(f"* {name}: {_cell(value)}" for name, value in facts.items())]
    lines += ["", f"{len(every)} answers: {wrong} wrong, {missing} not measured.", NOT_HERE, ""]
    lines += ["Times are medians (5 % to 95 %).", "", "| part | question | result | right | note |", "| --- " * 5 + "|"]
    for part, its in rows.items():
        for row in its:
            cells = (part, row.question, row.got, VERDICTS[row.is_right], row.note)
            lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join([*lines, "", *notes, ""])


def is_missing(row: Row) -> bool:
    """Say whether a question has no answer."""
    return row.got == NOT_MEASURED


def _cell(value: Any) -> str:
    return " ".join(str(value).replace("|", "\\|").split())
