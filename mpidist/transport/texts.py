"""Sizes and errors, in the few words that people read of them."""

from __future__ import annotations

import traceback

__all__ = ["count_text", "first_line", "last_line", "size_text", "text_of"]


def count_text(number: int, noun: str, plural: str = "") -> str:
    """Write a number of things: `1 pack`, `2 packs`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def size_text(nbytes: float) -> str:
    """Say how much that is, in the unit that people would choose."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text without its full stop; its kind, if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def last_line(error: BaseException) -> str:
    """Return the last line of an exception's text, where MPI says what went wrong, without its full stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip().rstrip(".")


def text_of(error: BaseException) -> str:
    """Return an exception's name and the first line of its text, also of one that cannot say what it is."""
    told = [entry for entry in traceback.format_exception_only(error) if not entry.startswith(" ")]  # no lines of code
    return told[0].splitlines()[0]
