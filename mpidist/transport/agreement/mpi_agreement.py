"""The agreement of MPI ranks: one round of comparison per call, and one more when a deadline is set."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any, final

import numpy as np

from mpidist.errors import DeadlineExceededError, PeerFailedError
from mpidist.transport.agreement.agreement import Agreement, CallRecord, Posted, Progress
from mpidist.transport.agreement.comparison_rounds import CarryingRounds, MaximumRounds, MpiRounds
from mpidist.transport.agreement.fingerprint import StepExit, fingerprint_of
from mpidist.transport.agreement.mismatch_report import (
    CallReport,
    have_same_kind_of_error,
    is_step_left_by_some,
    mismatch_error,
    peer_left_error,
    step_exit_error,
)
from mpidist.transport.agreement.slow_ranks import SlowRanks
from mpidist.transport.failures.call_watchdog import CallWatchdog
from mpidist.transport.mpi.library import Intracomm, failed_ranks, last_round, load_mpi, ranks_in_world
from mpidist.transport.native.loading import native
from mpidist.transport.node_memory.barrier import NodeBarrier
from mpidist.transport.shared_errors import is_shared_by, mark_shared, repeat_of
from mpidist.transport.stacks import Stack, line_of_start, walk_program
from mpidist.transport.text import name_ranks, text_of
from mpidist.transport.waiting import is_pausing, never_free, poll

__all__ = ["MpiAgreement"]


@final
class MpiAgreement(Agreement):
    """The agreement of MPI ranks. `comm` is for this object and its watchdog alone; this object frees it.

    Comparisons have a communicator of their own, in the order of calls. What follows the comparison of a call, also in
    the order of calls, goes through `comm`: its second round, or the descriptions of calls that differ.

    If not all calls are compared (`check`), calls with a deadline still are, and so are all calls on one node, where
    the barrier in shared memory compares at no cost. `sequence`: the last call before this object was made.
    """

    def __init__(
        self,
        comm: Intracomm,
        call_watchdog: CallWatchdog,
        slow_ranks: SlowRanks,
        check: bool = True,
        timeout_seconds: float | None = None,
        barrier: NodeBarrier | None = None,
        sequence: int = 0,
    ) -> None:
        super().__init__(call_watchdog.recorder.end, call_watchdog.check_peers, ranks_in_world(comm))
        comm.Set_name("mpidist.agreement")
        self._comm = comm
        self._call_watchdog, self._watchdog = call_watchdog, call_watchdog.watchdog
        self._slow_ranks = slow_ranks
        self._rounds: MpiRounds | NodeBarrier
        self._second_rounds: MpiRounds | NodeBarrier
        if barrier is not None:
            self._rounds = self._second_rounds = barrier
        else:
            self._rounds, self._second_rounds = MpiRounds.over(comm.Dup()), MaximumRounds(comm)
        self._awaited = self._rounds
        self.is_node_barrier = barrier is not None
        is_compiled = native is not None and isinstance(barrier, native.Barrier)
        self._join = native.WholeCall(barrier, call_watchdog.recorder.memory).run if is_compiled else None
        self.compares_all_calls = check or self.is_node_barrier
        if check and isinstance(self._rounds, CarryingRounds):
            self.carrying = self._rounds
        self._posted = self._notice_bit = 0  # of this call: the fingerprint, and the bit that a notice changes in it
        self._step_exit: StepExit | None = None  # of this call: `step_exit`, which changes other bits
        self._timeout_seconds = timeout_seconds
        self.sequence = sequence
        self._has_second_round = False  # whether this call has a deadline
        self._compared: tuple[bool, bool] | None = None  # the result of the first round, if there is a second one
        self._last_refusal: object = None  # marks the last error that all ranks raised in a group that stays usable
        self.flight = call_watchdog.recorder.memory
        self._note_agreed = call_watchdog.recorder.agree
        self.mark_started = call_watchdog.recorder.mark_started  # type: ignore[method-assign]

    def arrive(self, record: CallRecord) -> None:
        call_watchdog = self._call_watchdog
        if self._watchdog.broken is not None:
            raise self._repeated(self._watchdog.broken)
        self.sequence += 1
        record.timeout = timeout = self._timeout_of(record)
        call_watchdog.begin(self.sequence, record.name, record.details, timeout, record.is_last)
        if not self.compares_all_calls and not self._needs_round(record):
            record.is_compared = False
            return
        if timeout or record.is_last:
            self._watchdog.require_no_notes()  # a note that is never received would keep MPI from ending
        self._compared, self._has_second_round, self._awaited = None, bool(timeout), self._rounds
        if record.posted is not None and self.carrying is not None:
            self._posted, self._notice_bit, self._step_exit = record.posted
            self.carrying.await_next()
            return
        self._posted, self._notice_bit, self._step_exit = posted = self._words_of(record)
        self._rounds.post_words(self._with_bits(posted, record), record.variant)

    @property
    def can_join_ahead(self) -> bool:
        return self.carrying is not None and self.carrying.has_room and self._watchdog.broken is None

    def join_ahead(self, record: CallRecord) -> None:
        assert self.carrying is not None
        posted = self._words_of(record)
        self.carrying.post_ahead(self._with_bits(posted, record), record.variant)
        record.posted = posted

    def _words_of(self, record: CallRecord) -> Posted:
        """Return the words that this rank compares in a call that it joins now. Local."""
        error, fingerprint, bit = record.error, record.fingerprint, 0
        if error is not None:
            fingerprint = fingerprint_of(("error", record.name, repr(error)))
        words = fingerprint ^ bool(self._timeout_of(record))
        if not record.is_last:
            words, bit = words ^ (self._run_of(record) << 1), self.notice.bit
        return Posted(words, bit, record.step_exit if record.is_started else self.take_step_exit())

    def _with_bits(self, posted: Posted, record: CallRecord) -> int:
        words, bit, step_exit = posted
        return words ^ bit if step_exit is None or record.is_last else words ^ bit ^ step_exit.bits

    def _run_of(self, record: CallRecord) -> int:
        return self.run if record.run is None else record.run

    def _timeout_of(self, record: CallRecord) -> float | None:
        return self._timeout_seconds if record.timeout_seconds is None else record.timeout_seconds

    def arrive_at_once(self, record: CallRecord) -> int:
        if self._join is not None and record.error is None and not record.is_last and not record.is_started:
            progress = self.join_at_once(record, self._join, None, None, 0)
            if progress != Progress.NOT_JOINED:
                return progress
        return super().arrive_at_once(record)

    def join_at_once(self, record: CallRecord, run: Callable[..., int], *given: Any) -> int:
        watch, name = self._call_watchdog, record.name
        recorder = watch.recorder
        if self.notice.bit or self.step_exit is not None:
            return Progress.NOT_JOINED
        if recorder.after_begin is not None or not self.is_node_barrier:
            return Progress.NOT_JOINED
        if self._watchdog.broken is not None:
            raise self._repeated(self._watchdog.broken)
        timeout = self._timeout_seconds if record.timeout_seconds is None else record.timeout_seconds
        has_second_round = bool(timeout)
        if has_second_round and self._watchdog.has_notes():  # `arrive` raises why this call cannot complete
            return Progress.NOT_JOINED
        self.sequence = sequence = self.sequence + 1
        watch.sequence, watch.call, watch.call_timeout, watch.is_new = sequence, name, timeout, True
        record.timeout, self._compared, self._has_second_round = timeout, None, has_second_round
        self._posted = record.fingerprint ^ has_second_round ^ (self.run << 1)
        self._notice_bit, self._step_exit = 0, None
        text = recorder.texts.get((name, record.details)) or recorder.number_of(name, record.details)
        progress = run(*given, sequence, text, self._posted, record.variant, has_second_round)
        if progress == Progress.JOINED_AGAIN:
            self._compared = True, True
            watch.mark_joined()
            return Progress.JOINED
        return progress

    def _needs_round(self, record: CallRecord) -> bool:
        """Whether a call needs a round although calls are not compared. Breaks off if this rank has an error."""
        if record.is_last:
            return True
        if record.error is not None:  # the other ranks may be moving data already, so only a note reaches them
            self.break_off(record.error)
            return False
        return bool(record.timeout) or record.variant != 0  # which is 0 on all ranks, or on none

    def have_all_arrived(self) -> bool:
        if not self._awaited.has_passed():
            return False
        if self._compared is None:
            self._compared = self._rounds.has_equal_words()
            if self._has_second_round and self._compared[0]:
                self._call_watchdog.mark_joined()
                # A rank that joins after others have given up completes the first round nevertheless. But it cannot
                # complete this one, so it waits here, and receives their notes.
                self._awaited = self._second_rounds
                self._awaited.post_words(0, 0)
                return self._awaited.has_passed()
        return True

    def can_conclude_now(self, record: CallRecord) -> bool:
        if not record.is_compared:
            return True
        return not self._notice_bit and (self._compared or self._rounds.has_equal_words())[0]

    def conclude(self, record: CallRecord) -> bool:
        error = record.error
        if error is not None:
            self._note_refusal(error)
        if not record.is_compared:
            if error is not None:
                self._call_watchdog.recorder.fail()
                raise error
            self._note_agreed()
            return True
        have_arrived = self.have_all_arrived if self._has_second_round else self._rounds.has_passed
        if not have_arrived():
            if self._watchdog.broken is not None:  # by an earlier call, in which this rank has waited since `arrive`
                raise self._repeated(self._watchdog.broken)
            self._call_watchdog.call_timeout = record.timeout
            if not is_pausing() and self._slow_ranks.note_wait(self.sequence):  # else the program has computed, too
                self.notice.ask()
            self._wait(have_arrived, self._memory, not self.is_node_barrier)
        are_equal, has_same_variant = self._compared or self._rounds.has_equal_words()
        if not are_equal or self._notice_bit:  # fingerprints are equal, too, if every rank gives a notice
            self._take_notice_or_raise(record)
        if error is not None:
            self._call_watchdog.recorder.fail()
            mark_shared(error, self.ranks)
            raise error
        self._note_agreed()
        return has_same_variant

    def require_no_wait(self, call: str) -> None:
        if self.waiting_thread == get_ident():  # the other ranks join it only after the call that this one waits in
            raise RuntimeError(
                f"{call} in the middle of {self._call_watchdog.name}: a signal handler, or a finalizer, cannot make "
                "calls; record the signal, and make the call between two steps, on all ranks, as "
                "PreemptionCheckpointHandler does"
            )

    def note_read(self, nanoseconds: int) -> None:
        self._slow_ranks.note_read(self.sequence, nanoseconds)

    def break_off(self, error: BaseException) -> None:
        self._call_watchdog.recorder.fail()
        self._give_up_if_mpi_knows_why(error)
        goes_on_alike = self._is_last_refusal(error) or is_shared_by(error, self.ranks)
        if self.broken is None and not goes_on_alike:
            how = f"was broken off on rank {self._comm.rank} by {text_of(error)}"
            self._watchdog.break_off(error, f"call {self.sequence} {how}")

    def has_raised(self, error: BaseException) -> bool:
        return self.broken is not None or self._is_last_refusal(error)

    def all_reduce_or(self, flags: int) -> int:
        mine, united = np.array([flags], np.int64), np.empty(1, np.int64)
        request = self._comm.Iallreduce(mine, united, load_mpi().BOR)
        self._wait(request.Test, lambda: (request, mine, united))
        return int(united[0])

    def all_gather_object(self, item: Any) -> list[Any]:
        """See `Agreement.all_gather_object`. Polled like every wait here, because ranks may be gone."""
        text = np.frombuffer(pickle.dumps(item), np.uint8)
        length, lengths = np.array([text.size]), np.empty(self._comm.size, np.int64)
        request = self._comm.Iallgather(length, lengths)
        self._wait(request.Test, lambda: (request, length, lengths))
        sent, received = np.zeros(lengths.max(), np.uint8), np.empty((lengths.size, lengths.max()), np.uint8)
        sent[: text.size] = text
        second = self._comm.Iallgather(sent, received)
        self._wait(second.Test, lambda: (second, sent, received))
        return [pickle.loads(row[:length].tobytes()) for row, length in zip(received, lengths, strict=True)]

    def restart_clock(self, since: float | None = None, record: CallRecord | None = None) -> None:
        self._call_watchdog.restart(since)
        if record is not None:
            self._call_watchdog.call_timeout = record.timeout

    def has_notes(self) -> bool:
        return self._watchdog.has_notes()

    def await_message(self, name: str) -> None:
        self._call_watchdog.await_message(name)

    @property
    def broken(self) -> Exception | None:
        return self._watchdog.broken

    def abandon(self) -> None:
        never_free(self._memory())

    def _memory(self) -> tuple[Any, ...]:
        """Return what MPI may still write of comparisons that are under way."""
        return tuple(its.memory for its in (self._rounds, self._second_rounds) if isinstance(its, MpiRounds))

    def free(self) -> None:
        notes = self._watchdog.stop_answering()
        if self._ends_with(any(notes.sent)):  # notes of long waits that ended without an error
            notes.drain(self.all_gather_object(notes.sent), self._call_watchdog.check_peers)
            self._ends_with(False)
        if isinstance(self._rounds, MpiRounds):
            self._rounds.free()
        self._comm.Free()

    def _ends_with(self, has_flag: bool) -> bool:
        """Return whether any rank has a flag, in what may be the last messages of this process. Collective."""
        request, united = last_round(self._comm, has_flag)
        self._wait(request.Test, lambda: (request, united.base))
        return bool(united.any())

    def _wait(self, test: Callable[[], bool], memory: Callable[[], tuple[Any, ...]], is_message: bool = True) -> None:
        """Poll until all ranks have taken part. If one does not, the group is broken, and `memory` is never freed."""
        self.waiting_thread = 0 if is_pausing() else get_ident()
        try:
            poll(test, self._call_watchdog.check_peers, is_message=is_message)
        except BaseException as error:
            never_free(memory())
            if isinstance(error, (DeadlineExceededError, PeerFailedError)):
                raise
            self._give_up_if_mpi_knows_why(error)
            # Ctrl-C, for example: the other ranks may complete this call
            self._watchdog.break_off(error, f"{self._call_watchdog.name} was interrupted by {type(error).__name__}")
            raise
        finally:
            self.waiting_thread = 0

    def _give_up_if_mpi_knows_why(self, error: BaseException) -> None:
        """Raise `PeerFailedError` if an error is of messages, and MPI has found which processes have failed. Local."""
        if self.broken is not None or not isinstance(error, (load_mpi().Exception, PeerFailedError)):
            return
        failed = failed_ranks(self._comm, self._comm)
        if failed:
            what, have = ("process", "has") if len(failed) == 1 else ("processes", "have")
            self._watchdog.give_up(f"MPI has found that the {what} of {name_ranks(failed)} {have} failed")

    def _take_notice_or_raise(self, record: CallRecord) -> None:
        """Take a notice if calls differ in nothing else, or this is the rank's last call; else raise. Collective."""
        error, run = record.error, self._run_of(record)
        fields = {"call": record.name, "timeout": "set" if record.timeout else "none", "strategy.run()": f"{run}"}
        if error is not None:
            said = str(error).removeprefix(f"{record.name}: ")  # the report names the call
            fields["error"] = f"{type(error).__name__}: {said}"
        else:
            fields.update(record.describe())
        if (handled := sys.exc_info()[1]) is not None:  # why a `finally` clause calls, perhaps, what no other rank does
            fields.setdefault("exception", text_of(handled))
        at = record.started_at or line_of_start.get() or Stack.of_walk(walk_program(sys._getframe()))
        fields["line"] = at.place
        waits = self._slow_ranks.report(self.sequence)
        own = CallReport(fields, record.is_last, self._posted, self.notice.own, self._step_exit, waits)
        reports: list[CallReport] = self.all_gather_object(own)
        has_left_alone = is_step_left_by_some(reports)
        if not has_left_alone and all(report.posted == self._posted for report in reports):
            self.notice.decide(report.notice for report in reports)
            self._slow_ranks.take([report.waits for report in reports])
            return
        num_leavers = sum(report.is_last for report in reports)
        if 0 < num_leavers < len(reports):
            self._watchdog.broken = peer_left_error(reports, self.sequence)
            if not record.is_last:
                raise self._watchdog.broken
        if record.is_last:
            return
        self._call_watchdog.recorder.fail()
        if error is not None and not has_left_alone and have_same_kind_of_error(reports):
            mark_shared(error, self.ranks)  # each rank has a text of its own, of which one is printed
            raise error
        if has_left_alone:  # ranks that go on are not in the same step: no later call may pair theirs
            problem = self._watchdog.broken = step_exit_error(reports, self.sequence)
        else:
            problem = mismatch_error([report.fields for report in reports], self.sequence)
            self._note_refusal(problem)
        mark_shared(problem, self.ranks)
        raise problem

    def _note_refusal(self, error: Exception) -> None:
        """Remember an error by a mark in it. A reference to the error would keep all objects of its frames alive."""
        vars(error)["refusal"] = self._last_refusal = object()

    def _is_last_refusal(self, error: BaseException) -> bool:
        return vars(error).get("refusal", self) is self._last_refusal

    def _repeated(self, first: Exception) -> Exception:
        return repeat_of(first, "an earlier call failed: ")
