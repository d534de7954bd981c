"""Do all ranks make the same call? Asked before data moves, so that a mistake is an error and not a hang.

Each rank describes its call; a fingerprint of the description is compared over all ranks in one small message. Only
when the fingerprints differ are the descriptions themselves exchanged, and then every rank raises the same error.
The message is polled, so that Python's signal handlers run while a rank waits, and a deadline can end the wait.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, NoReturn, final

import numpy as np

from mpidist.errors import DeadlineExceededError, InvalidArgumentError, PeerFailedError
from mpidist.transport.disagreement import peer_left, table_of
from mpidist.transport.mpi import Intracomm, load_mpi
from mpidist.transport.ranks import name_ranks
from mpidist.transport.rounds import MpiRounds, Rounds
from mpidist.transport.waiting import poll

__all__ = ["LEAVE", "Agreement", "Arrival", "Joining", "MpiAgreement", "SoloAgreement", "fingerprint_of"]

LEAVE: Final = "leave"  # the call of a rank that closes its group, or ends its program
_MASK: Final = (1 << 63) - 1

_GAVE_UP: Final = 1  # the tag of the note of a rank that waits no more
_BROKE_OFF: Final = 2  # and of one that had an error of its own in the middle of a call
_NOTE: Final = np.zeros(1, np.uint8)


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
    """

    call: str
    fingerprint: int
    describe: Callable[[], Mapping[str, str]]
    timeout_seconds: float | None = None
    error: Exception | None = None
    placement: int = 0


@final
class Arrival(NamedTuple):
    """A rank's place in a round that it has joined."""

    call: str
    describe: Callable[[], Mapping[str, str]]
    timeout: float | None
    error: Exception | None
    compares: bool = True


class Agreement(ABC):
    """The rule that all ranks of a group make the same calls in the same order."""

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

    @property
    def broken(self) -> Exception | None:
        return None

    def free(self) -> None:
        pass


