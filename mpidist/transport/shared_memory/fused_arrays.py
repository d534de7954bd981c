"""The arrays of one all-reduce through shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from mpidist.transport.communicator import Array

__all__ = ["FusedArrays"]


@final
@dataclass
class FusedArrays:
    """The arrays of one all-reduce, flat and contiguous; the small pieces of a fine schedule may have any layout.

    Attributes:
        dtype: The dtype in which numbers are sent.
        sources: [pieces], this rank's contribution.
        results: [pieces], the arrays that take the results, of dtype `result_dtype`; may be the sources.
        peers: [ranks][pieces], the contributions of all ranks of the node, if all lie in shared memory.
        shared: [places][pieces], the arrays in shared memory to which the rank that adds writes the results: those of
            each rank of the node, or the node's one array.
        result_dtype: The dtype of the results; `None` if it is `dtype`.
        place: Where the results lie in this rank's part of the shared memory of results, in bytes; 0 in other memory.
    """

    dtype: np.dtype[Any]
    sources: Sequence[Array]
    results: Sequence[Array] = ()
    peers: Sequence[Sequence[Array]] | None = None
    shared: Sequence[Sequence[Array]] | None = None
    result_dtype: np.dtype[Any] | None = None
    place: int = 0
