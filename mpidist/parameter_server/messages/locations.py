"""What a request is about: arrays on servers, rows of them, and all that a worker pushes at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.errors import InvalidArgumentError
from mpidist.transport.reduction import Reduction

__all__ = ["Location", "Push", "RowsChange", "by_server"]

Array = np.ndarray[Any, Any]

_SUM: Final = Reduction("sum")


@final
@dataclass(frozen=True)
class Location:
    """Where an array lives: on which server, and under which key, a number among all arrays of all servers."""

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
    """What changes some rows of an array."""

    location: Location
    indices: Array  # [k] int64, the numbers of the rows, which exist
    values: Array  # [k, ...] contiguous, of the array's dtype

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
class Push(NamedTuple):
    """What a worker pushes at once."""

    locations: Sequence[Location]  # of the arrays that are changed as a whole
    values: Sequence[Array]  # contiguous, of the same shapes and dtypes
    rows: Sequence[RowsChange]  # also what has no rows on this worker
    how: Any  # a `Change`, or a rule
    update: str  # the same for people, and for other workers

    def has_form_of(self, other: Push) -> bool:
        """Whether another push changes the same arrays, in the same way."""
        rows, others = ([change.location for change in push.rows] for push in (self, other))
        return self.update == other.update and list(self.locations) == list(other.locations) and rows == others

    @classmethod
    def sum_of(cls, pushes: Sequence[Push]) -> Push:
        """Add what the replicas of a worker push, and join their rows, in their order.

        Raises:
            InvalidArgumentError: If replicas push for different arrays, or in different ways.
        """
        first = pushes[0]
        if not all(push.has_form_of(first) for push in pushes):
            raise InvalidArgumentError("push(): the replicas of a worker differ in the variables, or in the update")
        sums = [np.empty_like(value) for value in first.values]
        for at, total in enumerate(sums):
            _SUM.combine([push.values[at].reshape(-1) for push in pushes], total.reshape(-1))
        rows = [RowsChange.joined(changes) for changes in zip(*(push.rows for push in pushes), strict=True)]
        return first._replace(values=sums, rows=rows)


def by_server(locations: Sequence[Location]) -> dict[int, list[int]]:
    """Return the places in a list of locations, by server."""
    parts: dict[int, list[int]] = {}
    for place, location in enumerate(locations):
        parts.setdefault(location.server, []).append(place)
    return parts
