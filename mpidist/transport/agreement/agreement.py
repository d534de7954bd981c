"""Do all ranks make the same call? Asked before data moves, so that a mistake is an error and not a hang.

Each rank describes its call; a fingerprint of the description is compared over all ranks in one small message. Only
when the fingerprints differ are the descriptions themselves exchanged, and then every rank raises the same error.
The message is polled, so that Python's signal handlers run while a rank waits, and a deadline can end the wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, final

from mpidist.transport.fingerprint import fingerprint_of

__all__ = ["CLOSE", "END", "Agreement", "Call", "CallRecord", "SoloAgreement"]

# The calls of a rank that leaves its group: because it closes the group, or because its program ends.
CLOSE: Final = "close()"
END: Final = "end of program"
_MAX_FINGERPRINTS: Final = 1024  # remembered


class CallRecord(ABC):
    """A call that a rank makes, and what it passes: what ranks compare before data moves.

    Attributes:
        name: The name of the call, for people.
        fingerprint: A digest of everything that must be equal on all ranks.
        timeout_seconds: How long to wait; `None` is the group's own, 0 for ever.
        error: What is wrong with this rank's own arguments. The rank takes part nevertheless, so that the other ranks
            learn of the error.
        variant: Digest of what may differ between ranks, for example where the arguments lie in shared memory. `join`
            returns whether it is equal on all ranks. 0 on all ranks, or on none.
        details: What the flight recorder says of the call.
        leaves: Whether this is the last call of the rank, and the other ranks have to leave, too.
        timeout: How long this rank waits in the call, once it has joined: in seconds; `None` or 0 for ever.
        is_compared: Whether the ranks meet in a round to compare the call.
    """

    name = ""
    fingerprint = 0
    timeout_seconds: float | None = None
    error: Exception | None = None
    variant = 0
    details = ""
    leaves = False
    timeout: float | None = None
    is_compared = True

    @abstractmethod
    def describe(self) -> Mapping[str, str]:
        """Say what the fingerprint stands for, as name and text; asked only when ranks differ. Local."""


@final
class Call(CallRecord):
    """A call that a function describes. The arguments are those of `CallRecord`."""

    def __init__(
        self,
        name: str,
        fingerprint: int = 0,
        describe: Callable[[], Mapping[str, str]] = dict,
        *,
        timeout_seconds: float | None = None,
        error: Exception | None = None,
        variant: int = 0,
        details: str = "",
        leaves: bool = False,
    ) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self.timeout_seconds = timeout_seconds
        self.error = error
        self.variant = variant
        self.details = details
        self.leaves = leaves
        self._describe = describe

    def describe(self) -> Mapping[str, str]:
        return self._describe()


class Agreement(ABC):
    """The rule that all ranks of a group make the same calls in the same order.

    Attributes:
        sequence: The number of the call that was joined last.
        end: Notes that the call which was joined last is over. Local.
        check_peers: Raises if another rank has given up waiting. Local; for those who wait for ranks in other ways.
        ranks: The ranks, as they are numbered in the whole job.
    """

    def __init__(self, end: Callable[[], None], check_peers: Callable[[], None], ranks: frozenset[int]) -> None:
        self.sequence = 0
        self.ranks = ranks
        self.end = end
        self.check_peers = check_peers
        self._fingerprints: dict[Hashable, int] = {}

    @abstractmethod
    def arrive(self, record: CallRecord) -> None:
        """Join a round with a call, without waiting: `join` is this and `conclude`. One round at a time.

        Raises:
            DeadlineExceededError: If other ranks have given up waiting. And what made the group unusable.
        """

    @abstractmethod
    def have_all_arrived(self) -> bool:
        """Whether all ranks have joined the round. Local."""

    @abstractmethod
    def is_alike(self, record: CallRecord) -> bool:
        """Whether `conclude` has nothing to wait for, now that all have joined: no differences to be told. Local."""

    @abstractmethod
    def conclude(self, record: CallRecord) -> bool:
        """Wait for all ranks to join the round, and compare. Returns and raises what `join` does."""

    @final
    def join(self, record: CallRecord) -> bool:
        """Wait until all ranks make this call, and compare what they pass. Collective.

        Returns:
            Whether all ranks have the same `variant`.

        Raises:
            InvalidArgumentError: If the ranks differ. On every rank, with the same text.
            PeerFailedError: If a rank has left while others call. On every other rank.
            DeadlineExceededError: If not all ranks came in time.
            Exception: `error`, if every rank has the same one.
        """
        self.arrive(record)
        return self.conclude(record)

    @final
    def fingerprint(self, call: str, key: Hashable, describe: Callable[[], Mapping[str, str]]) -> int:
        """Return a digest of what a call passes, for `join`. Local.

        Args:
            call: As in `CallRecord`.
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
    def all_reduce_or(self, flags: int) -> int:
        """Unite the bits of all ranks' `flags`. Collective; call it after `join`."""

    @abstractmethod
    def all_gather_object(self, item: Any) -> list[Any]:
        """Show every rank's picklable `item` to all ranks, in rank order. Collective; call it after `join`."""

    @property
    def is_node_barrier(self) -> bool:
        """Whether `join` is a barrier of the node's shared memory, too, that nothing but an error leaves out."""
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
    def restart_clock(self, since: float | None = None, record: CallRecord | None = None) -> None:
        """Count the time that this rank is kept waiting in a call from now on. Local.

        Args:
            since: From when on instead, in seconds of the monotonic clock.
            record: The call, if others have been joined since.
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

    def __init__(self) -> None:
        super().__init__(end=lambda: None, check_peers=lambda: None, ranks=frozenset())

    def arrive(self, record: CallRecord) -> None:
        pass  # nobody else comes

    def have_all_arrived(self) -> bool:
        return True

    def is_alike(self, record: CallRecord) -> bool:
        return True

    def conclude(self, record: CallRecord) -> bool:
        if record.error is not None:
            raise record.error
        return True

    def all_reduce_or(self, flags: int) -> int:
        return flags

    def all_gather_object(self, item: Any) -> list[Any]:
        return [item]

    def break_off(self, error: BaseException) -> None:
        pass  # nobody waits for this rank, and its next call is a new one

    def has_raised(self, error: BaseException) -> bool:
        return False

    def restart_clock(self, since: float | None = None, record: CallRecord | None = None) -> None:
        pass

    @property
    def broken(self) -> Exception | None:
        return None

    def free(self) -> None:
        pass
