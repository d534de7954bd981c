"""The barrier of all ranks at the very end of their programs, which completes also if some of them are lost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from typing import Any, Final, final

import numpy as np

from mpidist.transport.mpi.library import Intracomm, is_process_failure, load_mpi
from mpidist.transport.text import name_ranks
from mpidist.transport.waiting import never_free, poll

__all__ = ["ExitBarrier"]

_GONE: Final = 1  # in a message: that a rank is gone
_CHECK_SECONDS: Final = 0.005
_LOWEST_FIRST_SECONDS: Final = 0.5  # how long the lowest rank may take to end the job, if it knows of the loss as well


@final
class ExitBarrier:
    """One message from each rank to each other one: *I have come to the end, and these processes are gone*.

    A barrier of MPI does not complete without the ranks that are lost.

    Args:
        comm: The ranks. Messages from rank to rank in `comm` are this object's alone.
        found_gone: Lists the ranks whose processes were found gone, in repeated calls. Local.
        stall_seconds: After which time the lowest rank that waits reports which ranks it waits for; 0 for never.
        lost: Ranks that are gone now.
        places_of: Says where some ranks of this node are in their programs.
    """

    def __init__(
        self,
        comm: Intracomm,
        found_gone: Callable[[], Collection[int]],
        stall_seconds: float = 0.0,
        write_line: Callable[[str], None] = lambda line: None,
        lost: Collection[int] = (),
        places_of: Callable[[Collection[int]], str] = lambda ranks: "",
        place: str = "its end",
    ) -> None:
        self._comm, self._found_gone, self._write_line = comm, found_gone, write_line
        self._stall_seconds, self._places_of, self._place = stall_seconds, places_of, place
        self._warn_at = time.monotonic() + (stall_seconds or math.inf)
        self._lost = {*found_gone(), *lost}
        self._told = set(self._lost)  # the lost ranks that some message names, so that all other ranks know of them
        self._awaited: dict[int, tuple[Any, Any]] = {}  # by rank: the request and the memory of its message
        self._next_check = 0.0

    def wait(self) -> str | None:
        """Wait for all ranks that are not lost; return why the job must end if ranks are lost. Collective over those.

        The lowest rank that is not lost gets the text. So does a rank that has noticed a loss after it sent its
        messages: other ranks may not have noticed the loss and wait for ever. Others get an empty one: Open MPI with
        ULFM does not always end them with the lowest one, and their MPI_Finalize would wait for the lost ranks.
        """
        own = np.zeros(self._comm.size, np.uint8)
        own[sorted(self._lost)] = _GONE
        for rank in set(range(self._comm.size)) - {self._comm.rank}:
            self._exchange(rank, own)
        poll(self._have_all_arrived, self._warn_once)
        lost = sorted(self._awaited)
        if not lost:
            return None
        if min(set(range(self._comm.size)) - set(lost)) < self._comm.rank:
            if self._told.issuperset(lost):
                return ""
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

    def _have_all_arrived(self) -> bool:
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + _CHECK_SECONDS
            # Before messages are tested: a rank whose message has arrived is not lost.
            self._lost.update(self._found_gone())
        for rank, (request, memory) in list(self._awaited.items()):
            try:
                if request is not None and request.Test():
                    del self._awaited[rank]
                    named = np.flatnonzero(memory).tolist()
                    self._lost.update(named)
                    self._told.update(named)
            except load_mpi().Exception as error:
                self._lose(rank, error)
        return self._lost.issuperset(self._awaited)

    def _warn_once(self) -> None:
        """Report which ranks are awaited, on the lowest rank that waits."""
        if time.monotonic() < self._warn_at:
            return
        self._warn_at = math.inf
        late = sorted(set(self._awaited) - self._lost)
        if late and self._lost.union(late).issuperset(range(self._comm.rank)):
            self._write_line(
                f"has come to {self._place}, and has waited {self._stall_seconds:g} s for {name_ranks(late)} of "
                f"{self._comm.size} ranks to come there{self._places_of(late)}; it waits on while their processes live"
            )

    def _lose(self, rank: int, error: Exception) -> None:
        if not is_process_failure(error):
            raise error
        self._lost.add(rank)
        self._awaited[rank] = None, None
