"""Checks of a rank while it waits for other ranks: the clock, their failure notes, and their processes.

Every wait calls `check_peers` now and then. It raises when waiting further cannot help: the deadline has passed,
another rank has given up or ended, or its process is gone. MPI itself notices none of these.

A `Watchdog` handles no calls. An `Awaited` lists the ranks that are awaited, and the failures of others that end the
wait: `CallWatchdog` for calls in lock step, `AwaitedPeers` for messages at any time.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Final, NoReturn, final

from mpidist.errors import DeadlineExceededError, PeerFailedError
from mpidist.transport.failures.failure_notes import (
    BROKE_OFF,
    CLOSED,
    ENDED,
    FOLLOWS,
    GAVE_UP,
    LEFT,
    LOST,
    RESETS,
    STALLED,
    FailureNote,
    FailureNotes,
)
from mpidist.transport.failures.status_board import GONE, RESET, Status, StatusBoard
from mpidist.transport.failures.stragglers import Awaited, Stragglers
from mpidist.transport.mpi.launcher_abort import LOST_RANK, mark_for_restarts
from mpidist.transport.mpi.library import Intracomm, load_mpi, numbers_in_world
from mpidist.transport.shared_errors import mark_following
from mpidist.transport.text import name_ranks, text_of

__all__ = ["PROBES", "Watchdog"]

logger = logging.getLogger("mpidist.transport")

_CHECK_SECONDS: Final = 0.005  # between two checks of the clock, and of one process
_FIRST_PROCESS_SECONDS: Final = 0.1  # how long a rank waits before it checks processes
_LAST_MESSAGE_SECONDS: Final = 0.1  # how long a message may be under way whose sender is gone
_ANSWER_SECONDS: Final = 0.3  # how long to wait for the notes of other nodes
_STACK_SECONDS: Final = 0.2  # how long the answer may wait for the stacks of this node's ranks
_FIRST_NOTE_SECONDS: Final = 0.05  # how long to wait for the note of the rank that gave up first
PROBES: Final = 20  # of MPI, which may need several calls to find a message, after work without any
_QUESTION: Final = "?"
# How ranks end their part in all calls; what says most of the cause comes first.
_ENDS: Final = {
    ENDED: "ended",
    LEFT: "left because of an exception",
    BROKE_OFF: "broke off in the middle of a call, with an error",
    CLOSED: "closed the strategy after a call that had failed",
}
_CLOSE_AND_REBUILD: Final = "The strategy cannot be used any more: close it, and make a new one on all ranks"


@final
class Watchdog:
    """One rank's watch over its waits, one wait at a time.

    Args:
        comm: The ranks. Messages from rank to rank in `comm` are this object's alone.
        stall_seconds: When to warn of a wait without a deadline; 0 for never.
        remedy: What people can do after a failure, as a sentence without its full stop. Also an attribute.
        on_failure: Called with the text of a failure, to save what explains it; returns a text for people.

    Attributes:
        broken: The failure that made the group unusable, or `None`.
        advance_others: Called while this rank waits, to advance what this rank started in other groups.
        resets: The note of each rank that has called reset().
    """

    def __init__(
        self,
        awaited: Awaited,
        comm: Intracomm,
        board: StatusBoard,
        hostnames: tuple[str, ...],
        stall_seconds: float,
        remedy: str,
        on_failure: Callable[[str], str],
    ) -> None:
        self.advance_others: Callable[[], None] = lambda: None
        self.broken: Exception | None = None
        self.resets: dict[int, FailureNote] = {}
        self._closed: dict[int, FailureNote] = {}
        self._awaited = awaited
        self._rank, self._size, self._numbers = comm.Get_rank(), comm.Get_size(), numbers_in_world(comm)
        self._notes = FailureNotes(comm)
        self._board = board
        self._hostnames = hostnames
        self._stall_seconds = stall_seconds
        self.remedy = remedy
        self._on_failure = on_failure
        self._received: dict[int, FailureNote] = {}
        self._answers: dict[int, FailureNote] = {}
        self._since = 0.0
        self._next_check = 0.0
        self._stall_at, self._warn_at = stall_seconds, math.inf
        self._gone: tuple[int, ...] = ()  # the awaited ranks that were found gone, since `_gone_since`
        self._gone_since = 0.0
        self._may_answer = True

    def begin(self, since: float | None = None) -> None:
        """Begin a new wait, now or at `since`, on the monotonic clock. Local."""
        self._stall_at, self._warn_at, self._gone = self._stall_seconds, math.inf, ()
        self.restart(since)

    def restart(self, since: float | None = None) -> None:
        """Measure the time of the wait from now on, or from `since`. A warning that was given is not repeated."""
        self._since, self._next_check = time.monotonic() if since is None else since, 0.0

    @property
    def waited(self) -> float:
        """For how long the wait has lasted, in seconds."""
        return time.monotonic() - self._since

    def check_peers(self) -> None:
        """Raise if waiting further cannot help: the deadline has passed, or a rank broke off, ended or is gone."""
        self.advance_others()
        if self._received or self._notes.has_unread():
            self._check_notes(is_waiting=True)
        now = time.monotonic()
        if now >= self._next_check:
            self._check_clock_and_processes(now)

    def require_no_notes(self, probes: int = 1, is_waiting: bool = False) -> None:
        """Raise if another rank has given up or ended; the error names late ranks if this rank has waited."""
        for _ in range(probes):
            if self.has_notes():
                self._check_notes(is_waiting)

    def has_notes(self) -> bool:
        """Whether there are notes of other ranks. Local."""
        return bool(self._received) or self._notes.has_unread()

    def require_nobody_left(self, probes: int = 1) -> None:
        """Raise `PeerFailedError` in reset() if another rank makes no call of the group any more. Local."""
        for _ in range(probes):
            self._read()
        left = {rank: note for rank, note in self._received.items() if note.tag != BROKE_OFF}
        for _, reason in _ends_of(left | self._closed):
            raise PeerFailedError(f"reset() on rank {self._rank} cannot complete: {reason}. {_CLOSE_AND_REBUILD}")

    def has_lower_rank_ended(self) -> bool:
        """Whether a lower rank has reported the end of its program, or an error that will end its program. Local."""
        for _ in range(PROBES):
            self._read()
        ends = (ENDED, LEFT, BROKE_OFF, GAVE_UP)  # not one that follows: it may be this rank that the other follows
        return any(it.tag in ends and not it.follows and rank < self._rank for rank, it in self._received.items())

    def acknowledged(self) -> dict[int, bool]:
        """Return whether each rank, by its number in the job, or one of its node, has raised an error here. Local."""
        self._read()
        ranks = {self._rank, *self._received, *(self._seen(self._received) - {*self._board.ranks})}
        return {number: self.broken is not None or rank in ranks for rank, number in enumerate(self._numbers)}

    def tell_end(self, text: str) -> None:
        """Notify the other ranks that this rank's program has failed. Local."""
        if self.broken is None:
            self.tell(ENDED, text, is_lost=True)

    def tell_leaving(self, text: str, others_know: bool = True, done: int | None = None, follows: bool = False) -> None:
        """Notify the other ranks that this rank leaves their group, because of an exception. Local.

        `others_know`: if a wait of this rank has failed, others have noticed it, as in lock step. `done`: the last call
        in which this rank has done its part; `None` for the last that it joined. `follows`: `FailureNote.follows`.
        """
        if self.broken is None or not others_know:
            self.tell(LEFT, text, is_lost=True, sequence=done, follows=follows)

    def tell_closed(self) -> None:
        """Notify the other ranks, if a call has failed, that this rank makes no reset after it. Local."""
        if self.broken is not None:
            with suppress(load_mpi().Exception):  # of a rank whose host is gone
                self._notes.send(self._note(CLOSED, self._awaited.name), range(self._size))

    def tell_reset(self) -> None:
        """Notify the other ranks that this rank makes no more calls before a reset. Local."""
        if self.broken is None:
            self.tell(RESETS, "")

    def stop_answering(self) -> FailureNotes:
        """Send no more notes. Returns the notes, to be drained before the communicator is freed. Local."""
        self._may_answer = False
        return self._notes

    def tell(
        self,
        tag: int,
        text: str,
        is_lost: bool = False,
        to: Collection[int] | None = None,
        sequence: int | None = None,
        follows: bool = False,
    ) -> dict[int, Status]:
        """Send a note to other ranks, so that none waits for this one; return the statuses of its node. Local.

        The statuses are of before: the query of a rank's place may wake it from a sleep in C. `is_lost`: some rank
        never takes part again, this one, for example; an awaited rank of this node whose process is gone is found
        anyway.
        """
        statuses = here = self._board.statuses()
        is_lost |= any(one.process == GONE and rank in self._awaited.ranks for rank, one in here.items())
        if any(status.is_in(RESET, "waiting") for status in statuses.values()):
            for _ in range(PROBES):  # the rank's note, sent before the reset, says in which call it was
                self._read()
        statuses |= {rank: note.statuses[0] for rank, note in self._received.items() if rank in statuses}
        own = self._board.status(self._rank)
        late = {rank: one for rank, one in statuses.items() if rank != self._rank and self._awaited.is_late(one)}
        lost, seen = tuple(self._awaited.lost), self._board.ranks
        number = self._awaited.sequence if sequence is None else sequence
        # All ranks of a node find out the same, so one of them tells other nodes: not every pair needs a note.
        is_for_all = tag not in (GAVE_UP, FOLLOWS) or self._is_speaker(here)
        if to is None:
            to = range(self._size) if is_for_all else seen
        if tag in (GAVE_UP, FOLLOWS, STALLED) and text != _QUESTION and not {*to} <= {*seen}:
            late = self._board.located(late, seconds=_STACK_SECONDS)
        self._notes.send(FailureNote(tag, number, text, is_lost, lost, seen, (own, *late.values()), follows), to)
        return {rank: late.get(rank, status) for rank, status in here.items()}

    def give_up(self, reason: str) -> NoReturn:
        """Notify the other ranks that the wait of this rank cannot succeed, and raise `PeerFailedError`."""
        self.tell(GAVE_UP, reason, is_lost=True)
        self._fail(PeerFailedError, f"cannot complete: {reason}", Stragglers({}, (), self._hostnames), follows=False)

    def break_off(self, error: BaseException, broken: str) -> None:
        """Give up a call for good, because of an exception of this rank. Local. `broken`: the text of later errors."""
        self.tell(BROKE_OFF, text_of(error), is_lost=True)
        self.broken = RuntimeError(broken)

    def _check_clock_and_processes(self, now: float) -> None:
        waited, timeout = now - self._since, self._awaited.timeout
        is_gone = waited >= _FIRST_PROCESS_SECONDS and self._is_any_gone(now)
        if is_gone or (timeout and waited >= timeout):
            self.require_no_notes(PROBES, is_waiting=True)  # if another rank has told it already, follow that rank
            self._fail_by_own_finding()
        if self._stall_seconds and not timeout:
            self._warn_of_stall(now, waited)
        self._next_check = max(now + _CHECK_SECONDS, self._since + _FIRST_PROCESS_SECONDS)
        if timeout:
            self._next_check = min(self._next_check, self._since + timeout)

    def _is_any_gone(self, now: float) -> bool:
        """Whether the process of an awaited rank is gone, and was for long enough that no message is under way."""
        gone: tuple[int, ...] = self._board.found_gone()
        self.go_on_without(gone)
        gone = tuple(rank for rank in gone if rank in self._awaited.ranks)
        if gone != self._gone:
            self._gone, self._gone_since = gone, now
        return bool(gone) and now - self._gone_since >= _LAST_MESSAGE_SECONDS

    def go_on_without(self, gone: Collection[int]) -> None:
        """Stop waiting for processes that are gone, where the group can, and notify the other nodes. Local."""
        ranks = self._awaited.go_on_without(gone)
        if not ranks:
            return
        self._notes.send(self._note(LOST, "", tuple(ranks)), range(self._size))

    def _note(self, tag: int, text: str, lost: tuple[int, ...] = ()) -> FailureNote:
        """Make a note that lists of other ranks only the lost ones. Local."""
        own = self._board.status(self._rank)
        return FailureNote(tag, self._awaited.sequence, text, False, lost, self._board.ranks, (own,))

    def _check_notes(self, is_waiting: bool) -> None:
        """Read the notes, and raise if one of them ends the wait."""
        self._read()
        ending, until = self._ending_notes(), time.monotonic() + _FIRST_NOTE_SECONDS
        # The note of a rank that only follows another one does not say why; the note of the first rank is under way.
        while ending and all(note.tag == FOLLOWS for note in ending.values()) and time.monotonic() < until:
            time.sleep(_FIRST_NOTE_SECONDS / 50)
            self._read()
            ending = self._ending_notes()
        if not ending:
            return
        for tag, reason in _ends_of(ending):
            self._fail_after_others(reason, is_waiting=False, may_go_on=tag == LEFT)
        ranks = [rank for rank, note in ending.items() if note.tag == GAVE_UP] or list(ending)
        reason = f"{name_ranks(ranks)} had given up waiting{self._awaited.given_up}{self._why_given_up()}"
        self._fail_after_others(reason, is_waiting)

    def _ending_notes(self) -> dict[int, FailureNote]:
        return {rank: note for rank, note in self._received.items() if self._awaited.is_ended_by(rank, note)}

    def _read(self) -> None:
        for rank, note in self._notes.read():
            if note.tag == RESETS:
                self.resets[rank] = note
            elif note.tag == CLOSED:
                self._closed[rank] = note
            elif note.tag == LOST:
                self._awaited.go_on_without(note.lost)
            elif note.tag != STALLED:
                self._received[rank] = note
            elif note.text == _QUESTION:
                if self._may_answer and self.broken is None and self._is_speaker(self._board.statuses()):
                    self.tell(STALLED, "", to=[rank])
            else:
                self._answers[rank] = note

    def _why_given_up(self) -> str:
        """Repeat the cause that notes report, if it is more than a rank that this one awaits, too."""
        notes = [note for note in self._received.values() if note.tag in (GAVE_UP, FOLLOWS)]
        gone = {one.rank for note in notes for one in note.statuses if one.process == GONE} - {*self._awaited.ranks}
        texts = [f"the process of {name_ranks([rank])} is gone" for rank in sorted(gone)]
        return "".join(f": {text}" for text in dict.fromkeys([*texts, *(note.text for note in notes)]) if text)

    def _fail_after_others(self, reason: str, is_waiting: bool, may_go_on: bool = False) -> NoReturn:
        """Fail because other ranks have. `may_go_on`: whether the first of them may catch its exception."""
        is_lost = any(note.is_lost for note in self._received.values())
        # Ranks of other nodes may have received no note but this one.
        here = self.tell(FOLLOWS, self._why_given_up().removeprefix(": "), is_lost)
        late = self._stragglers(here) if is_waiting else Stragglers({}, (), self._hostnames)
        if late.ranks:
            reason = f"{late.sentence()}, and {reason}"
        kind = PeerFailedError if is_lost or late.gone else DeadlineExceededError
        self._fail(kind, f"cannot complete: {reason}", late, follows=True, may_go_on=may_go_on)

    def _fail_by_own_finding(self) -> NoReturn:
        """Fail because the deadline has passed, or a process is gone."""
        late = self._stragglers(self.tell(GAVE_UP, ""))
        # If a lower rank has given up, too, that rank prints the whole text.
        follows = any(note.tag == GAVE_UP and rank < self._rank for rank, note in self._received.items())
        if late.gone:
            mark_for_restarts(os.environ, LOST_RANK)
            self._fail(PeerFailedError, f"cannot complete: {late.sentence()}", late, follows)
        advice = f". {late.advice}" if late.absent and late.advice else ""
        reason = f"waited {self._awaited.timeout or 0:g} s, and {late.sentence()}{advice}"
        self._fail(DeadlineExceededError, reason, late, follows)

    def _fail(
        self, kind: type[Exception], reason: str, late: Stragglers, follows: bool, may_go_on: bool = False
    ) -> NoReturn:
        self._board.recorder.fail()
        summary = f"{self._awaited.name} on rank {self._rank} {reason}"
        is_for_good = self._awaited.is_last or any(note.tag == LEFT for note in self._received.values())
        head = f"{summary}. {_CLOSE_AND_REBUILD if is_for_good else self.remedy}"
        self.broken, lines = kind(head), late.lines()
        ranks = sorted({self._rank, *late.ranks})
        numbers = [self._numbers[rank] for rank in ranks]
        lines += [f"{name_ranks(ranks)} of this group: {name_ranks(numbers)} of the job"] * (numbers != ranks)
        saved = self._on_failure(head)
        if saved:
            lines.append(saved)
        self.broken = error = kind("\n  ".join([head, *lines]))
        if follows:
            mark_following(error, summary, may_go_on)
        raise error

    def _stragglers(self, here: Mapping[int, Status]) -> Stragglers:
        """Find out which ranks are late. Takes a moment if other nodes do not answer. `here`: those of this node."""
        until = time.monotonic() + _ANSWER_SECONDS
        while True:
            self._read()
            known, seen = self._known(self._received, here), self._seen(self._received)
            # A rank that waits in a reset has sent a note before, which says in which call it was.
            is_any_in_reset = any(one.is_in(RESET, "waiting") for one in known.values())
            if (seen.issuperset(self._awaited.ranks) and not is_any_in_reset) or time.monotonic() > until:
                return self._located(self._awaited.stragglers(known, seen, self._hostnames))
            time.sleep(_ANSWER_SECONDS / 100)

    def _located(self, late: Stragglers) -> Stragglers:
        return late._replace(known=self._board.located(late.known))

    def _seen(self, notes: dict[int, FailureNote]) -> set[int]:
        """List the ranks of this node, and of the nodes that sent notes."""
        return {rank for note in notes.values() for rank in note.seen} | {*self._board.ranks}

    def _known(self, notes: dict[int, FailureNote], here: Mapping[int, Status]) -> dict[int, Status]:
        """Merge the statuses of ranks on this node's board and in notes."""
        known = {status.rank: status for note in notes.values() for status in note.statuses}
        # A rank's own note says where it waited, and comes last: by the board, it may be in a reset since then.
        return known | {**here} | {rank: note.statuses[0] for rank, note in notes.items()}

    def _warn_of_stall(self, now: float, waited: float) -> None:
        """Warn, once in a wait and on one rank of a node, that the wait is long. Queries the other nodes before."""
        if self._warn_at == math.inf:  # not asked yet
            if waited >= self._stall_at and self._is_speaker(self._board.statuses()):
                self._answers.clear()
                if self._may_answer:
                    self.tell(STALLED, _QUESTION)
                self._warn_at = now + _ANSWER_SECONDS
        elif now >= self._warn_at > 0:
            self._read()
            known, seen = self._known(self._answers, self._board.statuses()), self._seen(self._answers)
            late = self._awaited.stragglers(known, seen, self._hostnames)
            if self._awaited.is_warned_of(late, self._stall_seconds):
                self._stall_at, self._warn_at = waited + self._stall_seconds, math.inf  # ask again later
                return
            self._warn_at = -math.inf  # never again in this wait
            late, name = self._located(late), self._awaited.name
            reason = "; ".join([late.sentence(), *late.lines()])
            logger.warning("mpidist: %s on rank %d has waited for %.0f s, and %s", name, self._rank, waited, reason)

    def _is_speaker(self, statuses: Mapping[int, Status]) -> bool:
        """Whether this rank is the first of its node's ranks that wait for the same: it reports for all of them."""
        waiting = [rank for rank, status in statuses.items() if self._awaited.is_shared_with(status)]
        return not waiting or self._rank == min(waiting)


def _ends_of(received: Mapping[int, FailureNote]) -> Iterator[tuple[int, str]]:
    """List how ranks ended their part in all calls: the tag of the note, and a sentence, in the order of `_ENDS`."""
    for tag, what in _ENDS.items():
        ranks = [rank for rank, note in received.items() if note.tag == tag]
        if ranks:
            texts = "; ".join(dict.fromkeys(received[rank].text for rank in ranks))
            yield tag, f"{name_ranks(ranks)} {what}: {texts}"
