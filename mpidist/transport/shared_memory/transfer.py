"""What all ways to all-reduce larger arrays through the memory of a node have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from mpidist.transport.communicator import Array

__all__ = ["FusedArrays", "Transfer"]


@final
@dataclass
class FusedArrays:
    """The arrays of one all-reduce, flat and contiguous; the small pieces of a fine schedule may have any layout.

    Attributes:
        dtype: The dtype in which numbers are sent.
        sources: [pieces], this rank's contribution.
        results: [pieces], the arrays that take the results, of dtype `result_dtype`; may be the sources. Empty on a
            rank that gets no results.
        peers: [ranks][pieces], the contributions of all ranks of the node, if all lie in shared memory.
        shared: [places][pieces], the arrays in shared memory to which the rank that adds writes the results: those of
            each rank of the node, or the node's one array.
        result_dtype: The dtype of the results; `None` if it is `dtype`.
    """

    dtype: np.dtype[Any]
    sources: Sequence[Array]
    results: Sequence[Array] = ()
    peers: Sequence[Sequence[Array]] | None = None
    shared: Sequence[Sequence[Array]] | None = None
    result_dtype: np.dtype[Any] | None = None


class Transfer(ABC):
    """All-reduces of arrays, in steps: of one list, or of one after the other with the same lengths.

    Attributes:
        arrays: The arrays. Results may be set until `steps` begins, and others once `steps` has ended.
        overflowed: The sum of what `Reduction.combine` returned.
        is_started: Whether the caller has other work between the steps, of which the time then says nothing. Equal on
            all ranks.
    """

    is_started = False
    arrays: FusedArrays
    overflowed: int

    @abstractmethod
    def begin(self) -> None:
        """Do what needs no other rank. Local. A barrier of the node and `steps` follow, or nothing."""

    @abstractmethod
    def steps(self, has_passed_barrier: bool) -> Generator[int, None, None]:
        """All-reduce. Yields the number of a barrier while this rank waits there for other ranks.

        Args:
            has_passed_barrier: Whether this rank has called `begin`, and the node has passed a barrier since then.
        """

    def forget(self) -> None:
        """Let the arrays go, after `steps`. Local; others are set before `begin`."""
        self.arrays.sources = self.arrays.results = ()
