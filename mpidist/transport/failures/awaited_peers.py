"""The wait for messages that certain ranks send whenever they like: no lock step, and no call numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import final

from mpidist.transport.failures.failure_notes import ENDED, FOLLOWS, GAVE_UP, LEFT, FailureNote
from mpidist.transport.failures.process_state import GONE
from mpidist.transport.failures.status_board import Status
from mpidist.transport.failures.stragglers import Awaited, Stragglers

__all__ = ["AwaitedPeers"]


@final
class AwaitedPeers(Awaited):
    """What a rank waits for that asks other ranks, or that answers them. Its owner sets the attributes before a wait.

    Attributes:
        what: Name of the wait, for people.
        ends_if_any_leaves: Whether the wait ends, too, when a rank leaves that is not awaited.
        dispensable: The ranks that the group goes on without, when they are lost.
        lost: Why each rank is lost that this rank has learnt of. The owner adds to it as well.
        is_ended_by_program: Whether what ended the wait is that a program ended, not that an awaited rank was lost.
    """

    given_up = " for another rank"

    def __init__(self) -> None:
        self.what = ""
        self.ends_if_any_leaves = True
        self.dispensable: Collection[int] = ()
        self.lost: dict[int, str] = {}
        self.is_ended_by_program = False

    @property
    def name(self) -> str:
        return self.what

    def is_late(self, status: Status) -> bool:
        return status.rank in self.ranks

    def is_shared_with(self, status: Status) -> bool:
        return False  # whether another rank waits as well, its status does not say: each one speaks for itself

    def go_on_without(self, gone: Collection[int]) -> list[int]:
        news = [rank for rank in gone if rank in self.dispensable and rank not in self.lost]
        if news:
            self.lost |= dict.fromkeys(news, "its process is gone")
            self.ranks = [rank for rank in self.ranks if rank not in self.lost]
        return news

    def is_ended_by(self, rank: int, note: FailureNote) -> bool:
        if note.tag in (ENDED, LEFT) and rank in self.dispensable:
            self.lost.setdefault(rank, note.text)
            return False
        if note.tag in (ENDED, LEFT):
            ends = note.tag == ENDED or self.ends_if_any_leaves or rank in self.ranks
            self.is_ended_by_program |= ends and not {*self.ranks} & {*note.lost}
            return ends
        is_told_of_loss = any(one.rank in self.ranks and one.process == GONE for one in note.statuses)
        return note.tag in (GAVE_UP, FOLLOWS) and is_told_of_loss

    def stragglers(
        self, statuses: Mapping[int, Status], seen: Collection[int], hostnames: tuple[str, ...]
    ) -> Stragglers:
        late = {rank: status for rank, status in statuses.items() if self.is_late(status)}
        unheard = sorted({*self.ranks} - {*seen})
        return Stragglers(late, unheard, hostnames, ("does not answer", "do not answer"))
