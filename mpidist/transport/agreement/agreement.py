"""Do all ranks make the same call? Compared before data moves, so that a mistake is an error and not a hang.

Each rank describes its call. All ranks compare a fingerprint of the description: a barrier in shared memory on one
node, a small all-gather on several. Only if fingerprints differ do ranks exchange the descriptions, and every rank
raises the same error. Waits are polled, so that Python's signal handlers run and a deadline can end a wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, NamedTuple, final

from mpidist.transport.agreement.comparison_rounds import CarryingRounds
from mpidist.transport.agreement.fingerprint import StepExit, StopNotice, fingerprint_of
from mpidist.transport.communicator import Array
from mpidist.transport.failures.flight_recorder import FlightRecorder
from mpidist.transport.stacks import Stack

__all__ = ["CLOSE", "END", "Agreement", "Call", "CallRecord", "Posted", "Progress", "SoloAgreement"]

# The last calls of a rank in its group: the rank closes the group, or its program ends.
CLOSE: Final = "close()"
END: Final = "end of program"
_MAX_FINGERPRINTS: Final = 1024  # remembered


@final
class Progress:
    """Progress of a call in `Agreement.join_at_once`."""

    NOT_JOINED: Final = -1  # the whole call is left
    JOINED: Final = 0  # `conclude` is left, the data and `end`
    AGREED: Final = 1  # the data and `end` are left
    DONE: Final = 2
    JOINED_AGAIN: Final = 3  # as `JOINED`, and this rank has joined the second round, too: inside an agreement alone


@final
class Posted(NamedTuple):
    """Words that a rank compares in one call.

    Attributes:
        words: The fingerprint of the call and its place in the program.
        notice_bit: The bit that a notice changes in the fingerprint; 0 for no notice.
        step_exit: How the rank has left a step before the call, which changes other bits.
    """

    words: int
    notice_bit: int
    step_exit: StepExit | None


class CallRecord(ABC):
    """A call of a rank, with its arguments: ranks compare it before data moves.

    Attributes:
        fingerprint: A digest of everything that must be equal on all ranks.
        timeout_seconds: How long to wait; `None` is the group's own deadline, 0 for ever.
        error: The error of this rank's own arguments. The rank takes part nevertheless, so that the other ranks
            raise the error, too.
        variant: Digest of what may differ between ranks without an error, for example where the arguments lie in shared
            memory. `join` returns whether the digest is equal on all ranks. It is 0 on all ranks, or on none.
        is_last: Whether the rank leaves the group with this call, so that the other ranks must leave with it.
        is_compared: Whether the ranks compare the call. False only where `Agreement.compares_all_calls` is.
        is_started: Whether the rank joins the call later than it makes the call.
        posted: What the rank compares in the call, if it has joined the comparison: `Agreement.join_ahead`.
        step_exit: Of such a call, what `Agreement.take_step_exit` returned when the rank made the call.
        started_at: Of such a call, the line that started it, if another thread may compare it.
        run: Of such a call, `Agreement.run` when the rank made the call; `None`: the rank has joined the call at once.
    """

    name: str
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
    started_at: Stack | None = None
    run: int | None = None
    posted: Posted | None = None

    @abstractmethod
    def describe(self) -> Mapping[str, str]:
        """List the fields of the fingerprint, as name and text. Local; called only when ranks differ."""


@final
@dataclass(eq=False, repr=False)
class Call(CallRecord):
    """A call that a function describes. The arguments are those of `CallRecord`."""

    name: str
    fingerprint: int = 0
    describe: Callable[[], Mapping[str, str]] = dict
    _: KW_ONLY
    timeout_seconds: float | None = None
    error: Exception | None = None
    variant: int = 0
    details: str = ""
    is_last: bool = False

    @classmethod
    def of_fields(
        cls,
        name: str,
        fields: Mapping[str, str],
        timeout_seconds: float | None = None,
        error: Exception | None = None,
        variant: int = 0,
    ) -> Call:
        """Describe a call by fields, which must be equal on all ranks."""
        fingerprint = fingerprint_of((name, sorted(fields.items())))
        return cls(name, fingerprint, lambda: fields, timeout_seconds=timeout_seconds, error=error, variant=variant)


class Agreement(ABC):
    """The rule that all ranks of a group make the same calls in the same order.

    Methods that are not abstract do what a single rank needs.

    Attributes:
        sequence: The number of the call that was joined last.
        end: Records that the call which was joined last is over. Local.
        check_peers: Raises if waiting for the other ranks cannot help. Local; for waits outside of the agreement.
        run: The number of the last `Strategy.run` of a chosen number of replicas, which ranks compare; 0 for none.
        notice: Before which step all ranks stop together. Compared calls carry it to the other ranks.
        step_exit: How this rank has left a step by an exception since its last call; `None` if it has not. Ranks
            compare it.
        is_node_barrier: Whether every `join` that raises no error is a barrier of the node's shared memory, too.
        waiting_thread: The thread that waits in a call now, and not in the steps of a started one; 0 for none.
        compares_all_calls: Whether the ranks compare every call. If not, they compare calls that have a deadline or a
            `variant`, and the last call.
    """

    compares_all_calls = True
    is_node_barrier = False
    carrying: CarryingRounds | None = None  # carry a few numbers of each compared call to all ranks
    flight: Array | None = None
    step_exit: StepExit | None = None
    waiting_thread = 0

    def __init__(self, end: Callable[[], None], check_peers: Callable[[], None], ranks: frozenset[int]) -> None:
        self.sequence = self.run = 0
        self.notice = StopNotice()
        self.ranks = ranks
        self.end = end
        self.check_peers = check_peers
        self._fingerprints: dict[Hashable, int] = {}

    @abstractmethod
    def arrive(self, record: CallRecord) -> None:
        """Join the round of a call without waiting: the first half of `join`. One round at a time."""

    @property
    def can_join_ahead(self) -> bool:
        """Whether there is room for `join_ahead`. Local."""
        return False

    def join_ahead(self, record: CallRecord) -> None:
        """Join the comparison of a started call, while calls before it are under way: `arrive` follows. Local."""
        raise NotImplementedError

    def have_all_arrived(self) -> bool:
        """Whether all ranks have joined the round. Local."""
        return True

    def can_conclude_now(self, record: CallRecord) -> bool:
        """Whether `conclude` returns at once: all ranks have joined and are equal, so nothing is exchanged. Local."""
        return True

    @abstractmethod
    def conclude(self, record: CallRecord) -> bool:
        """Wait until all ranks have joined the round, and compare: the second half of `join`."""

    @final
    def join(self, record: CallRecord) -> bool:
        """Wait until all ranks make this call, and return whether all have the same `variant`. Collective.

        Raises:
            InvalidArgumentError: If the ranks differ. On every rank, with the same text.
            PeerFailedError: If a rank has left while others call. On every other rank.
            DeadlineExceededError: If not all ranks joined in time.
            Exception: `error`, if every rank has the same one.
        """
        return self.arrive_at_once(record) == Progress.AGREED or self.conclude(record)

    def arrive_at_once(self, record: CallRecord) -> int:
        """Join the round of a call, and go on as far as no rank has to wait. Returns the `Progress`."""
        self.arrive(record)
        return Progress.JOINED

    def join_at_once(self, record: CallRecord, run: Callable[..., int], *given: Any) -> int:
        """Join the round of a call in compiled code, which carries the whole call out if no rank has to wait long.

        `run` takes `given`, the numbers of the call and of its text in the flight recorder, its fingerprint and its
        variant, and whether there is a second round. It returns the progress: what is left to do.
        """
        return Progress.NOT_JOINED

    @final
    def fingerprint(self, call: str, key: Hashable, describe: Callable[[], Mapping[str, str]]) -> int:
        """Return a digest of `describe()`, the texts that must be equal on all ranks; cached by `key`. Local."""
        known = self._fingerprints.get((call, key))
        if known is None:
            if len(self._fingerprints) >= _MAX_FINGERPRINTS:
                self._fingerprints.clear()
            known = self._fingerprints[call, key] = fingerprint_of((call, describe()))
        return known

    def require_no_wait(self, call: str) -> None:  # noqa: B027  a single rank waits for none
        """Refuse a call of a function that interrupts this thread's wait in another call. Local."""

    def all_reduce_or(self, flags: int) -> int:
        """Combine all ranks' `flags`, bit by bit. Collective; after `join`."""
        return flags

    def all_gather_object(self, item: Any) -> list[Any]:
        """Gather every rank's picklable `item` on all ranks, in rank order. Collective; after `join`."""
        return [item]

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

    def has_raised(self, error: BaseException) -> bool:
        """Whether all ranks raise this error, or this rank cannot report the error to them any more. Local."""
        return False

    def restart_clock(  # noqa: B027  a single rank does not wait
        self, since: float | None = None, record: CallRecord | None = None
    ) -> None:
        """Measure the wait in `record`, by default the call joined last, from `since` or from now on. Local."""

    def has_notes(self) -> bool:
        """Whether a note of another rank has arrived: it gave up, has ended or continues alone. Local."""
        return False

    def await_message(self, name: str) -> None:  # noqa: B027  a single rank gets no messages
        """Begin a wait for a message between two calls, called `name`, for `check_peers`; "" ends the wait. Local."""

    @property
    def broken(self) -> Exception | None:
        """Failure that made the group unusable, or `None`."""
        return None

    def abandon(self) -> None:  # noqa: B027  a single rank has no messages
        """Keep the memory of comparisons that are under way, after a call that failed. Local."""

    def free(self) -> None:  # noqa: B027  a single rank has none
        """Free the communicators of the agreement. Collective."""


@final
class SoloAgreement(Agreement):
    """The agreement of one rank with itself. `recorder`: Records the calls, if they are traced. Also an attribute."""

    def __init__(self, recorder: FlightRecorder | None = None) -> None:
        super().__init__(end=self._end, check_peers=lambda: None, ranks=frozenset())
        self.recorder = recorder

    def arrive(self, record: CallRecord) -> None:
        if self.recorder is not None:
            self.sequence += 1
            self.recorder.begin(self.sequence, record.name, record.details)

    def conclude(self, record: CallRecord) -> bool:
        if record.error is not None:
            raise record.error
        if self.recorder is not None:
            self.recorder.agree()
        return True

    def break_off(self, error: BaseException) -> None:
        if self.recorder is not None:  # no other rank waits
            self.recorder.fail()

    def _end(self) -> None:
        if self.recorder is not None:
            self.recorder.end()
