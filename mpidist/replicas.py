"""Which replicas a rank carries, and how many there are in all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from mpidist.transport import Topology

__all__ = ["Replicas"]


@final
@dataclass(frozen=True)
class Replicas:
    """Which replicas of a strategy this rank carries.

    Attributes:
        ids_here: The ids of the replicas that this rank carries.
        total: Number of replicas on all ranks.
    """

    ids_here: range
    total: int

    @classmethod
    def one_per_rank(cls, topology: Topology) -> Replicas:
        """Let rank r carry replica r alone."""
        return cls(range(topology.rank, topology.rank + 1), topology.size)

    @property
    def has_first(self) -> bool:
        """Whether this rank carries replica 0."""
        return 0 in self.ids_here
