"""Awaited ranks of a wait, the late ones of them, and the text of an error about these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple, final

from mpidist.transport.failures.failure_notes import FailureNote
from mpidist.transport.failures.status_board import GONE, STOPPED, Status
from mpidist.transport.text import group_ranks, name_ranks

__all__ = ["Awaited", "Stragglers"]

_MAX_LINES: Final = 8


@final
class Stragglers(NamedTuple):
    """The ranks that are late.

    Attributes:
        known: Late ranks whose status is known -> the status.
        unheard: The late ranks whose status is unknown: those of nodes that did not answer.
        fault: What a late rank whose process runs does or did not do: the verb for one rank, and for several.
        advice: What a program must do so that no rank is late, as a sentence without its full stop; may be empty.
    """

    known: Mapping[int, Status]
    unheard: Sequence[int]
    hostnames: Sequence[str]
    fault: tuple[str, str] = ("did not join it", "did not join it")
    advice: str = ""

    @property
    def ranks(self) -> list[int]:
        """All late ranks, in order."""
        return sorted([*self.known, *self.unheard])

    @property
    def gone(self) -> list[int]:
        """The late ranks whose processes are gone."""
        return sorted(rank for rank, status in self.known.items() if status.process == GONE)

    @property
    def stopped(self) -> list[int]:
        """The late ranks whose processes are stopped."""
        return sorted(rank for rank, status in self.known.items() if status.process == STOPPED)

    @property
    def absent(self) -> list[int]:
        """The late ranks whose processes run, or are unknown."""
        return sorted({*self.ranks} - {*self.stopped, *self.gone})

    def sentence(self) -> str:
        """Name the ranks that are late, and how."""
        size = len(self.hostnames)
        if self.gone:
            what, is_ = ("process", "is") if len(self.gone) == 1 else ("processes", "are")
            return f"the {what} of {name_ranks(self.gone)} of {size} ranks {is_} gone"
        if not self.ranks:
            return f"all {size} ranks joined it, but its data did not come in time"
        texts = []
        if self.absent:
            texts.append(f"{name_ranks(self.absent)} of {size} ranks {_verb(self.absent, *self.fault)}")
        if self.stopped:
            texts.append(f"{name_ranks(self.stopped)} of {size} ranks {_verb(self.stopped, 'is', 'are')} stopped")
        return ", and ".join(texts)

    def lines(self) -> list[str]:
        """Describe the last call of each late rank; of many ranks, only the first ones."""
        lines = [f"rank {rank}: {self.known[rank]}" for rank in sorted(self.known)[:_MAX_LINES]]
        if len(self.known) > _MAX_LINES:
            lines.append(f"... and {len(self.known) - _MAX_LINES} ranks more")
        hosts = group_ranks({rank: self.hostnames[rank] for rank in self.unheard})
        for host, ranks in list(hosts.items())[:_MAX_LINES]:
            lines.append(f"{name_ranks(ranks)}: nothing was heard from host {host}")
        if len(hosts) > _MAX_LINES:
            lines.append(f"... and nothing from {len(hosts) - _MAX_LINES} hosts more")
        return lines


class Awaited(ABC):
    """Wait of a rank: lists for a `Watchdog` the ranks that are awaited, and the late ones of them.

    Attributes:
        ranks: The awaited ranks: the wait fails when the process of one of them is gone.
        timeout: How long this rank may wait, in seconds; `None` or 0 for ever.
        sequence: The number of the call in which this rank waits; 0 where calls have no numbers.
        lost: The lost ranks without which this rank cannot do its part.
        is_last: Whether the group is closed with this wait, so that a failure cannot be reset.
        given_up: The end of the sentence "... had given up waiting": what those ranks had waited for.
    """

    ranks: Collection[int] = ()
    timeout: float | None = None
    sequence = 0
    lost: Collection[int] = ()
    is_last = False
    given_up = ""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name the wait, for people: `reduce (call 7)`."""

    @abstractmethod
    def is_late(self, status: Status) -> bool:
        """Whether a rank of this node has yet to do the awaited part."""

    def is_shared_with(self, status: Status) -> bool:
        """Whether a rank of this node waits for the same: then one of these ranks notifies other nodes for all."""
        return False

    @abstractmethod
    def is_ended_by(self, rank: int, note: FailureNote) -> bool:
        """Whether a failure note of another rank ends this wait."""

    def go_on_without(self, gone: Collection[int]) -> list[int]:
        """Stop waiting for gone ranks, where the group continues without them; return those newly found lost."""
        return []

    def is_warned_of(self, late: Stragglers, stall_seconds: float) -> bool:
        """Whether another rank warns of this wait, because it has better data on the awaited ranks.

        A rank that has shown no sign of life for `stall_seconds` warns of nothing.
        """
        return False

    @abstractmethod
    def stragglers(
        self, statuses: Mapping[int, Status], seen: Collection[int], hostnames: tuple[str, ...]
    ) -> Stragglers:
        """Pick the late ranks. `seen`: the ranks of this node, and of nodes that have sent notes."""


def _verb(ranks: Sequence[int], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several
