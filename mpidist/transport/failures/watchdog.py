"""What a rank looks after while it waits for others: the clock, their notes, and their processes.

Whoever waits asks `look` now and then. It raises when there is no sense in waiting further: time is up, another rank
has given up or ended, or its process is gone. MPI itself notices none of these.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NoReturn, final

from mpidist.errors import DeadlineExceededError, PeerFailedError
from mpidist.transport.failures.failure_notes import (
    BROKE_OFF,
    ENDED,
    FOLLOWS,
    GAVE_UP,
    LEFT,
    RESETS,
    STALLED,
    FailureNote,
    FailureNotes,
)
from mpidist.transport.failures.status_board import Status, StatusBoard, name_call
from mpidist.transport.failures.stragglers import Stragglers
from mpidist.transport.mpi import Intracomm
from mpidist.transport.text import name_ranks

__all__ = ["PROBES", "Watchdog"]

logger = logging.getLogger("mpidist.transport")

_LOOK_SECONDS: Final = 0.1  # between two looks at processes
_ANSWER_SECONDS: Final = 0.3  # for the notes of other nodes
_FIRST_HAND_SECONDS: Final = 0.05  # for the note of a rank that others follow
PROBES: Final = 20
_MET_SECONDS: Final = 0.02  # in which a rank that comes too late hears that others gave up before
_ASKS: Final = "?"
# What ranks did that take no part in any call any more, most telling first.
_ENDS: Final = {
    ENDED: "ended",
    LEFT: "left because of an exception",
    BROKE_OFF: "broke off in the middle of a call, with an error",
}
_NEW: Final = "The strategy cannot be used any more: close it, and make a new one on all ranks"


@final
class Watchdog:
    """One rank's watch over the calls of its group, one call at a time.

    Args:
        comm: The ranks. Messages from rank to rank in it are this object's alone.
        board: What the ranks of this node are doing.
        hostnames: The host of each rank.
        stall_seconds: When to warn of a wait without a deadline; 0 for never.
        remedy: What people can do after a failure, as a sentence without its full stop.
        on_failure: Called with the text of a failure, for what has to be kept of it; returns what to tell people.

    Attributes:
        broken: What made the group unusable, or `None`.
        recorder: This rank's flight recorder.
        meanwhile: Called while this rank waits: lets what it started in other groups get on.
    """

    def __init__(
        self,
        comm: Intracomm,
        board: StatusBoard,
        hostnames: tuple[str, ...],
        stall_seconds: float = 0.0,
        remedy: str = "",
        on_failure: Callable[[str], str] = lambda text: "",
    ) -> None:
        self.meanwhile: Callable[[], None] = lambda: None
        self.broken: Exception | None = None
        self.recorder = board.recorder
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self._notes = FailureNotes(comm)
        self._board = board
        self._hostnames = hostnames
        self._stall_seconds = stall_seconds
        self._remedy = remedy
        self._on_failure = on_failure
        self._heard: dict[int, FailureNote] = {}
        self._stalled: dict[int, FailureNote] = {}
        self._sequence = 0
        self._call = ""
        self._timeout: float | None = None
        self._since = 0.0
        self._next_look = 0.0
        self._is_new = False  # whether this rank was not kept waiting yet in its call
        self._warn_at = math.inf
        self._gone: tuple[int, ...] = ()
        self._met = math.inf
        self._answers = True
        self._is_last = False  # whether the strategy is closed with this call
        self._resetting: dict[int, int] = {}  # the last calls of ranks that are in reset()

    def begin(self, sequence: int, call: str, details: str, timeout: float | None, is_last: bool = False) -> None:
        """Note that this rank comes to a call. Local.

        Args:
            sequence: Its number.
            call: Its name.
            details: What the flight recorder shall say of it.
            timeout: How long this rank may be kept waiting in it, in seconds; `None` or 0 for ever.
            is_last: Whether this rank closes the group with it.
        """
        self._sequence, self._call, self._timeout, self._is_new = sequence, call, timeout, True
        self._is_last = is_last
        self._next_look, self._met = 0.0, math.inf
        self.recorder.begin(sequence, call, details)

    def restart(self, since: float | None = None) -> None:
        """Count the time that this rank is kept waiting from now on: it did other work since the call began.

        Args:
            since: From when on instead, in seconds of the monotonic clock.
        """
        self._begin_waiting(time.monotonic() if since is None else since)

    def meet(self) -> None:
        """Note that all ranks have come to the call: who does not get on now does not look after what it started."""
        self._met = time.monotonic()

    def limit(self, timeout: float | None) -> None:
        """Set how long this rank may be kept waiting, in seconds; `None` or 0 for ever."""
        self._timeout = timeout

    def require_no_notes(self, probes: int = 1, is_waiting: bool = False) -> None:
        """Raise if another rank has given up or ended. Local.

        Args:
            is_waiting: Whether this rank has waited for others: then it finds out for whom.
            probes: How often to ask MPI, which may need several calls to find a message, after work without any.
        """
        for _ in range(probes):
            if self._heard or self._notes.have_come():
                self._hear(is_waiting)

    def require_nobody_left(self, call: str, probes: int = 1) -> None:
        """Raise if another rank makes no call of the group any more, so that it does not come to reset either. Local.

        Raises:
            PeerFailedError: If a rank has left because of an exception, or its program has failed.
        """
        for _ in range(probes):
            self._read()
        for _, _, reason in _ends_of({rank: note for rank, note in self._heard.items() if note.tag != BROKE_OFF}):
            raise PeerFailedError(f"{call} on rank {self._rank} cannot complete: {reason}. {_NEW}")

    def check_peers(self) -> None:
        """Raise if there is no sense in waiting on. Local.

        Raises:
            DeadlineExceededError: If time is up, here or on another rank.
            PeerFailedError: If a rank broke off, ended, or is gone.
        """
        self.meanwhile()
        if self._heard or self._notes.have_come():
            self._hear(is_waiting=True)
        now = time.monotonic()
        if now >= self._next_look:
            self._check(now)

    def hears_end_of_a_lower_rank(self) -> bool:
        """Whether a rank before this one has told of the end of its program, or of what will end it. Local."""
        for _ in range(PROBES):  # MPI may need several calls to find a message, after work without any
            self._read()
        ends = (ENDED, LEFT, BROKE_OFF, GAVE_UP)  # not `FOLLOWS`: it may be this rank that the other follows
        return any(note.tag in ends and rank < self._rank for rank, note in self._heard.items())

    def tell_end(self, text: str) -> None:
        """Tell the other ranks that this one's program has failed. Local."""
        if self.broken is None:
            self.tell(ENDED, text, is_lost=True)

    def tell_leaving(self, text: str) -> None:
        """Tell the other ranks that this one leaves their group, because of an exception. Local."""
        if self.broken is None:
            self.tell(LEFT, text, is_lost=True)

    def tell_reset(self) -> None:
        """Tell the other ranks that this one makes no call any more before a reset. Local."""
        if self.broken is None:
            self.tell(RESETS, "")

    def stop_answering(self) -> FailureNotes:
        """Write no more notes; return those of all calls, to be taken before the communicator is freed. Local."""
        self._answers = False
        return self._notes

    def tell(self, tag: int, text: str, is_lost: bool = False, to: Iterable[int] | None = None) -> None:
        """Leave a note for other ranks, so that none of them waits for this one. Local.

        Args:
            tag: Which kind of `FailureNote`.
            text: What happened, for people.
            is_lost: Whether a rank will never come: this one, for example.
            to: The ranks; by default all others.
        """
        late = [status for status in self._board.statuses().values() if not status.has_joined(self._sequence)]
        own = self._board.status(self._rank)
        others = (status for status in late if status.rank != self._rank)
        note = FailureNote(tag, self._sequence, text, is_lost, self._board.ranks, (own, *others))
        if to is None:
            # What all ranks of a node find out, one of them tells other nodes, or as many notes as pairs of ranks went.
            is_for_all = tag not in (GAVE_UP, FOLLOWS) or self._speaks()
            to = range(self._size) if is_for_all else self._board.ranks
        self._notes.send(note, to)

    def _check(self, now: float) -> None:
        if self._is_new:
            self._begin_waiting(self.recorder.begun or now)
        waited = now - self._since
        gone = self._board.gone()
        is_gone = bool(gone) and gone == self._gone  # seen twice, with a look between at whether what we want has come
        self._gone = gone
        for rank, last in self._resetting.items():
            if last < self._sequence:
                reason = f"rank {rank} called reset() instead, after call {last}"
                self.tell(GAVE_UP, reason, is_lost=True)
                self._fail(PeerFailedError, f"cannot complete: {reason}", Stragglers({}, (), self._hostnames), None)
        if is_gone or (self._timeout and waited >= self._timeout):
            self.require_no_notes(PROBES, is_waiting=True)  # before this rank says what another has said
            self._give_up()
        if self._stall_seconds and not self._timeout:
            self._wonder(now, waited)
        self._next_look = now + _LOOK_SECONDS
        if now >= self._met + _MET_SECONDS:
            self.recorder.agree()
            self._met = math.inf
        self._next_look = min(self._next_look, self._met + _MET_SECONDS)
        if self._timeout:
            self._next_look = min(self._next_look, self._since + self._timeout)

    def _begin_waiting(self, since: float) -> None:
        """Count the time that this rank is kept waiting in its call. Nothing of an earlier call counts."""
        if self._is_new:
            self._is_new, self._warn_at, self._gone = False, math.inf, ()
        self._since, self._next_look = since, 0.0

    def _hear(self, is_waiting: bool) -> None:
        self._read()
        heard, until = self._heard_of_this_call(), time.monotonic() + _FIRST_HAND_SECONDS
        # A rank that gives up because another one does, does not say why: the note of the first rank is under way.
        while heard and all(note.tag == FOLLOWS for note in heard.values()) and time.monotonic() < until:
            time.sleep(_FIRST_HAND_SECONDS / 50)
            self._read()
            heard = self._heard_of_this_call()
        if not heard:
            return
        for tag, first, reason in _ends_of(heard):
            self._follow(reason, first, is_waiting=False, may_go_on=tag == LEFT)
        ranks = [rank for rank, note in heard.items() if note.tag == GAVE_UP] or list(heard)
        reason = f"{name_ranks(ranks)} had given up waiting, for it or for an earlier call{self._why_given_up()}"
        self._follow(reason, min(ranks), is_waiting)

    def _heard_of_this_call(self) -> dict[int, FailureNote]:
        # This rank may still finish a call when others have given up on the next one: that is the next one's affair.
        # A rank that left has done its part of its last call.
        return {
            rank: note
            for rank, note in self._heard.items()
            if note.tag == ENDED or note.sequence + (note.tag == LEFT) <= self._sequence
        }

    def _read(self) -> None:
        for rank, note in self._notes.read():
            if note.tag == RESETS:
                self._resetting[rank] = note.sequence
            elif note.tag != STALLED:
                self._heard[rank] = note
            elif note.text == _ASKS:
                if self._answers and self.broken is None and self._speaks():
                    self.tell(STALLED, "", to=[rank])
            else:
                self._stalled[rank] = note

    def _why_given_up(self) -> str:
        """Say what the others know of the rank that they waited for, if it is more than that it did not come."""
        texts = dict.fromkeys(note.text for note in self._heard.values() if note.tag in (GAVE_UP, FOLLOWS))
        return "".join(f": {text}" for text in texts if text)

    def _follow(self, reason: str, first: int, is_waiting: bool, may_go_on: bool = False) -> NoReturn:
        """Fail because others have. `may_go_on`: whether the first of them may catch its exception."""
        is_lost = any(note.is_lost for note in self._heard.values())
        # What this rank heard, ranks of other nodes may hear from it alone.
        self.tell(FOLLOWS, self._why_given_up().removeprefix(": "), is_lost)
        late = self._late() if is_waiting else Stragglers({}, (), self._hostnames)
        if late.ranks:
            reason = f"{late.sentence(self.recorder.is_agreed)}, and {reason}"
        kind = PeerFailedError if is_lost or late.gone else DeadlineExceededError
        self._fail(kind, f"cannot complete: {reason}", late, first, may_go_on)

    def _give_up(self) -> NoReturn:
        """Fail because time is up, or a process is gone."""
        self.tell(GAVE_UP, "", bool(self._board.gone()))
        late = self._late()
        first = min((rank for rank, note in self._heard.items() if note.tag == GAVE_UP), default=self._rank)
        follows = first if first < self._rank else None  # that rank has found it out, too
        sentence = late.sentence(self.recorder.is_agreed)
        if late.gone:
            self._fail(PeerFailedError, f"cannot complete: {sentence}", late, follows)
        is_absent = bool(late.absent) and not self.recorder.is_agreed
        rule = ". Every rank must make the same calls in the same order" if is_absent else ""
        self._fail(DeadlineExceededError, f"waited {self._timeout or 0:g} s, and {sentence}{rule}", late, follows)

    def _fail(
        self, kind: type[Exception], reason: str, late: Stragglers, follows: int | None, may_go_on: bool = False
    ) -> NoReturn:
        self.recorder.fail()
        summary = f"{self._name} on rank {self._rank} {reason}"
        is_for_good = self._is_last or any(note.tag == LEFT for note in self._heard.values())
        head = f"{summary}. {_NEW if is_for_good else self._remedy}"
        self.broken, lines = kind(head), late.lines()
        kept = self._on_failure(head)
        if kept:
            lines.append(kept)
        self.broken = error = kind("\n  ".join([head, *lines]))
        if follows is not None:
            vars(error).update(follows_rank=follows, summary=summary, may_go_on=may_go_on)  # that rank says it all
        raise error

    def _late(self) -> Stragglers:
        """Find out which ranks keep the others waiting. Takes a moment if other nodes do not answer."""
        until = time.monotonic() + _ANSWER_SECONDS
        while True:
            self._read()
            known, seen = self._known(self._heard), self._seen(self._heard)
            # A rank that is in a reset already has left a note of where it was before.
            is_all = len(seen) == self._size and not any(status.is_resetting for status in known.values())
            if is_all or time.monotonic() > until:
                return Stragglers.of(self._sequence, known, seen, self._hostnames, self.recorder.is_agreed)
            time.sleep(_ANSWER_SECONDS / 100)

    def _seen(self, notes: dict[int, FailureNote]) -> set[int]:
        """The ranks of this node, and of those that notes came from."""
        return {rank for note in notes.values() for rank in note.seen} | {*self._board.ranks}

    def _known(self, notes: dict[int, FailureNote]) -> dict[int, Status]:
        """What this node's board and notes tell of the ranks."""
        known = {status.rank: status for note in notes.values() for status in note.statuses}
        # What a rank wrote itself tells where it waited; meanwhile it may have gone on, to a reset.
        return known | self._board.statuses() | {rank: note.statuses[0] for rank, note in notes.items()}

    def _wonder(self, now: float, waited: float) -> None:
        """Warn, once in a call and on one rank of a node, that this wait is long."""
        if self._warn_at == math.inf:
            if waited >= self._stall_seconds and self._speaks():
                self._stalled.clear()
                if self._answers:
                    self.tell(STALLED, _ASKS)
                self._warn_at = now + _ANSWER_SECONDS
        elif now >= self._warn_at > 0:
            self._warn_at = -math.inf  # said once
            self._read()
            known, seen = self._known(self._stalled), self._seen(self._stalled)
            late = Stragglers.of(self._sequence, known, seen, self._hostnames)
            reason = "; ".join([late.sentence(self.recorder.is_agreed), *late.lines()])
            logger.warning(
                "mpidist: %s on rank %d has waited for %.0f s, and %s", self._name, self._rank, waited, reason
            )

    @property
    def _name(self) -> str:
        return name_call(self._call, self._sequence)

    def _speaks(self) -> bool:
        """Whether this rank is the first of those of its node that wait."""
        joined = [status.rank for status in self._board.statuses().values() if status.has_joined(self._sequence)]
        return not joined or self._rank == min(joined)


def _ends_of(heard: Mapping[int, FailureNote]) -> Iterator[tuple[int, int, str]]:
    """List how ranks ended their part in all calls: the kind of note, the first rank, and a sentence; worst first."""
    for tag, what in _ENDS.items():
        ranks = [rank for rank, note in heard.items() if note.tag == tag]
        if ranks:
            texts = "; ".join(dict.fromkeys(heard[rank].text for rank in ranks))
            yield tag, ranks[0], f"{name_ranks(ranks)} {what}: {texts}"
