"""How what a worker pushes lies in memory: the arrays of a dtype one behind the other, and then rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.parameter_server.messages import Location, Push, RowsChange
from mpidist.transport import LINE_BYTES, Reduction, bytes_of, shard_bounds

__all__ = ["Layout"]

Array = np.ndarray[Any, Any]

_BLOCK_BYTES: Final = 128 << 10  # of each worker: a block of the sum stays in the cache
_SUM: Final = Reduction("sum")


@final
class _Group(NamedTuple):
    """Arrays of one dtype.

    Attributes:
        dtype: The dtype.
        start: Where the first one begins, in bytes.
        size: How many elements they have together.
    """

    dtype: np.dtype[Any]
    start: int
    size: int

    def of(self, memory: Array) -> Array:
        """View the group in memory."""
        return memory[self.start : self.start + self.size * self.dtype.itemsize].view(self.dtype)


@final
class Layout:
    """Where each array of a push lies. Equal on workers that push the same; rows lie behind, and their number differs.

    Args:
        locations: The arrays that are changed as a whole.
        row_locations: The arrays of which rows are changed.
    """

    def __init__(self, locations: Sequence[Location], row_locations: Sequence[Location]) -> None:
        self._locations, self._row_locations = locations, row_locations
        self._groups: list[_Group] = []
        self._places = [0] * len(locations)
        at = 0
        for dtype in dict.fromkeys(location.dtype for location in locations):
            at = start = -(-at // LINE_BYTES) * LINE_BYTES
            for number, location in enumerate(locations):
                if location.dtype == dtype:
                    self._places[number], at = at, at + _nbytes(location)
            self._groups.append(_Group(dtype, start, (at - start) // dtype.itemsize))
        self._rows_start = -(-at // LINE_BYTES) * LINE_BYTES
        self._dense_nbytes = at

    def nbytes(self, push: Push) -> int:
        """How much memory a push needs."""
        if not self._row_locations:
            return self._dense_nbytes
        rows = sum(_padded(array.nbytes) for change in push.rows for array in change[1:])
        return self._rows_start + 8 * len(self._row_locations) + rows

    def write(self, push: Push, memory: Array) -> None:
        """Copy what is pushed into memory."""
        for place, value in zip(self._places, push.values, strict=True):
            memory[place : place + value.nbytes] = bytes_of(value)
        if not self._row_locations:
            return
        counts = [change.indices.size for change in push.rows]
        self._counts_in(memory)[...] = counts
        at = self._rows_start + 8 * len(counts)
        for change in push.rows:
            for array in change[1:]:
                memory[at : at + array.nbytes] = bytes_of(array)
                at += _padded(array.nbytes)

    def add(self, parts: Sequence[Array], shard: int, into: Array) -> None:
        """Add one shard of the arrays of all workers, in their order, into memory that may be that of one of them."""
        for group in self._groups:
            flats, bounds = [group.of(part) for part in parts], shard_bounds(group.size, len(parts))
            out, stop = group.of(into), bounds[shard + 1]
            step = max(1, _BLOCK_BYTES // group.dtype.itemsize)
            for start in range(bounds[shard], stop, step):
                block = slice(start, min(start + step, stop))
                _SUM.combine([flat[block] for flat in flats], out[block])

    def sums(self, memory: Array) -> list[Array]:
        """View the arrays in the memory that holds their sums."""
        return [
            memory[place : place + _nbytes(location)].view(location.dtype).reshape(location.shape)
            for place, location in zip(self._places, self._locations, strict=True)
        ]

    def join_rows(self, parts: Sequence[Array]) -> list[RowsChange]:
        """Join the rows of all workers, in their order, to one change of each array. Copies them."""
        found: list[list[RowsChange]] = [[] for _ in self._row_locations]
        for part in parts:
            for changes, change in zip(found, self._rows_in(part), strict=True):
                changes.append(change)
        return [RowsChange.joined(changes) for changes in found]

    def _counts_in(self, memory: Array) -> Array:
        return memory[self._rows_start : self._rows_start + 8 * len(self._row_locations)].view(np.int64)

    def _rows_in(self, memory: Array) -> Iterator[RowsChange]:
        counts = self._counts_in(memory).tolist()
        at = self._rows_start + 8 * len(counts)
        for location, count in zip(self._row_locations, counts, strict=True):
            indices = memory[at : at + 8 * count].view(np.int64)
            at += indices.nbytes
            values = np.empty((0, *location.shape[1:]), location.dtype)
            if count:
                nbytes = _nbytes(location) // location.shape[0] * count
                values = memory[at : at + nbytes].view(location.dtype).reshape(count, *location.shape[1:])
                at += _padded(nbytes)
            yield RowsChange(location, indices, values)


def _nbytes(location: Location) -> int:
    return int(np.prod(location.shape, dtype=np.int64)) * location.dtype.itemsize


def _padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
