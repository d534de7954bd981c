"""Rounds of comparison by messages, one at a time: have all ranks joined, and with the same two numbers?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np

from mpidist.transport.communicator import Array
from mpidist.transport.mpi.library import Intracomm, load_mpi

__all__ = ["CARRYING_RANKS", "CarriedNumbers", "CarryingRounds", "MpiRounds", "MaximumRounds", "carried_bytes"]

CARRYING_RANKS: Final = 64
_RECEIVED_BYTES: Final = 6 << 10  # of a round's numbers: each rank receives what all carry
_MOST_CARRIED_BYTES: Final = 768  # more would delay the rounds that carry nothing
_ROUNDS: Final = 32  # of which the memory is used in turn: more than are under way at once


def carried_bytes(ranks: int) -> int:
    """Return how many bytes of each rank's numbers a round carries, beside 16 of comparison; whole words."""
    return min(_MOST_CARRIED_BYTES, _RECEIVED_BYTES // ranks) // 8 * 8


class MpiRounds(ABC):
    """Rounds in which any ranks compare two integers of 63 bits, as a `NodeBarrier` does on one node.

    Attributes:
        is_over: Whether the round that this rank awaits, or has awaited last, is complete.
    """

    def __init__(self, comm: Intracomm) -> None:
        self._comm = comm
        self._request: Any = None
        self.is_over = True

    @staticmethod
    def over(comm: Intracomm) -> MpiRounds:
        """Make the rounds of a communicator: those that carry numbers, if there are few ranks."""
        return CarryingRounds(comm) if comm.size <= CARRYING_RANKS else MaximumRounds(comm)

    @abstractmethod
    def post_words(self, first: int, second: int, /) -> None:
        """Join a round, with this rank's numbers. Local."""

    def has_passed(self) -> bool:
        """Whether all ranks have joined. Local."""
        self.is_over = self.is_over or self._request.Test()  # a request can be completed only once
        return self.is_over

    @abstractmethod
    def has_equal_words(self) -> tuple[bool, bool]:
        """Whether all ranks have the same first number, and the same second one, in a complete round. Local."""

    @property
    @abstractmethod
    def memory(self) -> tuple[Any, ...]:
        """The objects that MPI may still write if this rank leaves the rounds that it has joined."""

    def free(self) -> None:
        """Free the communicator. Collective, after the last round."""
        self._comm.Free()


@final
class MaximumRounds(MpiRounds):
    """Rounds of one all-reduce of 32 bytes. Numbers are equal if their maximum is their minimum."""

    def __init__(self, comm: Intracomm) -> None:
        super().__init__(comm)
        self._max = load_mpi().MAX
        self._sent = np.zeros(4, np.int64)
        self._received = np.zeros(4, np.int64)

    def post_words(self, first: int, second: int, /) -> None:
        self._sent[:] = first, -first, second, -second
        self._request = self._comm.Iallreduce(self._sent, self._received, self._max)
        self.is_over = False

    def has_equal_words(self) -> tuple[bool, bool]:
        largest, negated_smallest, second_largest, negated_second_smallest = self._received.tolist()
        return largest == -negated_smallest, second_largest == -negated_second_smallest

    @property
    def memory(self) -> tuple[Any, ...]:
        return () if self.is_over else (self._request, self._sent, self._received)


@final
class CarryingRounds(MpiRounds):
    """Rounds of one all-gather, which carries `carried_bytes` of each rank to all ranks, too.

    A rank may join rounds ahead, before the round that it awaits is complete. The data of a round remain until
    the next round is awaited.

    Attributes:
        sent: [`_ROUNDS`, words], what this rank sends in some rounds in turn.
        received: [`_ROUNDS`, ranks, words], what all ranks have sent.
    """

    def __init__(self, comm: Intracomm) -> None:
        super().__init__(comm)
        words = 2 + carried_bytes(comm.size) // 8
        self._awaited = self._joined = 0  # the numbers of rounds
        self._requests: list[Any] = [None] * _ROUNDS
        self.sent = np.zeros((_ROUNDS, words), np.int64)
        self.received = np.zeros((_ROUNDS, comm.size, words), np.int64)

    @property
    def next(self) -> int:
        """Place of the next round in `sent` and `received`."""
        return (self._joined + 1) % _ROUNDS

    @property
    def has_room(self) -> bool:
        """Whether a round may be joined ahead: then MPI does not use the memory of the one after it, either. Local."""
        return self._joined - self._awaited < _ROUNDS - 2

    def post_words(self, first: int, second: int, /) -> None:
        self.post_ahead(first, second)
        self.await_next()

    def post_ahead(self, first: int, second: int) -> None:
        """Join a round after those that were joined, without awaiting it. Local."""
        at = self.next
        sent = self.sent[at]
        sent[:2] = first, second
        self._joined += 1  # first: after an interrupt MPI may use the memory
        self._requests[at] = self._comm.Iallgather(sent, self.received[at])

    def await_next(self) -> None:
        """Await the next round that was joined. Local."""
        self._awaited += 1
        self._request, self.is_over = self._requests[self._awaited % _ROUNDS], False

    def has_equal_words(self) -> tuple[bool, bool]:
        (first, second), *others = self.received[self._awaited % _ROUNDS, :, :2].tolist()
        return all(other[0] == first for other in others), all(other[1] == second for other in others)

    @property
    def memory(self) -> tuple[Any, ...]:
        is_idle = self.is_over and self._joined == self._awaited
        return () if is_idle else (self._requests, self.sent, self.received)


@final
class CarriedNumbers:
    """Numbers of one dtype that rounds carry, from a byte on: as `OneShot`, without a barrier of a node."""

    def __init__(self, rounds: CarryingRounds, count: int, dtype: np.dtype[Any], start: int) -> None:
        own = slice(16 + start, 16 + start + count * dtype.itemsize)
        self._rounds = rounds
        self._sent, self._received = (
            memory.view(np.uint8)[..., own].view(dtype) for memory in (rounds.sent, rounds.received)
        )

    def stage(self, sources: Sequence[Array]) -> list[Array]:
        """Copy arrays, of any layout, for the next round; return all ranks' numbers after it. Local."""
        at = self._rounds.next
        np.concatenate(sources, axis=None, out=self._sent[at])
        return list(self._received[at])
