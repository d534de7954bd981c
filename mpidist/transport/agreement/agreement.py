"""Do all ranks make the same call? Compared before data moves, so that a mistake is an error and not a hang.

Each rank describes its call. All ranks compare a fingerprint of the description: a barrier in shared memory on one
node, a small all-reduce on several. Only if fingerprints differ do ranks exchange the descriptions, and every rank
raises the same error. Waits are polled, so that Python's signal handlers run and a deadline can end a wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, final

from mpidist.transport.agreement.fingerprint import fingerprint_of
from mpidist.transport.agreement.step_exit import StepExit
from mpidist.transport.agreement.stop_notice import StopNotice
from mpidist.transport.communicator import Array
from mpidist.transport.failures.flight_recorder import FlightRecorder

__all__ = ["CLOSE", "END", "Agreement", "Call", "CallRecord", "Progress", "SoloAgreement"]

# The last calls of a rank in its group: the rank closes the group, or its program ends.
CLOSE: Final = "close()"
END: Final = "end of program"
_MAX_FINGERPRINTS: Final = 1024  # remembered


@final
class Progress:
    """How far `Agreement.join_at_once` has carried a call out."""

    NOT_JOINED: Final = -1  # the whole call is left
    JOINED: Final = 0  # `conclude` is left, the data and `end`
    AGREED: Final = 1  # the data and `end` are left
    DONE: Final = 2
    JOINED_AGAIN: Final = 3  # as `JOINED`, and this rank has joined the second round, too: inside an agreement alone


class CallRecord(ABC):
    """A call that a rank makes, and what it passes: what ranks compare before data moves.

    Attributes:
        name: The name of the call, for people.
        fingerprint: A digest of everything that must be equal on all ranks.
        timeout_seconds: How long to wait; `None` is the group's own deadline, 0 for ever.
        error: What is wrong with this rank's own arguments. The rank takes part nevertheless, so that the other ranks
            raise the error, too.
        variant: Digest of what may differ between ranks without an error, for example where the arguments lie in shared
            memory. `join` returns whether the digest is equal on all ranks. It is 0 on all ranks, or on none.
        details: What the flight recorder says of the call.
        is_last: Whether the rank leaves the group with this call, so that the other ranks must leave with it.
        timeout: `timeout_seconds`, or the group's own deadline; set when the rank joins the call.
        is_compared: Whether the ranks compare the call. False only where `Agreement.compares_all_calls` is.
        is_started: Whether the rank joins the call later than it makes the call.
        step_exit: Of such a call, what `Agreement.take_step_exit` returned when the rank made the call.
    """

    name = ""
    fingerprint = 0
    timeout_seconds: float | None = None
    error: Exception | None = None
    variant = 0
    details = ""
    is_last = False
    timeout: float | None = None
    is_compared = True
    is_started = False
    step_exit: StepExit | None = None

    @abstractmethod
    def describe(self) -> Mapping[str, str]:
        """List what the fingerprint was made of, as name and text. Local; called only when ranks differ."""


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
        is_last: bool = False,
    ) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self.timeout_seconds = timeout_seconds
        self.error = error
        self.variant = variant
        self.details = details
        self.is_last = is_last
        self._describe = describe

    def describe(self) -> Mapping[str, str]:
        return self._describe()


class Agreement(ABC):
    """The rule that all ranks of a group make the same calls in the same order.

    Attributes:
        sequence: The number of the call that was joined last.
        end: Records that the call which was joined last is over. Local.
        check_peers: Raises if waiting for the other ranks cannot help. Local; for waits outside of the agreement.
        ranks: The ranks of the group, as they are numbered in the whole job.
        run: The number of the last `Strategy.run` of a chosen number of replicas, which ranks compare; 0 for none.
        notice: Before which step all ranks stop together. Compared calls carry it to the other ranks.
        step_exit: How this rank has left a step by an exception since its last call; `None` if it has not. Ranks
            compare it.
        flight: The memory of this rank's flight recorder, if all calls are recorded; else `None`.
        is_node_barrier: Whether every `join` that raises no error is a barrier of the node's shared memory, too.
        compares_all_calls: Whether the ranks compare every call. If not, they compare calls that have a deadline or a
            `variant`, and the last call.
    """

    compares_all_calls = True
    is_node_barrier = False
    flight: Array | None = None
    step_exit: StepExit | None = None

    def __init__(self, end: Callable[[], None], check_peers: Callable[[], None], ranks: frozenset[int]) -> None:
        self.sequence = self.run = 0
        self.notice = StopNotice()
        self.ranks = ranks
        self.end = end
        self.check_peers = check_peers
        self._fingerprints: dict[Hashable, int] = {}

    @abstractmethod
    def arrive(self, record: CallRecord) -> None:
        """Join the round of a call, without waiting: the first half of `join`. One round at a time.

        Raises:
            DeadlineExceededError: If other ranks have given up waiting.
            Exception: What made the group unusable, if it is.
        """

    @abstractmethod
    def have_all_arrived(self) -> bool:
        """Whether all ranks have joined the round. Local."""

    @abstractmethod
    def can_conclude_now(self, record: CallRecord) -> bool:
        """Whether `conclude` returns at once: all ranks have joined and are equal, so nothing is exchanged. Local."""

    @abstractmethod
    def conclude(self, record: CallRecord) -> bool:
        """Wait until all ranks have joined the round, and compare: the second half of `join`."""

    @final
    def join(self, record: CallRecord) -> bool:
        """Wait until all ranks make this call, and compare what they pass. Collective.

        Returns:
            Whether all ranks have the same `variant`.

        Raises:
            InvalidArgumentError: If the ranks differ. On every rank, with the same text.
            PeerFailedError: If a rank has left while others call. On every other rank.
            DeadlineExceededError: If not all ranks joined in time.
            Exception: `error`, if every rank has the same one.
        """
        self.arrive(record)
        return self.conclude(record)

    def join_at_once(self, record: CallRecord, run: Callable[..., int], *given: Any) -> int:
        """Join the round of a call in compiled code, which carries the whole call out if no rank has to wait long.

        Args:
            record: The call.
            run: Does so, and returns the progress. Takes `given`, the numbers of the call and of its text in the flight
                recorder, its fingerprint and its variant, and whether there is a second round.
            given: The arguments of the call.

        Returns:
            The progress: what is left to do.
        """
        return Progress.NOT_JOINED

    @final
    def fingerprint(self, call: str, key: Hashable, describe: Callable[[], Mapping[str, str]]) -> int:
        """Return a digest of what a call passes, for `join`. Local.

        Args:
            call: As in `CallRecord`.
            key: Key of this rank's cache of digests; equal only for equal descriptions.
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
        """Combine all ranks' `flags`, bit by bit. Collective; after `join`."""

    @abstractmethod
    def all_gather_object(self, item: Any) -> list[Any]:
        """Gather every rank's picklable `item` on all ranks, in rank order. Collective; after `join`."""

    @final
    def take_step_exit(self) -> StepExit | None:
        """Return `step_exit`, which the call that this rank makes now compares, and reset it. Local."""
        taken, self.step_exit = self.step_exit, None
        return taken

    def mark_started(self, is_started: bool = True) -> None:  # noqa: B027  no other rank reads it of a single rank
        """Record whether the last call is only started: this rank does other work, and waits for it later. Local."""

    def note_read(self, nanoseconds: int) -> None:  # noqa: B027  no other rank waits for a single rank
        """Note how long this rank read data before the call that was joined last. Local."""

    @abstractmethod
    def break_off(self, error: BaseException) -> None:
        """Give up in the middle of a call, because of an error of this rank alone. Local.

        The other ranks, which wait for this rank's part, raise `PeerFailedError`, and the group is unusable. Nothing
        happens if `error` is one that the agreement itself raised on all ranks.
        """

    @abstractmethod
    def has_raised(self, error: BaseException) -> bool:
        """Whether all ranks raise this error, or this rank cannot tell them of the error any more. Local."""

    @abstractmethod
    def restart_clock(self, since: float | None = None, record: CallRecord | None = None) -> None:
        """Measure the time of a wait, for its deadline, from now on. Local.

        Args:
            since: From then on instead, in seconds of the monotonic clock.
            record: The call in which this rank waits, if it is not the call that was joined last.
        """

    def await_message(self, name: str) -> None:  # noqa: B027  a single rank gets no messages
        """Begin a wait for a message of one rank, between two calls: then `check_peers` checks that wait. Local.

        Args:
            name: What this rank waits for, for people; "" ends the wait.
        """

    @property
    @abstractmethod
    def broken(self) -> Exception | None:
        """What made the group unusable, or `None`."""

    @abstractmethod
    def free(self) -> None:
        """Free the communicator of the agreement. Collective."""


