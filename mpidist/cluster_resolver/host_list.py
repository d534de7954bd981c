"""Slurm's short forms for lists: `n[001-003,7],gpu7` and `2(x3),1`, written out."""

from __future__ import annotations

import itertools
import re

__all__ = ["expand_host_list", "expand_tasks_per_node"]

# The parts of one name: "n[1-2]-ib[0,1]x" has n, [1-2], -ib, [0,1], x.
_NAME_PART = re.compile(r"\[(?P<ranges>[^\[\]]*)\]|(?P<text>[^\[\],\s()]+)")
_RANGE = re.compile(r"(?P<low>\d+)(?:-(?P<high>\d+))?")
# "2" or "2(x3)"
_COUNT = re.compile(r"(?P<count>\d+)(?:\(x(?P<times>\d+)\))?")


def expand_host_list(text: str) -> list[str]:
    """Write out a Slurm host list, in its own order; one that is listed twice is there twice.

    Names are separated by commas, with any number of brackets anywhere in a name. Leading zeros are kept; of several
    brackets the last runs fastest: `a[1-2]b[3-4]` is a1b3, a1b4, a2b3, a2b4.
    """
    hosts: list[str] = []
    position = 0
    while True:
        parts: list[list[str]] = []  # of one name
        while match := _NAME_PART.match(text, position):
            ranges = match["ranges"]
            parts.append([match["text"]] if ranges is None else _expand_ranges(text, match.start("ranges"), ranges))
            position = match.end()
        following = text[position : position + 1]
        if following == "[":
            raise _malformed("host list", text, position, "this bracket is not closed by the next one")
        if not parts:
            raise _malformed("host list", text, position, "a host name is missing")
        hosts += ["".join(choice) for choice in itertools.product(*parts)]
        if not following:
            return hosts
        if following != ",":
            raise _malformed("host list", text, position, f"unexpected {following!r}")
        position += 1


def expand_tasks_per_node(text: str) -> list[int]:
    """Write out Slurm's counts per node: `2(x3),1` is [2, 2, 2, 1]."""
    counts: list[int] = []
    position = 0
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            raise _malformed("tasks per node", text, position, f"{item!r} is not of the form 2 or 2(x3)")
        counts += [int(match["count"])] * int(match["times"] or 1)
        position += len(item) + 1
    return counts


def _expand_ranges(text: str, position: int, ranges: str) -> list[str]:
    """Write out what stands between brackets: `001-003,7` is 001, 002, 003, 7."""
    numbers: list[str] = []
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise _malformed("host list", text, position, f"{item!r} is not of the form 3 or 1-3")
        low, high = match["low"], match["high"] or match["low"]
        if int(high) < int(low):
            raise _malformed("host list", text, position, f"the range {item!r} runs backwards")
        # The first number's width holds for all: 08-10 is 08, 09, 10 and 8-10 is 8, 9, 10.
        numbers += [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
        position += len(item) + 1
    return numbers


def _malformed(what: str, text: str, position: int, why: str) -> ValueError:
    return ValueError(f"{what} {text!r}, at character {position + 1}: {why}")
