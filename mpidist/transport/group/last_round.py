"""How ranks wait for each other at the very end of their programs, where some of them may be lost before."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from typing import Any, Final, final

import numpy as np

from mpidist.transport.mpi import Intracomm, is_process_failure, load_mpi
from mpidist.transport.text import name_ranks
from mpidist.transport.waiting import never_free, poll

__all__ = ["LastRound"]

_GONE: Final = 1  # in what a rank says of another one
_CHECK_SECONDS: Final = 0.1
_LOWEST_FIRST_SECONDS: Final = 0.5  # in which the lowest rank ends the job, if it knows what to say, too


@final
class LastRound:
    """One message from each rank to each other one: *I have come to the end, and these processes are gone*.

    No barrier of MPI does: it does not complete without the ranks that are lost.

    Args:
        comm: The ranks. Messages from rank to rank in `comm` are this object's alone.
        gone: Lists the ranks whose processes this rank finds gone. Local.
        stall_seconds: When the lowest rank that waits tells whom it waits for; 0 for never.
        tell: Tells people a line.
    """

    def __init__(
        self,
        comm: Intracomm,
        gone: Callable[[], Collection[int]],
        stall_seconds: float = 0.0,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._comm, self._gone, self._tell = comm, gone, tell
        self._stall_seconds = stall_seconds
        self._tell_at = time.monotonic() + (stall_seconds or math.inf)
        self._lost = set(gone())
        self._known = set(self._lost)  # to all ranks that are not lost: what some rank has told
        self._awaited: dict[int, tuple[Any, Any]] = {}  # the message of each rank that has not come
        self._next_check = 0.0

    def wait(self) -> str | None:
        """Wait for all ranks that are not lost. Collective over those.

        Returns:
            On the lowest rank that is not lost, which ranks are, for people; `None` if none is. On a rank that has
            learnt of a loss later than it sent its messages, too: others may wait for ever, and the job must end.
        """
        own = np.zeros(self._comm.size, np.uint8)
        own[sorted(self._lost)] = _GONE
        for rank in set(range(self._comm.size)) - {self._comm.rank}:
            self._exchange(rank, own)
        poll(self._all_have_come, self._tell_once)
        lost = sorted(self._awaited)
        if not lost:
            return None
        if min(set(range(self._comm.size)) - set(lost)) < self._comm.rank:
            if self._known.issuperset(lost):
                return None
            time.sleep(_LOWEST_FIRST_SECONDS)
        what, was = ("process", "was") if len(lost) == 1 else ("processes", "were")
        return f"the {what} of {name_ranks(lost)} of {self._comm.size} ranks {was} lost before; all others are done"

    def _exchange(self, rank: int, own: Any) -> None:
        byte, memory = load_mpi().BYTE, np.zeros_like(own)
        try:
            self._awaited[rank] = self._comm.Irecv([memory, byte], rank), memory
            never_free((own, memory, self._awaited[rank], self._comm.Isend([own, byte], rank)))
        except load_mpi().Exception as error:
            self._lose(rank, error)

    def _all_have_come(self) -> bool:
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + _CHECK_SECONDS
            self._lost.update(self._gone())  # before the messages are tested: who has come counts
        for rank, (request, memory) in list(self._awaited.items()):
            try:
                if request is not None and request.Test():
                    del self._awaited[rank]
                    told = np.flatnonzero(memory).tolist()
                    self._lost.update(told)
                    self._known.update(told)
            except load_mpi().Exception as error:
                self._lose(rank, error)
        return self._lost.issuperset(self._awaited)

    def _tell_once(self) -> None:
        """Tell people whom the ranks that are done wait for; the lowest of these ranks does."""
        if time.monotonic() < self._tell_at:
            return
        self._tell_at = math.inf
        late = sorted(set(self._awaited) - self._lost)
        if late and self._lost.union(late).issuperset(range(self._comm.rank)):
            self._tell(
                f"has come to its end, and has waited {self._stall_seconds:g} s for {name_ranks(late)} of "
                f"{self._comm.size} ranks to come to theirs; it waits on while their processes live"
            )

    def _lose(self, rank: int, error: Exception) -> None:
        if not is_process_failure(error):
            raise error
        self._lost.add(rank)
        self._awaited[rank] = None, None
