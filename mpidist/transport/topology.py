"""The ranks of a group, and their nodes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from mpidist.transport.text import count_text, group_ranks, name_ranks

__all__ = ["Topology"]


@final
@dataclass(frozen=True)
class Topology:
    """The node of each rank. A node is a set of ranks that share memory.

    Args:
        rank: This rank in the group.
        node_of_rank: The node of each rank. Nodes are numbered in order of first appearance by rank.
        hostnames: The host name of each rank.
        cache_of_rank: A name for the last-level cache of each rank's processors; "" if they share none.
    """

    rank: int
    node_of_rank: tuple[int, ...]
    hostnames: tuple[str, ...]
    cache_of_rank: tuple[str, ...] = ()

    @classmethod
    def from_labels(
        cls, rank: int, labels: Sequence[Hashable], hostnames: Sequence[str], caches: Sequence[str] = ()
    ) -> Topology:
        """Make a topology from a label of each rank's node, numbering the nodes in order of first appearance."""
        numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
        return cls(rank, tuple(numbers[label] for label in labels), tuple(hostnames), tuple(caches))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.node_of_rank)

    @property
    def node(self) -> int:
        """This rank's node."""
        return self.node_of_rank[self.rank]

    @cached_property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return max(self.node_of_rank) + 1

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, in order."""
        return tuple(map(tuple, group_ranks(dict(enumerate(self.node_of_rank))).values()))

    @cached_property
    def node_sizes(self) -> tuple[int, ...]:
        """Number of ranks of each node."""
        return tuple(len(ranks) for ranks in self.nodes)

    @cached_property
    def local_ranks(self) -> tuple[int, ...]:
        """The index of each rank among the ranks of its node."""
        place_of = {rank: place for ranks in self.nodes for place, rank in enumerate(ranks)}
        return tuple(place_of[rank] for rank in range(self.size))

    @property
    def local_rank(self) -> int:
        """The index of this rank among the ranks of its node."""
        return self.local_ranks[self.rank]

    @property
    def local_size(self) -> int:
        """Number of ranks on this rank's node."""
        return self.node_sizes[self.node]

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the first of its node."""
        return self.local_rank == 0

    @cached_property
    def cache_groups(self) -> tuple[tuple[int, ...], ...]:
        """The local ranks of this rank's node, by the cache that they share; `()` unless there are several of each.

        And of each group more than half as many ranks as of any other: those that not every group has do not add.
        """
        if not self.cache_of_rank:
            return ()
        caches = {local: self.cache_of_rank[rank] for local, rank in enumerate(self.nodes[self.node])}
        groups = group_ranks(caches)
        sizes = [len(ranks) for ranks in groups.values()]
        is_worth_it = "" not in groups and len(groups) > 1 and 1 < max(sizes) < 2 * min(sizes)
        return tuple(map(tuple, groups.values())) if is_worth_it else ()

    @cached_property
    def is_even(self) -> bool:
        """Whether all nodes have equally many ranks."""
        return len(set(self.node_sizes)) == 1

    @property
    def node_name(self) -> str:
        """This rank's node and its host, for people."""
        return self._name_of(self.node)

    def _name_of(self, node: int) -> str:
        return f"node {node} ({self.hostnames[self.nodes[node][0]]})"

    def __str__(self) -> str:
        nodes = (f"{self._name_of(node)}: {name_ranks(ranks)}" for node, ranks in enumerate(self.nodes))
        return f"{count_text(self.size, 'rank')} on {count_text(self.num_nodes, 'node')}; {'; '.join(nodes)}"
