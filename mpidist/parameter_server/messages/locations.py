"""What a request is about: an array on a server, or some rows of one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, final

import numpy as np

__all__ = ["Location", "RowsChange"]

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
