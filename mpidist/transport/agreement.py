"""Do all ranks make the same call? Asked before data moves, so that a mistake is an error and not a hang.

Each rank describes its call; a fingerprint of the description is compared over all ranks in one small message. Only
when the fingerprints differ are the descriptions themselves exchanged, and then every rank raises the same error.
The message is polled, so that Python's signal handlers run while a rank waits, and a deadline can end the wait.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, NamedTuple, final

__all__ = ["CLOSE", "END", "Agreement", "Arrival", "Joining", "SoloAgreement", "fingerprint_of"]

# The calls of a rank that leaves its group: because it closes the group, or because its program ends.
CLOSE: Final = "close()"
END: Final = "end of program"
_MASK: Final = (1 << 63) - 1
_MAX_FINGERPRINTS: Final = 1024  # remembered


def fingerprint_of(signature: Any) -> int:
    """Return 63 bits of a digest that is the same on every rank for equal signatures."""
    return int.from_bytes(hashlib.blake2b(repr(signature).encode(), digest_size=8).digest(), "little") & _MASK


@final
class Joining(NamedTuple):
    """A call that a rank makes, and what it passes.

    Attributes:
        call: The name of the call, for people.
        fingerprint: A digest of everything that must be equal on all ranks.
        describe: What the fingerprint stands for, as name and text; asked only when ranks differ.
        timeout_seconds: How long to wait; `None` is the group's own, 0 for ever.
        error: What is wrong with this rank's own arguments. The rank takes part nevertheless, so that the others
            learn of it.
        placement: What ranks may differ in, but want to know of: which shared memory the arguments lie in. 0 on all
            ranks, or on none.
        details: What the flight recorder shall say of it.
        leaves: Whether this is the last call of the rank, and the other ranks have to leave, too.
    """

    call: str
    fingerprint: int
    describe: Callable[[], Mapping[str, str]]
    timeout_seconds: float | None = None
    error: Exception | None = None
    placement: int = 0
    details: str = ""
    leaves: bool = False


@final
class Arrival(NamedTuple):
    """A rank's place in a round that it has joined."""

    call: str
    describe: Callable[[], Mapping[str, str]]
    timeout: float | None
    error: Exception | None
    leaves: bool = False
    compares: bool = True


class Agreement(ABC):
    """The rule that all ranks of a group make the same calls in the same order.

    Attributes:
        sequence: The number of the call that was joined last.
        ranks: The ranks, as they are numbered in the whole job.
    """

    def __init__(self, ranks: frozenset[int] = frozenset()) -> None:
        self.sequence = 0
        self.ranks = ranks
        self._fingerprints: dict[Hashable, int] = {}

    @abstractmethod
    def arrive(self, joining: Joining) -> Arrival:
        """Join a round with this call, without waiting: `join` is this and `conclude`. One round at a time.

        Raises:
            DeadlineExceededError: If other ranks have given up waiting. And what made the group unusable.
        """

    @abstractmethod
    def have_all_arrived(self) -> bool:
        """Whether all ranks have joined the round. Local."""

    @abstractmethod
    def is_alike(self, arrival: Arrival) -> bool:
        """Whether `conclude` has nothing to wait for, now that all have joined: no differences to be told. Local."""

    @abstractmethod
    def conclude(self, arrival: Arrival) -> bool:
        """Wait for all ranks to join the round, and compare. Returns and raises what `join` does."""

    @final
    def join(self, joining: Joining) -> bool:
        """Wait until all ranks make this call, and compare what they pass. Collective.

        Returns:
            Whether all ranks have the same `placement`.

        Raises:
            InvalidArgumentError: If the ranks differ. On every rank, with the same text.
            PeerFailedError: If a rank has left while others call. On every other rank.
            DeadlineExceededError: If not all ranks came in time.
            Exception: `error`, if every rank has the same one.
        """
        return self.conclude(self.arrive(joining))

    @final
    def fingerprint(self, call: str, key: Hashable, describe: Callable[[], Mapping[str, str]]) -> int:
        """Return a digest of what a call passes, for `join`. Local.

        Args:
            call: As in `Joining`.
            key: Equal only for equal descriptions; for this rank's own use, to make them once.
            describe: What must be equal on all ranks, as name and text.
        """
        known = self._fingerprints.get((call, key))
        if known is None:
            if len(self._fingerprints) >= _MAX_FINGERPRINTS:
                self._fingerprints.clear()
            known = self._fingerprints[call, key] = fingerprint_of((call, describe()))
        return known

    @abstractmethod
    def any_of(self, flags: int) -> int:
        """Unite the bits of all ranks' `flags`. Collective; call it after `join`."""

    @abstractmethod
    def exchange(self, item: Any) -> list[Any]:
        """Show every rank's picklable `item` to all ranks, in rank order. Collective; call it after `join`."""

    @property
    def is_node_barrier(self) -> bool:
        """Whether `join` is a barrier of the node's shared memory, too, that nothing but an error leaves out."""
        return False

    def require_peers(self) -> bool:
        """Raise if another rank has given up waiting. Local; for those who wait for ranks in other ways.

        Returns:
            False: it is not over.
        """
        return False

    @abstractmethod
    def break_off(self, error: BaseException) -> None:
        """Give up in the middle of a call, because of an error of this rank alone. Local.

        The others, who wait for this rank's part of the work, learn of it, and the group is unusable. An error that
        the agreement itself raised on all ranks is none of these, and does nothing.
        """

    @abstractmethod
    def has_raised(self, error: BaseException) -> bool:
        """Whether all ranks have this error, or cannot be told of any more. Local."""

    @abstractmethod
    def end(self) -> None:
        """Note that the call which was joined last is over. Local."""

    @abstractmethod
    def restart_clock(self, since: float | None = None, arrival: Arrival | None = None) -> None:
        """Count the time that this rank is kept waiting in a call from now on. Local.

        Args:
            since: From when on instead, in seconds of the monotonic clock.
            arrival: The call, if others have been joined since.
        """

    @property
    @abstractmethod
    def broken(self) -> Exception | None:
        """What made the group unusable, or `None`."""

    @abstractmethod
    def free(self) -> None:
        """Give back what the agreement holds. Collective."""


@final
class SoloAgreement(Agreement):
    """The agreement of one rank with itself."""

    def arrive(self, joining: Joining) -> Arrival:
        return Arrival(joining.call, joining.describe, None, joining.error)

    def have_all_arrived(self) -> bool:
        return True

    def is_alike(self, arrival: Arrival) -> bool:
        return True

    def conclude(self, arrival: Arrival) -> bool:
        if arrival.error is not None:
            raise arrival.error
        return True

    def any_of(self, flags: int) -> int:
        return flags

    def exchange(self, item: Any) -> list[Any]:
        return [item]

    def break_off(self, error: BaseException) -> None:
        pass  # nobody waits for this rank, and its next call is a new one

    def has_raised(self, error: BaseException) -> bool:
        return False

    def end(self) -> None:
        pass  # whoever looks at one rank sees where it is

    def restart_clock(self, since: float | None = None, arrival: Arrival | None = None) -> None:
        pass

    @property
    def broken(self) -> Exception | None:
        return None

    def free(self) -> None:
        pass
