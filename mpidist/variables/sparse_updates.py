"""Updates of some rows of a variable: `scatter_add` and the other scatter methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mpidist.transport import arrays
from mpidist.transport.array_libraries.libraries import library_of
from mpidist.transport.gpu.rows import change_rows_of_gpu
from mpidist.values import IndexedSlices
from mpidist.variables.assigning import require_no_effect
from mpidist.variables.casting import cast_for

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AGGREGATED_CALLS", "SparseUpdates", "change_rows", "checked_rows", "host_indices"]

_UFUNCS: Final = {
    "scatter_add": np.add,
    "scatter_sub": np.subtract,
    "scatter_mul": np.multiply,
    "scatter_div": np.true_divide,
    "scatter_max": np.maximum,
    "scatter_min": np.minimum,
}
# With aggregation SUM or MEAN the updates of all replicas are applied one after the other. Maxima, minima and new rows
# have no sum and no mean.
AGGREGATED_CALLS: Final = ("scatter_add", "scatter_sub", "scatter_mul", "scatter_div")


class SparseUpdates(ABC):
    """The methods of `Variable` that take `IndexedSlices`."""

    @abstractmethod
    def _scatter(self, call: str, delta: Any) -> None:
        """Change rows as the method of this name does."""

    def scatter_add(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Add to some rows, and return the variable. Rows with the same index are all added.

        In `Strategy.run` the replicas' deltas are aggregated, as in `assign_add`, and the call is collective, unless
        the aggregation is NONE: every rank gathers the rows of all ranks, and changes its copy in rank order. MEAN
        divides the rows by the number of replicas first; ONLY_FIRST_REPLICA takes the rows of replica 0 alone.
        Elsewhere the call is local.

        Args:
            sparse_delta: k rows: values [k, ...] with the variable's dimensions but the first, and indices [k] from 0
                to the variable's length - 1. k may differ between ranks.
            use_locking: Must be `False`, as in `assign`.
            name: Must be `None`, as in `assign`.

        Raises:
            TypeError: If `sparse_delta` is no `IndexedSlices`.
            ValueError: If rows have another shape or kind of number, or an index is out of range; or if `use_locking`
                or `name` is given.
            NotImplementedError: If the synchronization is ON_READ.
            RuntimeError: If another strategy is current.
        """
        require_no_effect("scatter_add", use_locking, name)
        self._scatter("scatter_add", sparse_delta)
        return self

    def scatter_sub(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Subtract from some rows, and return the variable. As `scatter_add`."""
        require_no_effect("scatter_sub", use_locking, name)
        self._scatter("scatter_sub", sparse_delta)
        return self

    def scatter_mul(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Multiply some rows, and return the variable. As `scatter_add`."""
        require_no_effect("scatter_mul", use_locking, name)
        self._scatter("scatter_mul", sparse_delta)
        return self

    def scatter_div(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Divide some rows, and return the variable; integers are rounded down. As `scatter_add`."""
        require_no_effect("scatter_div", use_locking, name)
        self._scatter("scatter_div", sparse_delta)
        return self

    def scatter_max(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Set some rows to the maxima of their old and the given numbers, and return the variable. As `scatter_add`.

        Raises:
            NotImplementedError: Also in `Strategy.run` with aggregation SUM or MEAN.
        """
        require_no_effect("scatter_max", use_locking, name)
        self._scatter("scatter_max", sparse_delta)
        return self

    def scatter_min(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Set some rows to the minima of their old and the given numbers, and return the variable. As `scatter_max`."""
        require_no_effect("scatter_min", use_locking, name)
        self._scatter("scatter_min", sparse_delta)
        return self

    def scatter_update(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Set some rows, and return the variable. Of rows with one index the last one is kept. As `scatter_max`."""
        require_no_effect("scatter_update", use_locking, name)
        self._scatter("scatter_update", sparse_delta)
        return self


def host_indices(indices: Any) -> np.ndarray[Any, Any]:
    """Return the numbers of rows, an array of any library or a list, as an array in host memory."""
    if hasattr(indices, "__cuda_array_interface__"):
        indices = arrays.to_host(library_of(indices).to_native(indices))
    return np.asarray(indices)


def checked_rows(delta: Any, target: Any, what: str) -> tuple[np.ndarray[Any, Any], Any]:
    """Return indices and values of rows, checked against the array that they change. Local.

    Args:
        delta: The `IndexedSlices`.
        target: The array.
        what: The name of the array, for errors.

    Returns:
        The indices [k], int64, and the values [k, ...], of the array's dtype.

    Raises:
        TypeError: If `delta` is no `IndexedSlices`, or the indices are no integers.
        ValueError: If the values do not fit, or indices are out of range.
    """
    if not isinstance(delta, IndexedSlices):
        raise TypeError(
            f"rows of {what} are changed by an IndexedSlices(values, indices), not by {type(delta).__name__}"
        )
    indices = host_indices(delta.indices)
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
    """Change rows of an array in the order of `indices`. Local."""
    ufunc = None if call == "scatter_update" else _UFUNCS[call]
    if call == "scatter_div" and target.dtype.kind in "iu":
        ufunc = np.floor_divide
    if arrays.is_device(target):
        change_rows_of_gpu(ufunc, target, indices, values)
    elif ufunc is None:
        target[indices] = values
    else:
        ufunc.at(target, indices, values)
