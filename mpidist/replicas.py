"""Which replicas a rank carries, and how many there are in all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from mpidist.transport import Topology

__all__ = ["Replicas"]


@final
@dataclass(frozen=True)
class Replicas:
    """The replicas of a strategy, as one rank sees them.

    Attributes:
        ids_here: The numbers of the replicas that this rank carries.
        total: The number of replicas of all ranks.
    """

    ids_here: range
    total: int

    @classmethod
    def one_per_rank(cls, topology: Topology) -> Replicas:
        """Let each rank carry the replica of its own number."""
        return cls(range(topology.rank, topology.rank + 1), topology.size)

    @property
    def has_first(self) -> bool:
        """Whether this rank carries replica 0."""
        return 0 in self.ids_here
