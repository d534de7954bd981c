"""The communicators of a topology: all ranks, the ranks of a node, and one rank of every node."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, cast, final

import numpy as np

from mpidist.errors import UnavailableError
from mpidist.transport.communicator import Array, Communicator, SoloCommunicator
from mpidist.transport.host_staged import HostStagedCommunicator
from mpidist.transport.lane_exchange import LaneExchange
from mpidist.transport.mpi import MAX_CHUNK_BYTES, Intracomm, MpiCommunicator
from mpidist.transport.shared_memory import SharedMemoryCommunicator
from mpidist.transport.slots import Slots
from mpidist.transport.streams import StreamReducer
from mpidist.transport.topology import Topology

__all__ = ["Levels"]

logger = logging.getLogger(__name__)

# Without shared memory. On one node packing costs two passes through memory, so packs stay in a core's cache and large
# arrays out of them. Between nodes every message costs a latency per step, so packs are large. Index: whether there
# are several nodes.
_DIRECT_BYTES: Final = (32 << 10, 1 << 20)
_PACK_BYTES: Final = (256 << 10, 4 << 20)

_ONE_ROUND_BYTES: Final = 32 << 10
_CHUNK_BYTES: Final = 512 << 10
_DEPTH: Final = 4  # shards of a lane under way between nodes at once


@final
@dataclass(frozen=True)
class Levels:
    """Where an all-reduce algorithm can send: the levels of the machine, for one kind of memory.

    Attributes:
        world: All ranks of the group.
        within_node: The ranks of this rank's node, in rank order.
        across_nodes: The ranks with this rank's place on their nodes, in order of nodes.
        is_even: Whether every node has as many ranks, so that `across_nodes` reaches every node from every rank.
        streams: Reduces lists of arrays over all ranks through shared memory; `None` where there is none.
    """

    world: Communicator
    within_node: Communicator
    across_nodes: Communicator
    is_even: bool
    streams: StreamReducer | None = None

    @classmethod
    def solo(cls) -> Levels:
        """Make the levels of a group of one."""
        return cls(SoloCommunicator("world"), SoloCommunicator("within_node"), SoloCommunicator("across_nodes"), True)

    @classmethod
    def from_mpi(
        cls, comm: Intracomm, topology: Topology, max_chunk_bytes: int = MAX_CHUNK_BYTES, transport: str = "auto"
    ) -> Levels:
        """Split a communicator by nodes. Collective.

        Args:
            comm: The communicator of the group. What is made here are duplicates and parts of it.
            topology: The placement of its ranks.
            max_chunk_bytes: Larger arrays are sent in several calls.
            transport: `"mpi"` for MPI alone, `"shared_memory"` to insist on shared memory within nodes, `"auto"`.

        Raises:
            UnavailableError: If shared memory is insisted on and cannot be had. On every rank.
        """
        world = _level(comm.Dup(), "world", max_chunk_bytes)
        within = _level(_split(comm, topology.node, topology.rank), "within_node", max_chunk_bytes)
        across = _level(_split(comm, topology.local_rank, topology.node), "across_nodes", max_chunk_bytes)
        slots = None if transport == "mpi" else _slots(comm, within, topology, transport == "shared_memory")
        if slots is None:
            return cls(world, within, across, topology.is_even)
        spans_nodes = topology.num_nodes > 1
        lanes, exchange = min(topology.node_sizes), None
        if spans_nodes and topology.local_rank < lanes:
            exchange = LaneExchange(cast("MpiCommunicator", across))
        is_in_blocks = list(topology.node_of_rank) == sorted(topology.node_of_rank)
        traffic = within.traffic if spans_nodes else world.traffic
        streams = StreamReducer(
            slots, lanes, exchange, spans_nodes, _ONE_ROUND_BYTES, slots.slot_bytes, traffic, is_in_blocks
        )
        if isinstance(within, MpiCommunicator):
            on_node = StreamReducer(slots, within.size, None, False, _ONE_ROUND_BYTES, slots.slot_bytes, within.traffic)
            within = SharedMemoryCommunicator(within, on_node)
        if not spans_nodes and isinstance(world, MpiCommunicator):
            world = SharedMemoryCommunicator(world, streams)
        return cls(world, within, across, topology.is_even, streams)

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

    def watch(self, is_over: Callable[[], bool]) -> None:
        """Ask `is_over` while ranks wait for each other in shared memory; it may raise."""
        for streams in self._all_streams():
            streams.is_over = is_over

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

    def _all_streams(self) -> list[StreamReducer]:
        streams = [] if self.streams is None else [self.streams]
        if isinstance(self.within_node, SharedMemoryCommunicator):
            streams.append(self.within_node.streams)
        return streams


def _slots(comm: Intracomm, within: Communicator, topology: Topology, insists: bool) -> Slots | None:
    """Make the staging memory of every node, or of none. Collective over all ranks."""
    node = within.comm if isinstance(within, MpiCommunicator) else None
    slots, reason = None, None
    try:
        slots = Slots(node, _CHUNK_BYTES, 0 if topology.num_nodes == 1 else _DEPTH)
    except UnavailableError as error:
        reason = f"rank {topology.rank}: {error}"
    reasons = [text for text in comm.allgather(reason) if text is not None]
    if not reasons:
        return slots
    if insists:
        raise UnavailableError(f"MPIDIST_TRANSPORT=shared_memory cannot be followed: {reasons[0]}")
    if topology.rank == 0:
        logger.warning("ranks of a node send messages instead of sharing memory, which is slower: %s", reasons[0])
    return None


def _split(comm: Intracomm, color: int, key: int) -> Intracomm:
    part: Any = comm.Split(color, key)  # mpi4py's stubs call it a Comm
    return cast("Intracomm", part)


def _level(part: Intracomm, name: str, max_chunk_bytes: int) -> Communicator:
    if part.Get_size() > 1:
        return MpiCommunicator(part, name, max_chunk_bytes)
    part.Free()
    return SoloCommunicator(name)
