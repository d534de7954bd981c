"""The agreement of MPI ranks: one round of comparison per call, and one more when a deadline is set."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, final

import numpy as np

from mpidist.errors import DeadlineExceededError, PeerFailedError
from mpidist.transport.agreement.agreement import Agreement, CallRecord
from mpidist.transport.agreement.comparison_rounds import MpiRounds, Rounds
from mpidist.transport.agreement.mismatch_report import differing, have_same_kind_of_error, peer_left
from mpidist.transport.failures import BROKE_OFF, Watchdog
from mpidist.transport.fingerprint import fingerprint_of
from mpidist.transport.mpi import Intracomm, load_mpi, ranks_in_world
from mpidist.transport.shared_errors import is_shared_by, mark_shared
from mpidist.transport.text import text_of
from mpidist.transport.waiting import never_free, poll

__all__ = ["MpiAgreement"]


@final
class MpiAgreement(Agreement):
    """The agreement of MPI ranks.

    Args:
        comm: A communicator for this object and its watch alone, which it frees.
        watch: Looks after those that this rank waits for.
        check: Whether to compare calls that need no round otherwise. A call with a deadline still waits for all ranks,
            and ranks of one node meet in their barrier, which compares for nothing.
        timeout_seconds: The group's own deadline, or `None`.
        rounds: How ranks compare; by default over `comm`.
        sequence: The number of the last call before this object was made.
    """

    def __init__(
        self,
        comm: Intracomm,
        watch: Watchdog,
        check: bool = True,
        timeout_seconds: float | None = None,
        rounds: Rounds | None = None,
        sequence: int = 0,
    ) -> None:
        super().__init__(watch.recorder.end, watch.check_peers, ranks_in_world(comm))
        comm.Set_name("mpidist.agreement")
        self._comm = comm
        self._watch = watch
        self._rounds = MpiRounds(comm) if rounds is None else rounds
        self._has_round_for_all = check or self.is_node_barrier
        self._timeout_seconds = timeout_seconds
        self.sequence = sequence
        self._confirms = False  # whether this call has a second round
        self._found: tuple[bool, bool] | None = None  # by the first round: equal, and of one variant
        self._refused: Exception | None = None  # the last error that all ranks raise alike, and may go on after
        self._note_agreed = watch.recorder.agree

    def arrive(self, record: CallRecord) -> None:
        watch = self._watch
        if watch.broken is not None:
            raise self._again(watch.broken)
        self.sequence += 1
        timeout = self._timeout_seconds if record.timeout_seconds is None else record.timeout_seconds
        record.timeout = timeout
        watch.begin(self.sequence, record.name, record.details, timeout, record.leaves)
        if not self._has_round_for_all and not self._needs_round(record):
            record.is_compared = False
            return
        error, fingerprint = record.error, record.fingerprint
        if error is not None:
            fingerprint = fingerprint_of(("error", record.name, repr(error)))
        if timeout or record.leaves:
            watch.require_no_notes()  # before a message is sent that nobody will take: MPI could not end well
        self._found, self._confirms = None, bool(timeout)
        self._rounds.start(fingerprint ^ bool(timeout), record.variant)

    def _needs_round(self, record: CallRecord) -> bool:
        """Whether ranks meet before a call although nobody wants them to compare what they pass."""
        if record.leaves:
            return True
        if record.error is not None:  # the other ranks may move data at once: only a note can reach them
            self.break_off(record.error)
            return False
        return bool(record.timeout) or record.variant != 0  # which is 0 on all ranks, or on none

    def have_all_arrived(self) -> bool:
        if not self._rounds.is_complete():
            return False
        if self._found is None:
            self._found = self._rounds.is_equal()
            if self._confirms and self._found[0]:
                self._watch.meet()
                # A rank that comes after others gave up completes the first round, but waits in vain in this one.
                self._rounds.start(0, 0)
                return self._rounds.is_complete()
        return True

    def is_alike(self, record: CallRecord) -> bool:
        return not record.is_compared or (self._found or self._rounds.is_equal())[0]

    def conclude(self, record: CallRecord) -> bool:
        error = record.error
        if error is not None:
            self._refused = error
        if not record.is_compared:
            if error is not None:
                self._watch.recorder.fail()
                raise error
            self._note_agreed()
            return True
        have_arrived = self.have_all_arrived if self._confirms else self._rounds.is_complete  # the shorter way
        if not have_arrived():
            if self._watch.broken is not None:  # by an earlier call, that this rank waited for meanwhile
                raise self._again(self._watch.broken)
            self._watch.limit(record.timeout)
            self._wait(have_arrived, lambda: self._rounds.memory, record.name)
        equal, same_variant = self._found or self._rounds.is_equal()
        if not equal:
            self._explain(record)
        if error is not None:
            self._watch.recorder.fail()
            mark_shared(error, self.ranks)
            raise error
        self._note_agreed()
        return same_variant

    @property
    def is_node_barrier(self) -> bool:
        return self._rounds.is_node_barrier

    def break_off(self, error: BaseException) -> None:
        self._watch.recorder.fail()
        goes_on_alike = error is self._refused or is_shared_by(error, self.ranks)
        if self.broken is None and not goes_on_alike:
            self._watch.tell(BROKE_OFF, text_of(error), is_lost=True)
            self._watch.broken = RuntimeError(
                f"call {self.sequence} was broken off on rank {self._comm.rank} by {text_of(error)}"
            )

    def has_raised(self, error: BaseException) -> bool:
        return self.broken is not None or error is self._refused

    def all_reduce_or(self, flags: int) -> int:
        mine, united = np.array([flags], np.int64), np.empty(1, np.int64)
        request = self._comm.Iallreduce(mine, united, load_mpi().BOR)
        self._wait(request.Test, lambda: (request, mine, united), "all_reduce_or")
        return int(united[0])

    def all_gather_object(self, item: Any) -> list[Any]:
        """See `Agreement.all_gather_object`. Polled, as everything here: ranks may be gone for ever."""
        text = np.frombuffer(pickle.dumps(item), np.uint8)
        length, lengths = np.array([text.size]), np.empty(self._comm.size, np.int64)
        request = self._comm.Iallgather(length, lengths)
        self._wait(request.Test, lambda: (request, length, lengths), "all_gather_object")
        sent, received = np.zeros(lengths.max(), np.uint8), np.empty((lengths.size, lengths.max()), np.uint8)
        sent[: text.size] = text
        second = self._comm.Iallgather(sent, received)
        self._wait(second.Test, lambda: (second, sent, received), "all_gather_object")
        return [pickle.loads(row[:length].tobytes()) for row, length in zip(received, lengths, strict=True)]

    def restart_clock(self, since: float | None = None, record: CallRecord | None = None) -> None:
        self._watch.restart(since)
        if record is not None:
            self._watch.limit(record.timeout)

    @property
    def broken(self) -> Exception | None:
        return self._watch.broken

    def free(self) -> None:
        notes = self._watch.stop_answering()
        if self.all_reduce_or(any(notes.sent)):  # long waits that ended well
            notes.take(self.all_gather_object(notes.sent), self._watch.check_peers)
        self._comm.Free()

    def _wait(self, test: Callable[[], bool], memory: Callable[[], tuple[Any, ...]], call: str) -> None:
        """Wait for all ranks. If they do not come, this group is broken, and MPI may still write `memory`."""
        try:
            poll(test, self._watch.check_peers)
        except BaseException as error:
            never_free(memory())
            if isinstance(error, (DeadlineExceededError, PeerFailedError)):
                raise
            # Ctrl-C while waiting: the others may see this call completed
            self._watch.tell(BROKE_OFF, text_of(error), is_lost=True)
            self._watch.broken = RuntimeError(
                f"{call} (call {self.sequence}) was interrupted by {type(error).__name__}"
            )
            raise

    def _explain(self, record: CallRecord) -> None:
        """Raise what all ranks raise whose calls differ; ranks that leave raise nothing. Collective."""
        error = record.error
        fields = {"call": record.name, "timeout": "set" if record.timeout else "none"}
        if error is not None:
            fields["error"] = f"{type(error).__name__}: {error}"
        else:
            fields.update(record.describe())
        told = self.all_gather_object((record.leaves, fields))
        everyone = [fields for _, fields in told]
        leavers = [rank for rank, (leaves, _) in enumerate(told) if leaves]
        if leavers and len(leavers) < len(everyone):
            self._watch.broken = peer_left(everyone, leavers, self.sequence)
            if not record.leaves:
                raise self._watch.broken
        if record.leaves:
            return
        self._watch.recorder.fail()
        if error is not None and have_same_kind_of_error(everyone):
            mark_shared(error, self.ranks)  # in the words of each rank: printing one will do
            raise error
        self._refused = problem = differing(everyone, self.sequence)
        mark_shared(problem, self.ranks)
        raise problem

    def _again(self, first: Exception) -> Exception:
        return type(first)(f"an earlier call failed, and strategy.reset() was not called since: {first}")
