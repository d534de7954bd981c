"""What a request is about: an array on a server, or some rows of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, final

import numpy as np

__all__ = ["KnownList", "Location", "RowsChange", "by_server"]

Array = np.ndarray[Any, Any]


@final
@dataclass(frozen=True)
class Location:
    """Where an array lives.

    Attributes:
        server: The number of the server.
        key: The number of the array, among all arrays of all servers.
        shape: The shape.
        dtype: The dtype.
        name: For people.
    """

    server: int
    key: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    name: str

    @cached_property
    def read_call(self) -> str:
        """What reading it is called, for people."""
        return f"read of {self.name!r}"

    @cached_property
    def change_call(self) -> str:
        """What changing it is called, for people."""
        return f"change of {self.name!r}"

    def empty(self) -> Array:
        """Return a new array that takes the values."""
        return np.empty(self.shape, self.dtype)


@final
class RowsChange(NamedTuple):
    """What changes some rows of an array.

    Attributes:
        location: The array.
        indices: [k] int64, the numbers of the rows, which exist.
        values: [k, ...] contiguous, of the array's dtype.
    """

    location: Location
    indices: Array
    values: Array

    @classmethod
    def none(cls, location: Location) -> RowsChange:
        """Change no row."""
        return cls(location, np.empty(0, np.int64), np.empty((0, *location.shape[1:]), location.dtype))

    @classmethod
    def joined(cls, changes: Sequence[RowsChange]) -> RowsChange:
        """Change what some changes of one array do, in their order. Copies."""
        arrays = ([change.indices for change in changes], [change.values for change in changes])
        return cls(changes[0].location, *map(np.concatenate, arrays))


@final
class KnownList(NamedTuple):
    """A list of variables that a server has numbered.

    Attributes:
        number: The number; of one variable, its key.
        places: Where the variables lie in the server's shared memory; of one variable, the server's answers tell.
    """

    number: int
    places: tuple[int, ...]


def by_server(locations: Sequence[Location]) -> dict[int, list[int]]:
    """Return the places in a list of locations, by server."""
    parts: dict[int, list[int]] = {}
    for place, location in enumerate(locations):
        parts.setdefault(location.server, []).append(place)
    return parts
