"""Changes of some rows of an array: what `scatter_add` and the other scatter methods of variables do."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from mpidist.transport import arrays
from mpidist.transport.array_libraries.libraries import library_of
from mpidist.values import IndexedSlices
from mpidist.variables.casting import cast_for

__all__ = ["AGGREGATED_CALLS", "change_rows", "checked_rows", "host_indices"]

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


def host_indices(indices: Any) -> np.ndarray[Any, Any]:
    """Return the numbers of rows, an array of any library or a list, as an array in host memory."""
    if hasattr(indices, "__cuda_array_interface__"):
        indices = arrays.to_host(library_of(indices).to_native(indices))
    return np.asarray(indices)


def checked_rows(delta: Any, target: Any, what: str) -> tuple[np.ndarray[Any, Any], Any]:
    """Return indices [k], int64, and values [k, ...] of rows, which fit the array `target` that they change. Local."""
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
        _change_rows_of_gpu(ufunc, target, indices, values)
    elif ufunc is None:
        target[indices] = values
    else:
        ufunc.at(target, indices, values)


def _change_rows_of_gpu(ufunc: np.ufunc | None, target: Any, indices: np.ndarray[Any, Any], values: Any) -> None:
    """Change rows of device memory in the order of the indices, with the bits of `ufunc.at`; `None` sets the values."""
    order = np.argsort(indices, kind="stable")
    _, first, counts = np.unique(indices[order], return_index=True, return_counts=True)
    turns = np.arange(indices.size) - np.repeat(first, counts)  # how many changes of the same row come before each
    by_turns = order[np.argsort(turns, kind="stable")]
    for part in np.split(by_turns, np.cumsum(np.bincount(turns))[:-1]):
        if part.size:  # a GPU changes the rows of one part in any order: no row is in it twice
            rows, changes = arrays.to_device(indices[part]), values[arrays.to_device(part)]
            target[rows] = changes if ufunc is None else ufunc(target[rows], changes)
