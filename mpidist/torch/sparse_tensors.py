"""Sparse tensors of PyTorch as `IndexedSlices`, and back."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch

from mpidist.values import IndexedSlices

__all__ = ["empty_rows_like", "is_sparse", "slices_of", "write_slices"]


def is_sparse(tensor: Any) -> bool:
    """Whether a tensor is sparse, in coordinates."""
    return bool(tensor.layout is torch.sparse_coo)


def slices_of(tensor: Any) -> IndexedSlices:
    """Return the rows of a sparse tensor, whose sparse axes are counted as one. They may repeat."""
    shape = tensor.shape[: tensor.sparse_dim()]
    rows = np.ravel_multi_index(tuple(tensor._indices().numpy()), shape)
    return IndexedSlices(tensor._values().detach(), rows, (prod(shape), *tensor.shape[tensor.sparse_dim() :]))


def write_slices(tensor: Any, slices: IndexedSlices) -> None:
    """Write the rows of `slices_of` into a sparse tensor, in place of its own."""
    indices = np.stack(np.unravel_index(slices.indices, tensor.shape[: tensor.sparse_dim()]))
    with torch.no_grad():
        tensor.copy_(_sparse(torch.from_numpy(indices), slices.values, tensor.shape))


def empty_rows_like(parameter: Any) -> Any:
    """Return a sparse tensor without rows: the gradient of an embedding that a rank did not use."""
    indices, rows = torch.empty(1, 0, dtype=torch.int64), parameter.detach().new_empty(0, *parameter.shape[1:])
    return _sparse(indices, rows, parameter.shape)


def _sparse(indices: Any, values: Any, shape: Any) -> Any:
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)  # else torch warns
