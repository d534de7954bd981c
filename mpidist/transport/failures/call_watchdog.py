"""The watchdog of calls in lock step: every rank makes the same calls, and each call has a number."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final, final

from mpidist.transport.failures.failure_notes import ENDED, FOLLOWS, GAVE_UP, LEFT, FailureNote
from mpidist.transport.failures.status_board import Status, StatusBoard, name_call
from mpidist.transport.failures.stragglers import Awaited, Stragglers
from mpidist.transport.failures.watchdog import Watchdog
from mpidist.transport.mpi.library import Intracomm

__all__ = ["CallWatchdog"]

# A rank that joined too late receives, within this time, the notes of ranks that gave up before.
_LATE_NOTE_SECONDS: Final = 0.02
_LOST_SECONDS: Final = 0.3  # after which time of waiting a message of a rank that is lost will not come


@final
class CallWatchdog(Awaited):
    """One rank's watch over the numbered calls of its group, one call at a time. Each call awaits all ranks.

    Attributes:
        call: The name of the call.
        call_timeout: The call's own deadline.
        is_new: Whether this rank has not waited in the call yet.
    """

    given_up = ", for it or for an earlier call"

    def __init__(
        self,
        comm: Intracomm,
        board: StatusBoard,
        hostnames: tuple[str, ...],
        stall_seconds: float = 0.0,
        remedy: str = "",
        on_failure: Callable[[str], str] = lambda text: "",
    ) -> None:
        self.ranks = range(comm.Get_size())
        self.watchdog = Watchdog(self, comm, board, hostnames, stall_seconds, remedy, on_failure)
        self.recorder = board.recorder
        self.call, self.is_new = "", False
        self.call_timeout: float | None = None
        self._message = ""  # the message of one rank that it waits for, between two calls
        self._ended: dict[int, float] = {}  # when this rank has found that another one has ended
        self._agree_at = 0, math.inf  # of which call to record that all ranks have joined; when, on the monotonic clock

    def begin(self, sequence: int, call: str, details: str, timeout: float | None, is_last: bool = False) -> None:
        """Note, and record, that this rank makes a call. Local.

        The wait of the watchdog begins at the first check, because most calls end before that.
        """
        self.sequence, self.call, self.call_timeout, self.is_new = sequence, call, timeout, True
        self.is_last = is_last
        self.recorder.begin(sequence, call, details)

    def await_message(self, name: str) -> None:
        """Begin a wait for a message of one rank, between two calls, without a deadline; "" ends it. Local.

        Meanwhile this rank may join calls that it has started, which it waits for later.
        """
        self._message = name
        self.restart()

    def restart(self, since: float | None = None) -> None:
        """Measure the time of the wait from now on (`since`), because this rank did other work since the call began."""
        if self.is_new:
            self.is_new = False
            self.watchdog.begin(since)
        else:
            self.watchdog.restart(since)

    def mark_joined(self) -> None:
        """Note that all ranks have joined the call: if this rank waits on, its recorder soon shows that data move."""
        self._agree_at = self.sequence, time.monotonic() + _LATE_NOTE_SECONDS

    def check_peers(self) -> None:
        """Raise if waiting further cannot help, as `Watchdog.check_peers` does. Local."""
        if self.is_new:
            self.restart(self.recorder.begun)
        self.watchdog.check_peers()
        for rank, note in self.watchdog.resets.items():
            if note.sequence < self.sequence:
                self.watchdog.give_up(f"rank {rank} called reset() instead, after call {note.sequence}")
        joined, at = self._agree_at
        if joined == self.sequence and time.monotonic() >= at:
            self.recorder.agree()
            self._agree_at = 0, math.inf

    @property
    def timeout(self) -> float | None:  # type: ignore[override]
        """How long this rank may wait, in seconds; `None` or 0 for ever."""
        return None if self._message else self.call_timeout

    @property
    def name(self) -> str:
        return self._message or name_call(self.call, self.sequence)

    def is_late(self, status: Status) -> bool:
        return not status.has_joined(self.sequence) or status.is_in(self.sequence, "started")

    def is_shared_with(self, status: Status) -> bool:
        return not self.is_late(status)

    def is_ended_by(self, rank: int, note: FailureNote) -> bool:
        # Other ranks may have given up on a later call than the one that this rank is finishing, which their notes must
        # not end. A rank that left or ended has done its part of the call that its note names, and sends no message
        # after it.
        has_done_part = note.tag in (LEFT, ENDED) and not self._message
        if note.sequence + has_done_part <= self.sequence:
            return True
        # But if a rank is lost, what it has sent for this call is here by now, or will not come.
        if note.tag == ENDED:
            return time.monotonic() - self._ended.setdefault(rank, time.monotonic()) >= _LOST_SECONDS
        return note.is_lost and note.tag in (GAVE_UP, FOLLOWS) and self.watchdog.waited >= _LOST_SECONDS

    def stragglers(
        self, statuses: Mapping[int, Status], seen: Collection[int], hostnames: tuple[str, ...]
    ) -> Stragglers:
        is_agreed = self.recorder.is_agreed
        late = {rank: status for rank, status in statuses.items() if not status.has_joined(self.sequence)}
        unheard = [rank for rank in self.ranks if rank not in seen]
        if not late and (is_agreed or not unheard):
            # A rank is late, too, that has joined the call and has not noticed that all others have; unless some node
            # is unheard, as the message that all have joined may be lost on the way from there.
            waits = is_agreed and not unheard
            late = {
                rank: status
                for rank, status in statuses.items()
                if status.is_in(self.sequence, "started") or (waits and status.is_in(self.sequence, "waiting"))
            }
            is_agreed = is_agreed or bool(late)
        if is_agreed:
            return Stragglers(late, unheard, hostnames, ("makes no progress", "make no progress"))
        advice = "Every rank must make the same calls in the same order"
        return Stragglers(late, unheard, hostnames, advice=advice)
