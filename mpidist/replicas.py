"""Which replicas a rank carries, and how many there are in all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from mpidist.transport import ReplicaTree, Topology, shard_bounds

__all__ = ["Replicas"]


@final
@dataclass(frozen=True)
class Replicas:
    """Which replicas of a strategy this rank carries.

    Attributes:
        ids_here: The ids of the replicas that this rank carries.
        total: Number of replicas on all ranks.
        tree: The order in which values of replicas are added, if their number was chosen; `None` if each rank is one
            replica, whose value is bare.
    """

    ids_here: range
    total: int
    tree: ReplicaTree | None = None

    @classmethod
    def one_per_rank(cls, topology: Topology) -> Replicas:
        """Let rank r carry replica r alone."""
        return cls(range(topology.rank, topology.rank + 1), topology.size)

    @classmethod
    def in_blocks(cls, total: int, topology: Topology) -> Replicas:
        """Lay replicas over the ranks in blocks, whose sizes differ by at most one, larger blocks first.

        Args:
            total: Number of replicas, at least the number of ranks.
            topology: The ranks.

        Raises:
            TypeError: If `total` is no whole number.
            ValueError: If there are fewer replicas than ranks.
        """
        if isinstance(total, bool) or not isinstance(total, (int, np.integer)):
            raise TypeError(f"replicas must be a whole number, got {total!r}")
        if total < topology.size:
            raise ValueError(
                f"replicas={total} is too few for {topology.size} ranks, as each rank carries one replica at least; "
                f"start {max(total, 1)} ranks or fewer, or choose replicas={topology.size} or more"
            )
        total = int(total)
        bounds = shard_bounds(total, topology.size)
        ids_here = range(bounds[topology.rank], bounds[topology.rank + 1])
        return cls(ids_here, total, ReplicaTree(tuple(bounds), topology))

    @property
    def has_first(self) -> bool:
        """Whether this rank carries replica 0."""
        return 0 in self.ids_here

    @property
    def num_here(self) -> int:
        """Number of replicas that this rank carries."""
        return len(self.ids_here)