@final
class MpiAgreement(Agreement):
    """The agreement of MPI ranks. One round per call, and one more when a deadline is set.

    Args:
        comm: A communicator for this object alone, which it frees.
        check: Whether to compare at all. Without it a call with a deadline still waits for all ranks.
        timeout_seconds: The group's own deadline, or `None`.
        rounds: How ranks compare; by default over `comm`.
    """

    def __init__(
        self, comm: Intracomm, check: bool, timeout_seconds: float | None, rounds: Rounds | None = None
    ) -> None:
        comm.Set_name("mpidist.agreement")
        self._comm = comm
        self._rounds = MpiRounds(comm) if rounds is None else rounds
        self._anybody = load_mpi().ANY_SOURCE, load_mpi().ANY_TAG
        self._check = check
        self._timeout_seconds = timeout_seconds
        self._sequence = 0
        self._confirms = False  # whether this call has a second round
        self._found: tuple[bool, bool] | None = None  # by the first round: equal, and of one placement
        self._broken: Exception | None = None
        self._refused: Exception | None = None  # the last error that all ranks raise alike, and may go on after

    def arrive(self, joining: Joining) -> Arrival:
        call, fingerprint, describe, timeout_seconds, error, placement = joining
        if self._broken is not None:
            raise self._again(self._broken)
        self._sequence += 1
        timeout = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        if call == LEAVE:
            timeout = None  # the others may have hours of work of their own left
        meets = self.is_node_barrier or placement != 0  # which is 0 on all ranks, or on none
        if not self._check and not timeout and call != LEAVE and (error is not None or not meets):
            return Arrival(call, describe, timeout, error, compares=False)
        if error is not None:
            fingerprint = fingerprint_of(("error", call, repr(error)))
        if (timeout or call == LEAVE) and self._comm.Iprobe(*self._anybody):
            self._fail(call, timeout)  # before a message is sent that nobody will take: MPI could not end well
        self._found, self._confirms = None, bool(timeout)
        self._rounds.start(fingerprint ^ bool(timeout), placement)
        return Arrival(call, describe, timeout, error)

    def have_all_arrived(self) -> bool:
        if not self._rounds.is_complete():
            return False
        if self._found is None:
            self._found = self._rounds.is_equal()
            if self._confirms and self._found[0]:
                # A rank that comes after others gave up completes the first round, but waits in vain in this one.
                self._rounds.start(0, 0)
                return self._rounds.is_complete()
        return True

    def conclude(self, arrival: Arrival) -> bool:
        call, describe, timeout, error, compares = arrival
        if error is not None:
            self._refused = error
        if not compares:
            if error is not None:
                raise error
            return True
        have_arrived = self.have_all_arrived if self._confirms else self._rounds.is_complete  # the shorter way
        if not have_arrived():
            self._wait(have_arrived, lambda: self._rounds.memory, call, timeout)
        equal, same_placement = self._found or self._rounds.is_equal()
        if not equal and self._check:
            self._explain(call, describe, timeout, error)
        elif not equal and call == LEAVE:
            self._broken = PeerFailedError("other ranks made another call while this one left, or gave up on one")
        if error is not None:
            if self._check:
                vars(error)["raised_on_all_ranks"] = True  # printing it once will do
            raise error
        return same_placement

    @property
    def is_node_barrier(self) -> bool:
        return self._rounds.is_node_barrier

    def require_peers(self) -> bool:
        if self._comm.Iprobe(*self._anybody):
            self._fail("waiting within a call", None)
        return False

    def break_off(self, error: BaseException) -> None:
        if self._broken is None and error is not self._refused:
            self._tell_others(_BROKE_OFF)
            self._broken = RuntimeError(
                f"call {self._sequence} was broken off on rank {self._comm.rank} by {type(error).__name__}: {error}"
            )

    def any_of(self, flags: int) -> int:
        mpi = load_mpi()
        mine, united = np.array([flags], np.int64), np.empty(1, np.int64)
        request = self._comm.Iallreduce(mine, united, mpi.BOR)
        self._wait(request.Test, lambda: (request, mine, united), "any_of")
        return int(united[0])

    def exchange(self, item: Any) -> list[Any]:
        return self._gather(item, "exchange")

    @property
    def broken(self) -> Exception | None:
        return self._broken

    def free(self) -> None:
        self._comm.Free()

    def _gather(self, item: Any, call: str, timeout: float | None = None) -> list[Any]:
        """Bring every rank's picklable item to all ranks. Polled, as everything here: ranks may be gone for ever."""
        text = np.frombuffer(pickle.dumps(item), np.uint8)
        length, lengths = np.array([text.size]), np.empty(self._comm.size, np.int64)
        request = self._comm.Iallgather(length, lengths)
        self._wait(request.Test, lambda: (request, length, lengths), call, timeout)
        sent, received = np.zeros(lengths.max(), np.uint8), np.empty((lengths.size, lengths.max()), np.uint8)
        sent[: text.size] = text
        second = self._comm.Iallgather(sent, received)
        self._wait(second.Test, lambda: (second, sent, received), call, timeout)
        return [pickle.loads(row[:length].tobytes()) for row, length in zip(received, lengths, strict=True)]

    def _wait(
        self, test: Callable[[], bool], memory: Callable[[], tuple[Any, ...]], call: str, timeout: float | None = None
    ) -> None:
        """Wait for all ranks. If they do not come, this group is broken, and MPI may still write `memory`."""
        deadline = time.monotonic() + timeout if timeout else math.inf
        try:
            in_time = poll(test, lambda: time.monotonic() > deadline or self._comm.Iprobe(*self._anybody))
        except BaseException as error:  # Ctrl-C while waiting: the others may see this call completed
            _never_free(memory())
            self._tell_others(_GAVE_UP)
            self._broken = RuntimeError(f"{call} (call {self._sequence}) was interrupted by {type(error).__name__}")
            raise
        if not in_time:
            _never_free(memory())
            self._fail(call, timeout)

    def _fail(self, call: str, timeout: float | None) -> NoReturn:
        """Raise because time is up, or because another rank gave up."""
        gave_up, broke_off = (
            [rank for rank in range(self._comm.size) if self._comm.Iprobe(rank, tag)] for tag in (_GAVE_UP, _BROKE_OFF)
        )
        missing = self._rounds.missing()
        kind: type[Exception] = DeadlineExceededError
        if broke_off:
            kind = PeerFailedError
            reason = f"cannot complete: {name_ranks(broke_off)} broke off in the middle of a call, with an error"
        elif gave_up:
            reason = f"cannot complete: {name_ranks(gave_up)} had given up waiting, for it or for an earlier call"
        else:
            self._tell_others(_GAVE_UP)
            who = f"{name_ranks(missing)} of" if missing else "not all of the"
            reason = (
                f"waited {timeout:g} s, and {who} {self._comm.size} ranks {'did not join' if missing else 'joined'} "
                "it. Every rank must make the same calls in the same order"
            )
        self._broken = kind(
            f"{call} (call {self._sequence}) on rank {self._comm.rank} {reason}. The strategy is unusable until "
            "strategy.reset() is called on all ranks"
        )
        raise self._broken

    def _tell_others(self, tag: int) -> None:
        """Tell the other ranks that this one waits no more, so that none of them waits for it."""
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                _never_free((self._comm.Isend(_NOTE, rank, tag), _NOTE))

    def _explain(
        self, call: str, describe: Callable[[], Mapping[str, str]], timeout: float | None, error: Exception | None
    ) -> None:
        fields = {"call": call, "timeout": "set" if timeout else "none"}
        if error is not None:
            fields["error"] = f"{type(error).__name__}: {error}"
        elif call != LEAVE:
            fields.update(describe())
        everyone = self._gather(fields, call, timeout)
        leavers = [rank for rank, its in enumerate(everyone) if its["call"] == LEAVE]
        if leavers and len(leavers) < len(everyone):
            self._broken = peer_left(everyone, leavers, self._sequence)
            if call == LEAVE:
                return
            raise self._broken
        if call == LEAVE:
            return
        self._refused = problem = InvalidArgumentError(table_of(everyone, self._sequence))
        problem.raised_on_all_ranks = True
        raise problem

    def _again(self, first: Exception) -> Exception:
        return type(first)(f"an earlier call failed, and strategy.reset() was not called since: {first}")


def _never_free(memory: tuple[Any, ...]) -> None:
    """Keep a message that nobody waits for any more, with the memory that MPI may still read and write.

    Python would free it before MPI ends, and mpi4py's requests do not hold the buffers of all collectives.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