@final
class SoloAgreement(Agreement):
    """The agreement of one rank with itself.

    Args:
        recorder: Records the calls, if they are traced. Also an attribute.
    """

    def __init__(self, recorder: FlightRecorder | None = None) -> None:
        super().__init__(end=self._end, check_peers=lambda: None, ranks=frozenset())
        self.recorder = recorder

    def arrive(self, record: CallRecord) -> None:
        if self.recorder is not None:
            self.sequence += 1
            self.recorder.begin(self.sequence, record.name, record.details)

    def have_all_arrived(self) -> bool:
        return True

    def can_conclude_now(self, record: CallRecord) -> bool:
        return True

    def conclude(self, record: CallRecord) -> bool:
        if record.error is not None:
            raise record.error
        if self.recorder is not None:
            self.recorder.agree()
        return True

    def all_reduce_or(self, flags: int) -> int:
        return flags

    def all_gather_object(self, item: Any) -> list[Any]:
        return [item]

    def break_off(self, error: BaseException) -> None:
        if self.recorder is not None:  # no other rank waits
            self.recorder.fail()

    def has_raised(self, error: BaseException) -> bool:
        return False

    def restart_clock(self, since: float | None = None, record: CallRecord | None = None) -> None:
        pass

    @property
    def broken(self) -> Exception | None:
        return None

    def _end(self) -> None:
        if self.recorder is not None:
            self.recorder.end()

    def free(self) -> None:
        pass
