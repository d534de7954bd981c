"""Who keeps the others waiting, and what people are told about it."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Final, NamedTuple, final

from mpidist.transport.failures.process_state import GONE, STOPPED
from mpidist.transport.failures.status_board import Status
from mpidist.transport.text import name_ranks

__all__ = ["Stragglers"]

_MAX_LINES: Final = 8


@final
class Stragglers(NamedTuple):
    """The ranks that a call waits for.

    Attributes:
        known: What those ranks were doing of which somebody knows.
        unheard: The ranks that nobody knows anything of: those of nodes that did not answer.
        hostnames: The host of each rank.
    """

    known: Mapping[int, Status]
    unheard: Sequence[int]
    hostnames: Sequence[str]

    @classmethod
    def of(
        cls,
        sequence: int,
        statuses: Mapping[int, Status],
        seen: Container[int],
        hostnames: Sequence[str],
        is_agreed: bool = False,
    ) -> Stragglers:
        """Pick the ranks that have not come to a call, or cannot do their part in it.

        Args:
            sequence: The number of the call.
            statuses: What is known, of any ranks.
            seen: The ranks that somebody sees who has told what ranks have not come.
            hostnames: The host of each rank.
            is_agreed: Whether all have come: then those that started it, and do not look after it, keep the others.
        """
        known = {rank: status for rank, status in statuses.items() if not status.has_joined(sequence)}
        if is_agreed and not known:
            known = {rank: status for rank, status in statuses.items() if status.is_waiting_in(sequence)}
        return cls(known, [rank for rank in range(len(hostnames)) if rank not in seen], hostnames)

    @property
    def ranks(self) -> list[int]:
        """All of them, in order."""
        return sorted([*self.known, *self.unheard])

    @property
    def gone(self) -> list[int]:
        """Those whose processes are gone."""
        return sorted(rank for rank, status in self.known.items() if status.process == GONE)

    @property
    def stopped(self) -> list[int]:
        """Those whose processes are stopped."""
        return sorted(rank for rank, status in self.known.items() if status.process == STOPPED)

    @property
    def absent(self) -> list[int]:
        """Those that run, or that nobody knows of, and do not come."""
        return sorted({*self.ranks} - {*self.stopped, *self.gone})

    def sentence(self, is_agreed: bool) -> str:
        """Say which ranks these are, and what they do not do.

        Args:
            is_agreed: Whether all ranks have come to the call, and some do not go on.
        """
        size = len(self.hostnames)
        if self.gone:
            what, is_ = ("process", "is") if len(self.gone) == 1 else ("processes", "are")
            return f"the {what} of {name_ranks(self.gone)} of {size} ranks {is_} gone"
        if not self.ranks:
            return f"all {size} ranks joined it, but its data did not come in time"
        texts = []
        if self.absent:
            lack = _verb(self.absent, "does not get on", "do not get on") if is_agreed else "did not join it"
            texts.append(f"{name_ranks(self.absent)} of {size} ranks {lack}")
        if self.stopped:
            texts.append(f"{name_ranks(self.stopped)} of {size} ranks {_verb(self.stopped, 'is', 'are')} stopped")
        return ", and ".join(texts)

    def lines(self) -> list[str]:
        """Say of each rank what it did last; of many, only the first ones."""
        lines = [f"rank {rank}: {self.known[rank]}" for rank in sorted(self.known)[:_MAX_LINES]]
        if len(self.known) > _MAX_LINES:
            lines.append(f"... and {len(self.known) - _MAX_LINES} ranks more")
        hosts: dict[str, list[int]] = {}
        for rank in self.unheard:
            hosts.setdefault(self.hostnames[rank], []).append(rank)
        for host, ranks in list(hosts.items())[:_MAX_LINES]:
            lines.append(f"{name_ranks(ranks)}: nothing was heard from host {host}")
        if len(hosts) > _MAX_LINES:
            lines.append(f"... and nothing from {len(hosts) - _MAX_LINES} hosts more")
        return lines


def _verb(ranks: Sequence[int], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several
