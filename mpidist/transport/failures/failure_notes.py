"""Notes that ranks leave for each other, read by whoever waits. No rank is waited for to read or write one."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.transport.failures.status_board import Status
from mpidist.transport.mpi import Intracomm, load_mpi
from mpidist.transport.waiting import never_free, poll

__all__ = ["BROKE_OFF", "ENDED", "FOLLOWS", "GAVE_UP", "LEFT", "RESETS", "STALLED", "FailureNote", "FailureNotes"]

GAVE_UP: Final = 1  # tags, of what the writer does: it waits no more
BROKE_OFF: Final = 2  # it had an error of its own in the middle of a call
ENDED: Final = 3  # its program has failed
FOLLOWS: Final = 4  # it waits no more, because other ranks have given up
STALLED: Final = 5  # still waiting: asks other nodes what their ranks are doing, or answers
LEFT: Final = 7  # an exception of its own left the strategy's `with` statement, or was under way in `close()`
RESETS: Final = 6  # it makes no call any more before the next reset


@final
class FailureNote(NamedTuple):
    """What a rank tells the others.

    Attributes:
        tag: `GAVE_UP`, `BROKE_OFF`, `ENDED`, `LEFT`, `FOLLOWS`, `STALLED` or `RESETS`.
        sequence: The number of the call that it was in.
        text: What happened, for people.
        is_lost: Whether it knows of a rank that will never come.
        seen: The ranks that it sees on its node.
        statuses: What it was doing, and those of them that it waited for.
    """

    tag: int
    sequence: int
    text: str
    is_lost: bool
    seen: tuple[int, ...]
    statuses: tuple[Status, ...]


@final
class FailureNotes:
    """The notes of a communicator's ranks: one small message each.

    Args:
        comm: The ranks. Its messages from rank to rank are all notes.

    Attributes:
        sent: How many notes this rank has left for each rank.
    """

    def __init__(self, comm: Intracomm) -> None:
        self._comm = comm
        self._anybody = load_mpi().ANY_SOURCE, load_mpi().ANY_TAG
        self._probe = comm.Iprobe
        self.sent = [0] * comm.size
        self._received = [0] * comm.size
        self._under_way: list[tuple[Any, Any]] = []
        weakref.finalize(self, _keep, self._under_way)

    def has_unread(self) -> bool:
        """Whether there is one to read. Local."""
        return self._probe(*self._anybody)

    def read(self) -> list[tuple[int, FailureNote]]:
        """Read what has come, with the ranks that wrote it. Local."""
        mpi, found = load_mpi(), []
        status = mpi.Status()
        while (message := self._comm.Improbe(*self._anybody, status)) is not None:
            text = np.empty(status.Get_count(mpi.BYTE), np.uint8)
            message.Recv([text, mpi.BYTE])
            self._received[status.Get_source()] += 1
            found.append((status.Get_source(), pickle.loads(text.tobytes())))
        return found

    def drain(self, sent: Sequence[Sequence[int]], check_peers: Callable[[], None]) -> None:
        """Wait until all notes are here that were ever sent: MPI frees no communicator with messages left in it.

        Args:
            sent: [ranks], what each rank has `sent`; none of them sends any more.
            check_peers: As in `waiting.poll`.
        """
        wanted = [counts[self._comm.rank] for counts in sent]

        def has_all() -> bool:
            self.read()
            return self._received == wanted

        poll(has_all, check_peers)
        while self._under_way:
            request, _ = self._under_way[-1]
            poll(request.Test, check_peers)
            self._under_way.pop()

    def send(self, note: FailureNote, ranks: Iterable[int]) -> None:
        """Leave a note for other ranks. Local: nobody waits for it to be read."""
        text = np.frombuffer(pickle.dumps(note), np.uint8)
        for rank in ranks:
            if rank != self._comm.rank:
                self._under_way.append((self._comm.Isend([text, load_mpi().BYTE], rank, note.tag), text))
                self.sent[rank] += 1


def _keep(under_way: list[tuple[Any, Any]]) -> None:
    """Leave what nobody waits for any more to MPI, which may still read it."""
    if under_way:
        never_free(tuple(under_way))
