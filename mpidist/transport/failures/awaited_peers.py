"""Waits outside of lock step: for messages that certain ranks send at any time, without call numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import final

from mpidist.transport.failures.failure_notes import ENDED, FOLLOWS, GAVE_UP, LEFT, FailureNote
from mpidist.transport.failures.status_board import GONE, Status
from mpidist.transport.failures.stragglers import Awaited, Stragglers

__all__ = ["AwaitedPeers"]


@final
class AwaitedPeers(Awaited):
    """Waits of a rank that sends requests to other ranks, or answers them: `begin` starts and describes one.

    Attributes:
        ends_if_any_leaves: Whether the wait also ends when a rank leaves that is not awaited.
        dispensable: The ranks without which the group continues when they are lost.
        lost: Ranks that this rank has found lost -> why each is lost. The owner adds to it as well.
        serving: What an awaited rank is in, by its flight recorder, while it waits for other ranks in its turn, and
            warns of them; `None` where it does not.
        busy_seconds: How long that rank may show no sign of life at least, as on a busy machine.
        is_ended_by_program: Whether the wait ended because a program ended or gave up, and no awaited rank was lost.
    """

    # A status does not tell whether another rank waits for the same: `is_shared_with` stays False.
    given_up = " for another rank"
    busy_seconds = 10.0

    def __init__(self) -> None:
        self.what = ""
        self.ends_if_any_leaves = True
        self.dispensable: Collection[int] = ()
        self.lost: dict[int, str] = {}
        self.serving: str | None = None
        self.is_ended_by_program = False

    def begin(self, what: str, ranks: Collection[int], timeout: float | None, serving: str | None = None) -> None:
        """Begin a wait for these ranks, with the attributes that describe it. Local."""
        self.what, self.ranks, self.timeout, self.serving = what, ranks, timeout, serving
        self.is_ended_by_program = False

    def end(self, rank: int) -> None:
        """Await a rank no longer. Local."""
        self.ranks = [other for other in self.ranks if other != rank]

    @property
    def name(self) -> str:
        return self.what

    def is_late(self, status: Status) -> bool:
        return status.rank in self.ranks

    def go_on_without(self, gone: Collection[int]) -> list[int]:
        newly_lost = [rank for rank in gone if rank in self.dispensable and rank not in self.lost]
        if newly_lost:
            self.lost |= dict.fromkeys(newly_lost, "its process is gone")
            self.ranks = [rank for rank in self.ranks if rank not in self.lost]
        return newly_lost

    def is_ended_by(self, rank: int, note: FailureNote) -> bool:
        if note.tag in (ENDED, LEFT) and rank in self.dispensable:
            self.lost.setdefault(rank, note.text)
            return False
        if note.tag in (ENDED, LEFT):
            ends = note.tag == ENDED or self.ends_if_any_leaves or rank in self.ranks
            self.is_ended_by_program |= ends and not {*self.ranks} & {*note.lost}
            return ends
        if note.tag not in (GAVE_UP, FOLLOWS):
            return False
        # A rank that has given up because of a lost one answers no more.
        is_given_up = note.is_lost and rank in self.ranks and rank not in self.dispensable
        self.is_ended_by_program |= is_given_up
        return is_given_up or any(one.rank in self.ranks and one.process == GONE for one in note.statuses)

    def is_warned_of(self, late: Stragglers, stall_seconds: float) -> bool:
        return (
            self.serving is not None
            and not late.unheard
            and all(
                status.is_able
                and status.last is not None
                and status.last.call == self.serving
                and status.seconds < max(stall_seconds, self.busy_seconds)
                for status in late.known.values()
            )
        )

    def stragglers(
        self, statuses: Mapping[int, Status], seen: Collection[int], hostnames: tuple[str, ...]
    ) -> Stragglers:
        late = {rank: status for rank, status in statuses.items() if self.is_late(status)}
        unheard = sorted({*self.ranks} - {*seen})
        return Stragglers(late, unheard, hostnames, ("does not answer", "do not answer"))
