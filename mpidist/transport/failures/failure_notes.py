"""Notes that ranks send each other when one fails: small messages. No rank waits to send or to read one."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.transport.failures.status_board import Status
from mpidist.transport.mpi.library import Intracomm, is_process_failure, load_mpi
from mpidist.transport.waiting import never_free, poll

__all__ = [
    "BROKE_OFF",
    "CLOSED",
    "ENDED",
    "FOLLOWS",
    "GAVE_UP",
    "LEFT",
    "LOST",
    "RESETS",
    "STALLED",
    "FailureNote",
    "FailureNotes",
]

# The tags of notes: what the rank that writes the note does.
GAVE_UP: Final = 1  # stopped waiting
BROKE_OFF: Final = 2  # broke off in the middle of a call, because of an error of its own
ENDED: Final = 3  # ends, because its program has failed
FOLLOWS: Final = 4  # stopped waiting, because other ranks have given up
STALLED: Final = 5  # has waited for long: asks what ranks of other nodes are doing, or answers that
RESETS: Final = 6  # makes no more calls before the next reset
LEFT: Final = 7  # left the group: an exception of its own left the `with` statement, or reached `close()`
LOST: Final = 8  # has found that processes are gone, and goes on without them
CLOSED: Final = 9  # closed the group after a call had failed: makes no reset any more


@final
class FailureNote(NamedTuple):
    """Note of a rank to the other ranks.

    Attributes:
        tag: `GAVE_UP`, `BROKE_OFF`, `ENDED`, `LEFT`, `LOST`, `FOLLOWS`, `STALLED`, `RESETS` or `CLOSED`.
        sequence: The number of the call that the writer was in; of a writer that left, the number of the last call in
            which it had done its part.
        is_lost: Whether some rank takes part in no call any more.
        lost: The ranks without which the writer cannot do its part, and which it has found to be lost.
        seen: The ranks on the writer's status board.
        statuses: The status of the writer, and of the ranks on its board that it waited for.
        follows: Whether the exception that ends the writer follows the failure of another rank, in another group.
    """

    tag: int
    sequence: int
    text: str
    is_lost: bool
    lost: tuple[int, ...]
    seen: tuple[int, ...]
    statuses: tuple[Status, ...]
    follows: bool = False


@final
class FailureNotes:
    """The notes of the ranks of `comm`, where nothing else is sent from rank to rank: one small message each.

    `sent`: how many notes this rank has sent to each rank.
    """

    def __init__(self, comm: Intracomm) -> None:
        self._comm = comm
        self._any_message = load_mpi().ANY_SOURCE, load_mpi().ANY_TAG
        self._probe = comm.Iprobe
        self.sent = [0] * comm.size
        self._received = [0] * comm.size
        self._under_way: list[tuple[Any, Any]] = []
        weakref.finalize(self, _keep, self._under_way)

    def has_unread(self) -> bool:
        """Whether there is a note to read. Local."""
        try:
            return self._probe(*self._any_message)
        except load_mpi().Exception as error:
            self._acknowledge(error)
            return False

    def read(self) -> list[tuple[int, FailureNote]]:
        """Return the notes that have arrived, each with the rank that wrote it. Local."""
        mpi, found = load_mpi(), []
        status = mpi.Status()
        while (message := self._next(status)) is not None:
            text = np.empty(status.Get_count(mpi.BYTE), np.uint8)
            message.Recv([text, mpi.BYTE])
            self._received[status.Get_source()] += 1
            found.append((status.Get_source(), pickle.loads(text.tobytes())))
        return found

    def drain(self, sent: Sequence[Sequence[int]], check_peers: Callable[[], None]) -> None:
        """Receive all notes that ranks have `sent`: MPI frees no communicator with messages left in it."""
        wanted = [counts[self._comm.rank] for counts in sent]

        def has_all() -> bool:
            self.read()
            return all(received >= sent for received, sent in zip(self._received, wanted, strict=True))

        poll(has_all, check_peers)
        while self._under_way:
            request, _ = self._under_way[-1]
            poll(request.Test, check_peers)
            self._under_way.pop()

    def send(self, note: FailureNote, ranks: Iterable[int]) -> None:
        """Send a note to other ranks. Local: no rank waits until the note is read."""
        text = np.frombuffer(pickle.dumps(note), np.uint8)
        for rank in ranks:
            if rank == self._comm.rank:
                continue
            try:
                self._under_way.append((self._comm.Isend([text, load_mpi().BYTE], rank, note.tag), text))
                self.sent[rank] += 1
            except load_mpi().Exception as error:  # a failed process reads no note
                self._acknowledge(error)

    def _next(self, status: Any) -> Any:
        try:
            return self._comm.Improbe(*self._any_message, status)
        except load_mpi().Exception as error:
            self._acknowledge(error)
            return None

    def _acknowledge(self, error: Exception) -> None:
        """Acknowledge that processes have failed, before which MPI receives from no rank; raise any other error."""
        if not is_process_failure(error):
            raise error
        self._comm.Ack_failed()


def _keep(under_way: list[tuple[Any, Any]]) -> None:
    """Never free the notes that are under way: MPI may still read them."""
    if under_way:
        never_free(tuple(under_way))
