"""What a part of the check found out: rows of a table, written as they come."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Report", "Row", "read_report"]


@dataclass(frozen=True)
class Row:
    """One answer.

    Attributes:
        id: Of the question: `G1`, or a word where the questions have no number.
        question: What was asked.
        target: What was wanted; empty where a number is only shown.
        got: What was found, in words.
        met: Whether the target was met; `None` if nothing was measured, or there is no target.
        note: What a reader must know beside it, or why there is no answer.
        numbers: The same for programs.
    """

    id: str
    question: str
    target: str = ""
    got: str = ""
    met: bool | None = None
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

    def add(
        self,
        number: str,
        question: str,
        got: str,
        *,
        target: str = "",
        met: bool | None = None,
        note: str = "",
        **numbers: Any,
    ) -> None:
        """Note an answer."""
        row = Row(number, question, target, got, met, note, numbers)
        self.rows.append(row)
        if self._shows:
            verdict = {True: "met", False: "NOT MET", None: ""}[met]
            print(f"  {row.id:8} {row.question}: {row.got}  {row.target and f'[{row.target}]'} {verdict}", flush=True)
        self._write()

    def fact(self, name: str, value: Any) -> None:
        """Note what the machine is."""
        self.facts[name] = value
        self._write()

    @contextmanager
    def question(self, number: str, question: str) -> Iterator[None]:
        """Ask one; an error becomes its answer, and the next one is asked."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.num_failed += 1
            self.add(number, question, "not measured", note=_first_line(error))

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


def _first_line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}"[:300]
