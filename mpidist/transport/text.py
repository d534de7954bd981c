"""Short texts for people: ranks, sizes, numbers, values and errors."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from enum import Enum
from numbers import Number
from typing import Any, Final, TypeVar

__all__ = [
    "count_text",
    "first_line",
    "group_ranks",
    "last_line",
    "name_ranks",
    "size_text",
    "text_of",
    "time_text",
    "value_text",
]

T = TypeVar("T")

_MAX_ITEMS: Final = 8  # the longest list or tuple that is written out


def count_text(number: int, noun: str, plural: str = "") -> str:
    """Write a number of things: `1 pack`, `2 packs`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def size_text(nbytes: float) -> str:
    """Write a number of bytes in a unit of suitable size."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def time_text(seconds: float) -> str:
    """Write a time in a unit of suitable size: `0 s`, `12 us`, `3.4 ms`, `1.5 s`, `2 min 5 s`, `3 h 20 min`."""
    if seconds < 50e-9:
        return "0 s"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 119.95:
        return f"{seconds:.4g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text without the full stop; its type, if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def last_line(error: BaseException) -> str:
    """Return the last line of an exception's text (the reason, in MPI's errors) without the full stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip().rstrip(".")


def text_of(error: BaseException) -> str:
    """Return an exception's type and the first line of its text, also if its `__str__` raises.

    Of a text that is the traceback of another error, as JAX's are, it is the last line: that error's.
    """
    entries = [entry for entry in traceback.format_exception_only(error) if not entry.startswith(" ")]  # no code
    lines = entries[0].splitlines()
    return lines[-1 if lines[0].endswith("Traceback (most recent call last):") else 0]


def value_text(value: Any) -> str:
    """Write an argument as `repr` does; if that may show an address or many numbers, write its type."""
    if value is None or isinstance(value, (str, bytes, Number, Enum)):
        return repr(value)
    if type(value) in (list, tuple) and len(value) <= _MAX_ITEMS:
        items = ", ".join(map(value_text, value))
        return f"[{items}]" if type(value) is list else f"({items})"
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    return f"an object of type {type(value).__module__}.{type(value).__qualname__}"


def name_ranks(ranks: Iterable[int]) -> str:
    """Write ranks with ranges: `rank 3`, `ranks 0-2, 5`."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ordered) != 1 else ''} {', '.join(texts)}"


def group_ranks(values: Mapping[int, T]) -> dict[T, list[int]]:
    """Return the ranks of each value, in order, to be named together."""
    groups: dict[T, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return groups
