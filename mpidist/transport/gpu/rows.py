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
    order = np.argsort(indices, kind="stable")
    _, first, counts = np.unique(indices[order], return_index=True, return_counts=True)
    turns = np.arange(indices.size) - np.repeat(first, counts)  # how many changes of the same row come before each
    by_turns = order[np.argsort(turns, kind="stable")]
    for part in np.split(by_turns, np.cumsum(np.bincount(turns))[:-1]):
        if part.size:  # a GPU changes the rows of one part in any order: no row is in it twice
            rows, changes = arrays.to_device(indices[part]), values[arrays.to_device(part)]
            target[rows] = changes if ufunc is None else ufunc(target[rows], changes)
