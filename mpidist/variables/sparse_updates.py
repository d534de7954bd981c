"""Some rows of a variable, changed at once: `scatter_add` and its like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mpidist.values import IndexedSlices
from mpidist.variables.casting import cast_for

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ADDITIVE", "SparseUpdates", "change_rows", "rows_of"]

_UFUNCS: Final = {
    "scatter_add": np.add,
    "scatter_sub": np.subtract,
    "scatter_mul": np.multiply,
    "scatter_div": np.true_divide,
    "scatter_max": np.maximum,
    "scatter_min": np.minimum,
}
# What replicas do of these may be done one after the other; of two maxima or new rows there is no sum and no mean.
ADDITIVE: Final = ("scatter_add", "scatter_sub", "scatter_mul", "scatter_div")


class SparseUpdates(ABC):
    """What `Variable` takes `IndexedSlices` for."""

    @abstractmethod
    def _scatter(self, call: str, delta: Any) -> None:
        """Change rows, in the way that the call's name says."""

    def scatter_add(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Add to some rows, and return the variable. Rows that come several times are added several times.

        In `Strategy.run` what the replicas add is aggregated, as in `assign_add`, and the call is collective, unless
        the aggregation is NONE: every rank gathers the rows of all, and changes its copy in rank order. With MEAN the
        rows of a rank are divided by the number of ranks first; with ONLY_FIRST_REPLICA those of rank 0 count alone.
        Elsewhere the call is local.

        Args:
            sparse_delta: The rows, k of them: values [k, ...] with the variable's dimensions but the first, and
                indices [k] from 0 to the variable's length - 1. Ranks may have other numbers of rows.
            use_locking: Of no effect: nothing else writes a variable meanwhile.
            name: Of no effect.

        Raises:
            TypeError: If `sparse_delta` is something else.
            ValueError: If rows have another shape or kind of number, or lie outside of the variable.
            NotImplementedError: If the variable is read together (`ON_READ`).
            RuntimeError: If another strategy is current.
        """
        self._scatter("scatter_add", sparse_delta)
        return self

    def scatter_sub(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Subtract from some rows, and return the variable. As `scatter_add`."""
        self._scatter("scatter_sub", sparse_delta)
        return self

    def scatter_mul(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Multiply some rows, and return the variable. As `scatter_add`."""
        self._scatter("scatter_mul", sparse_delta)
        return self

    def scatter_div(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Divide some rows, and return the variable; integers are rounded down. As `scatter_add`."""
        self._scatter("scatter_div", sparse_delta)
        return self

    def scatter_max(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Make some rows the maxima of what they are and what is given, and return the variable. As `scatter_add`.

        Raises:
            NotImplementedError: Also in `Strategy.run` with aggregation SUM or MEAN, which maxima do not have.
        """
        self._scatter("scatter_max", sparse_delta)
        return self

    def scatter_min(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Make some rows the minima of what they are and what is given, and return the variable. As `scatter_max`."""
        self._scatter("scatter_min", sparse_delta)
        return self

    def scatter_update(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Set some rows, and return the variable. Of rows for one place the last one stays. As `scatter_max`."""
        self._scatter("scatter_update", sparse_delta)
        return self


def rows_of(delta: Any, target: Any, what: str) -> tuple[np.ndarray[Any, Any], Any]:
    """Take rows apart, and see that an array can take them. Local.

    Args:
        delta: The `IndexedSlices`.
        target: The array.
        what: The array, for errors.

    Returns:
        The indices [k], int64, and the values [k, ...], of the array's dtype.

    Raises:
        TypeError: If `delta` is something else, or the indices are no integers.
        ValueError: If the values do not fit, or indices are out of range.
    """
    if not isinstance(delta, IndexedSlices):
        raise TypeError(
            f"rows of {what} are changed by an IndexedSlices(values, indices), not by {type(delta).__name__}"
        )
    indices = np.asarray(delta.indices)
    if indices.dtype.kind not in "iu" and indices.size:
        raise TypeError(f"the indices of rows of {what} must be integers, got dtype {indices.dtype.name}")
    values = cast_for(target, delta.values, what)
    if not target.shape or indices.ndim != 1 or values.shape != (indices.size, *target.shape[1:]):
        raise ValueError(
            f"{what} has shape {list(target.shape)}: needed indices [k] and values "
            f"{str(['k', *target.shape[1:]]).replace(chr(39), '')}, got indices {list(indices.shape)} and values "
            f"{list(values.shape)}"
        )
    for index in (indices.min(), indices.max()) if indices.size else ():
        if not 0 <= index < len(target):
            raise ValueError(f"{what} has rows 0 to {len(target) - 1}, and row {index} was to be changed")
    return indices.astype(np.int64), values


def change_rows(call: str, target: Any, indices: np.ndarray[Any, Any], values: Any) -> None:
    """Change rows of an array one after the other. Local."""
    if call == "scatter_update":
        target[indices] = values
        return
    ufunc = _UFUNCS[call]
    if call == "scatter_div" and target.dtype.kind in "iu":
        ufunc = np.floor_divide
    ufunc.at(target, indices, values)
