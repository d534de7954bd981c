"""Rounds of comparison, one at a time: have all ranks joined, and with the same two numbers?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, final

import numpy as np

from mpidist.transport.mpi.library import Intracomm, load_mpi
from mpidist.transport.node_memory.barrier import Barrier

__all__ = ["MpiRounds", "NodeRounds", "Rounds"]


class Rounds(ABC):
    """Rounds in which all ranks compare two integers of 63 bits, a fingerprint and a variant.

    The functions are attributes, not methods: those of `NodeRounds` are the barrier's own, which saves a call each.

    Attributes:
        is_node_barrier: Whether a round is a barrier of the node's shared memory, too.
        start: Joins a round, with this rank's fingerprint and variant. Local.
        is_complete: Returns whether all ranks have joined. Local; called until it returns true.
        compare: Returns whether all fingerprints of a complete round are equal, and whether all variants are. Local.
    """

    is_node_barrier = False
    start: Callable[[int, int], None]
    is_complete: Callable[[], bool]
    compare: Callable[[], tuple[bool, bool]]

    @property
    @abstractmethod
    def memory(self) -> tuple[Any, ...]:
        """The objects that MPI may still write if this rank leaves a round before it is complete."""


@final
class MpiRounds(Rounds):
    """One all-reduce of 32 bytes a round, on any ranks. Numbers are equal if their maximum is their minimum.

    Args:
        comm: The ranks. The caller frees `comm`.
    """

    def __init__(self, comm: Intracomm) -> None:
        self._comm = comm
        self._max = load_mpi().MAX
        self._sent = np.zeros(4, np.int64)
        self._received = np.zeros(4, np.int64)
        self._request: Any = None
        self._is_complete = True
        self.start, self.is_complete, self.compare = self._start, self._test, self._compare

    def _start(self, fingerprint: int, variant: int) -> None:
        self._sent[:] = fingerprint, -fingerprint, variant, -variant
        self._request = self._comm.Iallreduce(self._sent, self._received, self._max)
        self._is_complete = False

    def _test(self) -> bool:
        self._is_complete = self._is_complete or self._request.Test()  # a request can be completed only once
        return self._is_complete

    def _compare(self) -> tuple[bool, bool]:
        largest, negated_smallest, largest_variant, negated_smallest_variant = self._received.tolist()
        return largest == -negated_smallest, largest_variant == -negated_smallest_variant

    @property
    def memory(self) -> tuple[Any, ...]:
        return self._request, self._sent, self._received


@final
class NodeRounds(Rounds):
    """One barrier in shared memory a round, on the ranks of one node. Sends no message.

    Args:
        barrier: The node's barrier.
    """

    is_node_barrier = True

    def __init__(self, barrier: Barrier) -> None:
        self.start, self.is_complete, self.compare = barrier.post_words, barrier.has_passed, barrier.has_equal_words

    @property
    def memory(self) -> tuple[Any, ...]:
        return ()
