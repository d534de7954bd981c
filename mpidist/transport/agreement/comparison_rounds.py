"""One comparison of all ranks at a time: has everybody come, and with the same words?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, final

import numpy as np

from mpidist.transport.mpi import Intracomm, load_mpi
from mpidist.transport.shared_memory import NodeBarrier

__all__ = ["MpiRounds", "NodeRounds", "Rounds"]


class Rounds(ABC):
    """Rounds in which each rank shows two whole numbers of 63 bits.

    Attributes:
        is_node_barrier: Whether a round is a barrier of the node's shared memory, too.
        start: Joins a round, with a fingerprint and a variant. Local.
        is_complete: Says whether all ranks have joined. Local; asked until it says so.
        is_equal: Says whether all ranks showed the same fingerprint, and the same variant, in the round that is
            complete. Local.
    """

    is_node_barrier = False
    start: Callable[[int, int], None]
    is_complete: Callable[[], bool]
    is_equal: Callable[[], tuple[bool, bool]]

    @property
    @abstractmethod
    def memory(self) -> tuple[Any, ...]:
        """What MPI may still write when a round is left before it is complete."""


@final
class MpiRounds(Rounds):
    """One all-reduce of 32 bytes a round, on any ranks.

    Args:
        comm: The ranks. It stays its owner's.
    """

    def __init__(self, comm: Intracomm) -> None:
        self._comm = comm
        self._max = load_mpi().MAX
        self._sent = np.zeros(4, np.int64)
        self._received = np.zeros(4, np.int64)
        self._request: Any = None
        self._is_complete = True
        self.start, self.is_complete, self.is_equal = self._start, self._test, self._compare

    def _start(self, fingerprint: int, variant: int) -> None:
        self._sent[:] = fingerprint, -fingerprint, variant, -variant
        self._request = self._comm.Iallreduce(self._sent, self._received, self._max)
        self._is_complete = False

    def _test(self) -> bool:
        self._is_complete = self._is_complete or self._request.Test()  # a request can be completed only once
        return self._is_complete

    def _compare(self) -> tuple[bool, bool]:
        most, least, far, near = self._received.tolist()
        return most == -least, far == -near

    @property
    def memory(self) -> tuple[Any, ...]:
        return self._request, self._sent, self._received


@final
class NodeRounds(Rounds):
    """One barrier in shared memory a round, on the ranks of one node. No message.

    Args:
        barrier: The node's barrier.
    """

    is_node_barrier = True

    def __init__(self, barrier: NodeBarrier) -> None:
        self._barrier = barrier
        self.start, self.is_complete, self.is_equal = barrier.post_words, barrier.has_passed, barrier.has_equal_words

    @property
    def memory(self) -> tuple[Any, ...]:
        return ()
