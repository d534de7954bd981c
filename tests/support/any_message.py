"""A rank that waits for a message of any of some ranks, whenever it is sent: no lock step, and no call numbers."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np

from mpidist.transport.failures.failure_notes import FailureNote
from mpidist.transport.failures.status_board import Status, StatusBoard
from mpidist.transport.failures.stragglers import Awaited, Stragglers
from mpidist.transport.failures.watchdog import Watchdog
from mpidist.transport.mpi.library import load_mpi
from mpidist.transport.waiting import poll

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["AnyMessage", "Mailbox"]


@final
class AnyMessage(Awaited):
    """The next message of any of some ranks."""

    given_up = " for another rank"

    def __init__(self, ranks: Collection[int], timeout: float | None) -> None:
        self.ranks, self.timeout = ranks, timeout

    @property
    def name(self) -> str:
        return "receive()"

    def is_late(self, status: Status) -> bool:
        return status.rank in self.ranks

    def is_shared_with(self, status: Status) -> bool:
        return False  # whether another rank waits as well, its status does not say: each one speaks for itself

    def is_ended_by(self, rank: int, note: FailureNote) -> bool:
        """A rank that is awaited has ended, or another rank tells that its process is gone."""
        return rank in self.ranks or any(one.rank in self.ranks and not one.is_able for one in note.statuses)

    def stragglers(
        self, statuses: Mapping[int, Status], seen: Collection[int], hostnames: tuple[str, ...]
    ) -> Stragglers:
        late = {rank: status for rank, status in statuses.items() if self.is_late(status)}
        return Stragglers(late, sorted({*self.ranks} - {*seen}), hostnames, ("has sent nothing", "have sent nothing"))


@final
class Mailbox:
    """Messages from rank to rank, of any objects; a rank that waits for one is watched. Making it is collective.

    Args:
        comm: The ranks.
        nodes: The node of each rank.
        ranks: The ranks that this rank waits for.
        timeout: How long this rank may wait, in seconds; `None` for ever.
        stall_seconds: When to warn of a wait without a deadline.
    """

    def __init__(
        self,
        comm: Intracomm,
        nodes: Collection[int],
        ranks: Collection[int],
        timeout: float | None = None,
        stall_seconds: float = 0.0,
    ) -> None:
        self._comm = comm.Dup()
        own = [*nodes][comm.rank]
        here = [rank for rank, node in enumerate(nodes) if node == own]
        board = StatusBoard(comm.Split(own, comm.rank), here)
        hostnames = tuple(f"host{node}" for node in nodes)
        awaited = AnyMessage(ranks, timeout)
        self.watchdog = Watchdog(awaited, comm.Dup(), board, hostnames, stall_seconds, "Start the job again")

    def send(self, item: object, rank: int) -> None:
        self._comm.Send(np.frombuffer(pickle.dumps(item), np.uint8), rank)

    def receive(self) -> Any:
        """Wait for a message, and return what it holds."""
        self.watchdog.begin()
        poll(self._comm.Iprobe, self.watchdog.check_peers)
        status = load_mpi().Status()
        message = self._comm.Mprobe(status=status)
        text = np.empty(status.Get_count(load_mpi().BYTE), np.uint8)
        message.Recv(text)
        return pickle.loads(text.tobytes())
