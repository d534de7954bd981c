"""The ranks that do the same as this one in a strategy: in lock step with it, or each at its own pace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from mpidist.transport.agreement.agreement import Call
from mpidist.transport.group.raise_together import LocalWork
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.topology import Topology

__all__ = ["LockStep", "Peers"]


class Peers(ABC):
    """The ranks that do the same as this one, and what they do together: a part of a strategy.

    Attributes:
        topology: These ranks, and their nodes.
        rank: This rank's number among all ranks of the strategy.
        is_chief: Whether this rank writes checkpoints, summaries and progress.
        is_in_lock_step: Whether these are all ranks of the strategy, and make the same calls.
        why_idle: What this rank is that has no replica, and where replicas are; "" for a rank that has some.
    """

    topology: Topology
    rank: int
    is_chief: bool
    is_in_lock_step = False
    why_idle = ""

    def reset(self) -> None:  # noqa: B027
        """Repair the parts outside of the group, or raise an error with the reason. Local."""

    def close(self, error: BaseException | None) -> Exception | None:
        """Close the parts outside of the group; `error` is the exception that leaves the strategy.

        Returns the error of parts that have ended in order, to be raised once the strategy is closed.
        """
        return None

    @abstractmethod
    def meet_peers(self, call: str, error: Exception | None = None) -> None:
        """Wait until all these ranks make a call, and all their changes are carried out.

        An `error` of this rank is raised here, and reported to the others, on which it is an `InvalidArgumentError`.
        """

    @contextmanager
    def raise_together(self, call: str, what: str, advice: str) -> Iterator[None]:
        """Raise an exception of a block, which does `what` for a call, on all these ranks. Collective over them."""
        error: Exception | None = None
        try:
            yield
        except Exception as problem:  # of any kind: the others must learn of it
            error = problem
        self.meet_peers(what, error)


@final
class LockStep(Peers):
    """All ranks of a strategy, which make the same calls of their group. `timeout_seconds` is the strategy's."""

    is_in_lock_step = True

    def __init__(self, group: SyncGroup, timeout_seconds: float | None) -> None:
        self._group, self._timeout_seconds = group, timeout_seconds
        self.topology, self.rank = group.topology, group.topology.rank
        self.is_chief = self.rank == 0

    def meet_peers(self, call: str, error: Exception | None = None) -> None:
        """See `Peers`."""
        self._group.enter(call)
        # A variant makes ranks meet also where calls are not compared.
        self._group.agree(Call.of_fields(call, {}, self._timeout_seconds, error, variant=1))
        self._group.agreement.end()

    @contextmanager
    def raise_together(self, call: str, what: str, advice: str) -> Iterator[None]:
        """See `Peers`, and `LocalWork`."""
        with LocalWork(self._group, call, self._timeout_seconds, what, advice):
            yield
