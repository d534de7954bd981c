"""One lane's way across nodes: a shard is reduced with its counterparts, while the rank does other work."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any, final

import numpy as np

from mpidist.transport.communicator import Array, shard_bounds
from mpidist.transport.mpi import MpiCommunicator
from mpidist.transport.reduction import Reduction

__all__ = ["LaneExchange"]


@final
class LaneExchange:
    """All-reduces shards among the ranks of a lane, one on every node, several shards in flight.

    With K nodes and a shard of m bytes: every rank sends each other rank its K-th of the shard, adds what it gets
    in the order of nodes, and sends the sum to all. 2 steps, 2 (K - 1) messages and 2 m (K - 1) / K bytes a rank,
    which is the least that any all-reduce can send. Nothing moves unless `progress` is called.

    Args:
        across_nodes: The ranks of the lane, in order of nodes.
    """

    def __init__(self, across_nodes: MpiCommunicator) -> None:
        self._across = across_nodes
        self._flights: deque[_Flight] = deque()
        self._started = 0
        self._spare: list[Array] = []

    def start(self, buffer: Array, reduction: Reduction) -> _Flight:
        """Send a shard on its way.

        Args:
            buffer: [m], reduced in place. It must not be touched until the flight has landed.
            reduction: The elementwise operation.
        """
        flight = _Flight(self._across, buffer, reduction, 2 * (self._started % 1024))
        self._started += 1
        self._flights.append(flight)
        return flight

    def progress(self) -> None:
        """Let the shards under way get on. Local."""
        for flight in self._flights:
            flight.progress()
        while self._flights and self._flights[0].has_landed:
            self._flights.popleft()

    def abandon(self) -> list[Any]:
        """Return what MPI may still write, when nobody waits for it any more."""
        left = [flight.memory for flight in self._flights]
        self._flights.clear()
        return left


@final
class _Flight:
    """One shard under way: parts to their owners, sums to everybody."""

    def __init__(self, across: MpiCommunicator, buffer: Array, reduction: Reduction, tag: int) -> None:
        self.has_landed = False
        self._across, self._buffer, self._reduction, self._tag = across, buffer, reduction, tag
        bounds = shard_bounds(buffer.size, across.size)
        self._parts = [buffer[start:stop] for start, stop in pairwise(bounds)]
        own = self._parts[across.rank]
        self._incoming = np.empty((across.size, own.size), buffer.dtype)
        self._others = [rank for rank in range(across.size) if rank != across.rank]
        self._requests = [across.receive(self._incoming[rank], rank, tag) for rank in self._others]
        self._requests += [across.send(self._parts[rank], rank, tag) for rank in self._others]
        self._is_adding = True
        across.traffic.add("exchange", 2 * (buffer.nbytes - own.nbytes))

    @property
    def memory(self) -> tuple[Any, ...]:
        """What MPI may still read or write."""
        return self._buffer, self._incoming, self._requests

    def progress(self) -> None:
        if self._is_adding and self._across.test_all(self._requests):
            self._add()
        if not self._is_adding and not self.has_landed and self._across.test_all(self._requests):
            self.has_landed = True

    def _add(self) -> None:
        own = self._parts[self._across.rank]
        rows = [own if rank == self._across.rank else self._incoming[rank] for rank in range(self._across.size)]
        self._reduction.combine(rows, own)
        self._requests = [self._across.receive(self._parts[rank], rank, self._tag + 1) for rank in self._others]
        self._requests += [self._across.send(own, rank, self._tag + 1) for rank in self._others]
        self._is_adding = False
