"""One pytest report out of the reports, or the stacks, of several ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from _pytest._code.code import ExceptionChainRepr, ReprEntryNative, ReprFileLocation, ReprTraceback

# pytest's own representation of a chain of exceptions: (traceback, where it ends, line shown below it).
Link = tuple[ReprTraceback, "ReprFileLocation | None", "str | None"]
Part = tuple[str, list[Link]]
_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b")


def text_links(text: str, path: str = "", line: int = 0) -> list[Link]:
    """Return a text as the links of an exception chain."""
    first_line = text.strip().partition("\n")[0]
    entry = ReprEntryNative([text.rstrip() + "\n"])
    return [(ReprTraceback([entry], None, "native"), ReprFileLocation(path, line, first_line), None)]


def links(report: Any) -> list[Link]:
    """Return a failed report's traceback as the links of an exception chain."""
    longrepr = report.longrepr
    if isinstance(longrepr, ExceptionChainRepr):
        return list(longrepr.chain)
    if hasattr(longrepr, "reprtraceback"):
        return [(longrepr.reprtraceback, longrepr.reprcrash, None)]
    return text_links(str(longrepr))


def ranks_text(ranks: Iterable[int]) -> str:
    """Return '[rank 2]' or '[ranks 0, 1, 3]'."""
    numbers = sorted(ranks)
    return f"[rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}]"


def rank_parts(reports: Mapping[int, Any]) -> list[Part]:
    """Return the tracebacks under their ranks, those which are the same on several ranks once."""
    groups: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        groups.setdefault(_ADDRESS.sub("", str(report.longrepr)), []).append(rank)
    return [(ranks_text(ranks), links(reports[ranks[0]])) for ranks in groups.values()]


def chain(parts: Iterable[Part]) -> ExceptionChainRepr:
    """Join parts to one chain, each below its title; the first gives the short summary its line."""
    joined: list[Link] = []
    summary: ReprFileLocation | None = None
    for title, part in parts:
        if title:
            # A chain shows a description below its link: that of the part before, or an empty one.
            above = joined.pop() if joined else (ReprTraceback([], None, "long"), None, None)
            joined.append((above[0], above[1], title))
        joined += part
        end = part[-1][1]
        if summary is None and end is not None:
            summary = ReprFileLocation(end.path, end.lineno, f"{title} {end.message}".strip())
    joined[-1] = (joined[-1][0], summary, None)
    return ExceptionChainRepr(joined)


def rank_sections(reports: Mapping[int, Any]) -> list[tuple[str, str]]:
    """Return what the ranks' tests have printed and logged, each section named by its rank."""
    return [
        (f"{name} {ranks_text([rank])}", text)
        for rank, report in sorted(reports.items())
        for name, text in report.sections
    ]


def failed_test(nodeid: str, location: Any, longrepr: Any, sections: Any = ()) -> pytest.TestReport:
    """Return the report of a test that did not come to its own."""
    return pytest.TestReport(nodeid, tuple(location), {}, "failed", longrepr, "call", list(sections))
