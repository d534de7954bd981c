"""The results as a table, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpu.report import Row

__all__ = ["NOT_HERE", "table"]

NOT_HERE = (
    "Not measurable on one GPU: how fast NCCL is between GPUs and between nodes, GPUs that reach a network by "
    "themselves, and what ranks that share this GPU would take on GPUs of their own. Times of several ranks are those "
    "of ranks that take turns."
)
VERDICTS = {True: "yes", False: "**no**", None: ""}


def table(facts: Mapping[str, Any], rows: Sequence[Row], notes: Sequence[str]) -> str:
    """Write Markdown.

    Args:
        facts: Of the machine and the run, in the order to be shown.
        rows: Answers; those with the same id stand together, in the order of their first.
        notes: Lines to be shown after it, such as what became of the parts.
    """
    lines = ["# GPU check", ""]
    lines += [f"* {name}: {_cell(value)}" for name, value in facts.items()]
    judged = [row for row in rows if row.met is not None]
    missing = [row for row in rows if row.got == "not measured"]
    lines += ["", f"{sum(bool(row.met) for row in judged)} of {len(judged)} targets met, {len(missing)} not measured."]
    lines += [NOT_HERE, "", "Times are medians (5 % to 95 %).", ""]
    lines += ["| id | question | target | got | met | note |", "| --- | --- | --- | --- | --- | --- |"]
    for number in dict.fromkeys(row.id for row in rows):
        for row in (row for row in rows if row.id == number):
            met = "not measured" if row.got == "not measured" else VERDICTS[row.met]
            got = "" if row.got == "not measured" else row.got
            lines.append("| " + " | ".join(map(_cell, (row.id, row.question, row.target, got, met, row.note))) + " |")
    return "\n".join([*lines, "", *notes, ""])


def _cell(value: Any) -> str:
    return " ".join(str(value).replace("|", "\\|").split())
