"""Shared memory of a worker and a server of one node, through which data goes beside their messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import numpy as np

from mpidist.parameter_server.messages.protocol import CHUNK_BYTES, join_bytes
from mpidist.transport.arrays import bytes_of
from mpidist.transport.group.service_group import ServiceGroup
from mpidist.transport.node_memory.barrier import writer_of
from mpidist.transport.node_memory.window import LINE_BYTES

__all__ = ["LANE_BYTES", "Lane", "lanes_to"]

Array = np.ndarray[Any, Any]

NUM_SLOTS: Final = 4  # one is filled and one is used, with time for each end to be late
LANE_BYTES: Final = 2 * LINE_BYTES + NUM_SLOTS * CHUNK_BYTES
_SENT, _TAKEN, _LENGTHS = 0, 1, 2  # places in a line
_LEAST_WRITTEN_BYTES: Final = 16 << 10  # of an array: the calls for smaller ones take longer than one for all


@final
class Lane:
    """One end of a lane: slots that go round, and a line of counters that this end writes and the other one reads.

    A request goes one way and its answer the other, so both use the same slots. Each end counts what it has sent, and
    what it has taken: so a lane needs no lock, and an end that is lost leaves nothing locked.

    `memory` is `LANE_BYTES`, zero at first; `end` is 0 for the worker's end, 1 for the server's; places are counted in
    `server_memory`, the server's part of the node's memory; `fence` orders loads and stores, if that is needed.
    """

    def __init__(self, memory: Array, end: int, server_memory: Array, fence: Callable[[], None] | None) -> None:
        lines = [memory[start : start + LINE_BYTES].data.cast("q") for start in (0, LINE_BYTES)]
        self._own, self._other = lines[end], lines[1 - end]
        starts = range(2 * LINE_BYTES, LANE_BYTES, CHUNK_BYTES)
        self._slots = [memory[start : start + CHUNK_BYTES] for start in starts]
        self.server_memory = server_memory
        self._fence, self._write = fence, writer_of(memory[:LINE_BYTES])
        self._sent = self._taken = 0

    def can_send(self) -> bool:
        """Whether a slot is free."""
        return self._sent - self._other[_TAKEN] < NUM_SLOTS

    def slot(self) -> Array:
        """Return the free slot, to be filled."""
        return self._slots[self._sent % NUM_SLOTS]

    def send(self, nbytes: int) -> int:
        """Send the first bytes of the slot. Returns its number among all slots that this end has sent."""
        self._own[_LENGTHS + self._sent % NUM_SLOTS] = nbytes
        if self._fence is not None:
            self._fence()
        self._sent += 1
        self._own[_SENT] = self._sent
        return self._sent

    def send_arrays(self, arrays: Sequence[Array]) -> None:
        """Send contiguous arrays, one behind the other, in the slot.

        The other end has read the slot. Where its core shares no cache with this one, a core takes up to six times as
        long to write into lines that the other one holds as to write past the caches.
        """
        slot, start = self.slot(), 0
        nbytes = sum([array.nbytes for array in arrays])
        if self._write is None or nbytes < len(arrays) * _LEAST_WRITTEN_BYTES:
            join_bytes(arrays, slot)
        else:
            for array in arrays:
                self._write(slot[start : start + array.nbytes], bytes_of(array))
                start += array.nbytes
        self.send(nbytes)

    def num_taken(self) -> int:
        """Number of this end's slots that the other end has released."""
        return self._other[_TAKEN]

    def can_take(self) -> bool:
        """Whether the other end has sent something."""
        if self._other[_SENT] <= self._taken:
            return False
        if self._fence is not None:
            self._fence()
        return True

    def sent_slot(self) -> Array:
        """Return the slot that the other end has sent."""
        at = self._taken % NUM_SLOTS
        return self._slots[at][: self._other[_LENGTHS + at]]

    def take(self) -> None:
        """Give back the slot that the other end has sent."""
        if self._fence is not None:
            self._fence()
        self._taken += 1
        self._own[_TAKEN] = self._taken


def lanes_to(group: ServiceGroup, workers: Sequence[int], servers: Sequence[int]) -> Mapping[int, Lane]:
    """Make the lanes of a worker or a server, to each rank of the other side on this node. Collective over the group.

    Returns:
        The lanes, by rank; nothing where memory is not shared.
    """
    topology = group.topology
    rank, node = topology.rank, topology.nodes[topology.node]
    here = [server for server in servers if server in node]
    is_worker = rank in workers
    group.share_memory(len(here) * LANE_BYTES if is_worker else 0)
    arena = group.arena
    if arena is None:
        return {}

    def lane(worker: int, server: int) -> Lane:
        start = here.index(server) * LANE_BYTES
        memory = arena.parts[node.index(worker)][start : start + LANE_BYTES]
        return Lane(memory, 0 if is_worker else 1, arena.parts[node.index(server)], arena.fence)

    if is_worker:
        return {server: lane(rank, server) for server in here}
    return {worker: lane(worker, rank) for worker in workers if worker in node}
