"""A seeded fault."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A change to one place of the library that some test must notice.

    Attributes:
        file: Where it is, below the folder of the table.
        old: The text to replace, which the file has exactly once.
        new: The text in its place.
        why: What goes wrong for a user.
    """

    file: str
    old: str
    new: str
    why: str
