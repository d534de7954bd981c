"""Tables of tests in which every two values of two parameters meet, instead of all products."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

__all__ = ["rows_of_pairs"]

Pair = tuple[tuple[str, int], ...]


def rows_of_pairs(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Choose rows, by their numbers, that have every pair of values of all rows; the choice is always the same.

    Args:
        rows: The parameters of each case, by name; rows share the objects of equal values.
    """
    pairs = [_pairs(row) for row in rows]
    missing: set[Pair] = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda number: len(pairs[number] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return sorted(chosen)


def _pairs(row: dict[str, Any]) -> set[Pair]:
    values = [(name, id(value)) for name, value in sorted(row.items())]
    return {*combinations(values, min(2, len(values)))}
