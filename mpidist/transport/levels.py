"""The communicators of a topology: all ranks, the ranks of a node, and one rank of every node."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, cast, final

import numpy as np

from mpidist.transport.communicator import Array, Communicator, SoloCommunicator
from mpidist.transport.host_staged import HostStagedCommunicator
from mpidist.transport.mpi import MAX_CHUNK_BYTES, Intracomm, MpiCommunicator
from mpidist.transport.topology import Topology

__all__ = ["Levels"]

# On one node packing costs two passes through memory, so packs stay in a core's cache and large arrays out of them.
# Between nodes every message costs a latency per step, so packs are large. Index: whether there are several nodes.
_DIRECT_BYTES: Final = (32 << 10, 1 << 20)
_PACK_BYTES: Final = (256 << 10, 4 << 20)


@final
@dataclass(frozen=True)
class Levels:
    """Where an all-reduce algorithm can send: the levels of the machine, for one kind of memory.

    Attributes:
        world: All ranks of the group.
        within_node: The ranks of this rank's node, in rank order.
        across_nodes: The ranks with this rank's place on their nodes, in order of nodes.
        is_even: Whether every node has as many ranks, so that `across_nodes` reaches every node from every rank.
    """

    world: Communicator
    within_node: Communicator
    across_nodes: Communicator
    is_even: bool

    @classmethod
    def solo(cls) -> Levels:
        """Make the levels of a group of one."""
        return cls(SoloCommunicator("world"), SoloCommunicator("within_node"), SoloCommunicator("across_nodes"), True)

    @classmethod
    def from_mpi(cls, comm: Intracomm, topology: Topology, max_chunk_bytes: int = MAX_CHUNK_BYTES) -> Levels:
        """Split a communicator by nodes. Collective.

        Args:
            comm: The communicator of the group. What is made here are duplicates and parts of it.
            topology: The placement of its ranks.
            max_chunk_bytes: Larger arrays are sent in several calls.
        """
        return cls(
            _level(comm.Dup(), "world", max_chunk_bytes),
            _level(_split(comm, topology.node, topology.rank), "within_node", max_chunk_bytes),
            _level(_split(comm, topology.local_rank, topology.node), "across_nodes", max_chunk_bytes),
            topology.is_even,
        )

    @property
    def direct_bytes(self) -> int:
        """Size from which on an array is better sent by itself than copied into a pack and out again, in bytes."""
        return _DIRECT_BYTES[self.within_node.size < self.world.size] if self.world.size > 1 else 1

    @property
    def pack_bytes(self) -> int:
        """Size of the pack buffer that this machine likes best, in bytes."""
        return _PACK_BYTES[self.within_node.size < self.world.size]

    def pack_buffer(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Lend memory to pack into: that of the innermost transport."""
        return self.within_node.pack_buffer(count, dtype)

    @cached_property
    def of_device(self) -> Levels:
        """The same levels for device memory."""
        return Levels(
            HostStagedCommunicator(self.world),
            HostStagedCommunicator(self.within_node),
            HostStagedCommunicator(self.across_nodes),
            self.is_even,
        )

    def free(self) -> None:
        """Free the communicators, last made first. Collective."""
        for level in (self.across_nodes, self.within_node, self.world):
            level.free()


def _split(comm: Intracomm, color: int, key: int) -> Intracomm:
    part: Any = comm.Split(color, key)  # mpi4py's stubs call it a Comm
    return cast("Intracomm", part)


def _level(part: Intracomm, name: str, max_chunk_bytes: int) -> Communicator:
    if part.Get_size() > 1:
        return MpiCommunicator(part, name, max_chunk_bytes)
    part.Free()
    return SoloCommunicator(name)
