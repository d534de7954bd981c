"""Updates of some rows of device memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidist.transport import arrays

__all__ = ["change_rows_of_gpu"]


def change_rows_of_gpu(ufunc: np.ufunc | None, target: Any, indices: np.ndarray[Any, Any], values: Any) -> None:
    """Change rows of device memory in the order of the indices, with the bits of `ufunc.at` on the host. Local.

    Args:
        ufunc: Makes a row's new numbers of its old ones and the values; `None` for the values themselves.
        target: [rows, ...].
        indices: [k], int64, in host memory.
        values: [k, ...].
    """
    for part in _without_repeats(indices):
        rows, changes = arrays.to_device(indices[part]), values[arrays.to_device(part)]
        target[rows] = changes if ufunc is None else ufunc(target[rows], changes)


def _without_repeats(indices: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Cut rows into parts in each of which no row is changed twice, the first changes of all rows first: their places.

    A GPU changes the rows of one part at once, in any order: so each row's changes are made in theirs, and the numbers
    are those of the host, on every rank.
    """
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    is_first = np.ones(indices.size, bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    places = np.arange(indices.size)
    repeats = places - np.maximum.accumulate(np.where(is_first, places, 0))  # the changes of the row before this one
    by_repeats = np.argsort(repeats, kind="stable")
    return [order[part] for part in np.split(by_repeats, np.cumsum(np.bincount(repeats))[:-1]) if part.size]
