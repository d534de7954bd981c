"""All-reduces of shards across nodes, among the ranks of a lane (one on each node), in the background of other work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, final

import numpy as np

from mpidist.transport.communicator import Array, shard_bounds
from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.reduction import Reduction, narrow, widen
from mpidist.transport.waiting import never_free

__all__ = ["ShardAllReduce", "ShardExchange"]

_TAGS: Final = 16384  # used in turn; MPI guarantees 32,768, and far fewer are in use at once


class ShardAllReduce(ABC):
    """The all-reduce of one shard across nodes. Only `progress` advances it."""

    def __init__(self) -> None:
        self.is_done = False

    @abstractmethod
    def progress(self) -> None:
        """Handle messages that have arrived, and send what can be sent. Local."""


@final
class ShardExchange:
    """All-reduces shards among the ranks of a lane, several shards at a time. Only `progress` advances them."""

    def __init__(self, across_nodes: MpiCommunicator) -> None:
        self._across = across_nodes
        self._unfinished: deque[ShardAllReduce] = deque()
        self._started = 0

    def start(self, buffer: Array, reduction: Reduction, half: np.dtype[Any] | None = None) -> ShardAllReduce:
        """Start to all-reduce a shard [m] in place, added in the order of nodes. Nobody may touch it until it is done.

        With K nodes and m bytes: every rank sends each other rank a K-th of the shard, adds the parts that it receives,
        and sends the sum to all. 2 steps, 2 (K - 1) messages and 2 m (K - 1) / K bytes per rank: the least that an
        all-reduce can send. Half as many bytes with `half`, in which float32 numbers are sent.
        """
        tag = self._next_tag()
        if half is None:
            return self._track(_DirectAllReduce(self._across, buffer, reduction, tag))
        return self._track(_CompressedAllReduce(self._across, buffer, reduction, half, tag))

    def start_chain(self, buffer: Array, fold: Callable[[Array | None], None]) -> ShardAllReduce:
        """Start to all-reduce a shard in rank order: node after node adds its parts; the result returns the same way.

        With K nodes and m bytes: 2 (K - 1) steps; the first and the last node send m bytes, those between 2 m. `fold`
        adds the parts of this node to the sum of all earlier nodes (`None` on the first), and leaves the sum in
        `buffer` [m].
        """
        return self._track(_ChainAllReduce(self._across, buffer, fold, self._next_tag()))

    def progress(self) -> None:
        """Advance all shards that are not done. Local."""
        for shard in self._unfinished:
            shard.progress()
        while self._unfinished and self._unfinished[0].is_done:
            self._unfinished.popleft()

    def abandon(self) -> None:
        """Abandon shards that are not done. MPI may still read and write their memory, which is never freed. Local."""
        never_free(tuple(self._unfinished))
        self._unfinished.clear()

    def _track(self, shard: ShardAllReduce) -> ShardAllReduce:
        self._unfinished.append(shard)
        return shard

    def _next_tag(self) -> int:
        self._started = (self._started + 1) % (_TAGS // 2)
        return 2 * self._started


@final
class _DirectAllReduce(ShardAllReduce):
    """Sends each part of the shard to the rank that owns the part. The owner adds, and sends the sum to all ranks."""

    def __init__(self, across: MpiCommunicator, buffer: Array, reduction: Reduction, tag: int) -> None:
        super().__init__()
        self._across, self._buffer, self._reduction, self._tag = across, buffer, reduction, tag
        self._bounds = shard_bounds(buffer.size, across.size)
        self._own = buffer[self._bounds[across.rank] : self._bounds[across.rank + 1]]
        self._incoming = np.empty((across.size, self._own.size), buffer.dtype)
        self._requests = across.start_parts(buffer, self._bounds, self._incoming, tag)
        self._is_adding = True
        across.traffic.add("exchange", 2 * (buffer.nbytes - self._own.nbytes))

    def progress(self) -> None:
        if self._is_adding and self._across.test_all(self._requests):
            self._add()
        if not self._is_adding and not self.is_done and self._across.test_all(self._requests):
            self.is_done = True

    def _add(self) -> None:
        self._across.join_parts(self._incoming, self._own, self._reduction, self._own)
        self._requests = self._across.start_shards(self._buffer, self._bounds, self._tag + 1)
        self._is_adding = False


@final
class _CompressedAllReduce(ShardAllReduce):
    """Sends a float32 shard in half precision. The owner of a part rounds it, too, so that all ranks get equal bits."""

    def __init__(
        self, across: MpiCommunicator, buffer: Array, reduction: Reduction, half: np.dtype[Any], tag: int
    ) -> None:
        super().__init__()
        self._buffer, self._half = buffer, np.empty(buffer.size, half)
        across.traffic.overflowed += narrow(buffer, self._half)
        self._rounded = _DirectAllReduce(across, self._half, replace(reduction, counts_overflow=True), tag)

    def progress(self) -> None:
        self._rounded.progress()
        if self._rounded.is_done and not self.is_done:
            widen(self._half, self._buffer)
            self.is_done = True


@final
class _ChainAllReduce(ShardAllReduce):
    """Sends partial sums up the nodes, and the result back down."""

    def __init__(self, across: MpiCommunicator, buffer: Array, fold: Callable[[Array | None], None], tag: int) -> None:
        super().__init__()
        self._across, self._buffer, self._fold, self._tag = across, buffer, fold, tag
        self._below = across.rank - 1 if across.rank > 0 else None
        self._above = across.rank + 1 if across.rank + 1 < across.size else None
        self._is_added = self._is_sent_down = False
        self._incoming: Array | None = None
        if self._below is None:
            self._add_and_send_up()
        else:
            self._incoming = np.empty(buffer.size, buffer.dtype)
            self._requests = across.receive(self._incoming, self._below, tag)
        hops = (self._below is not None) + (self._above is not None)
        across.traffic.add("exchange", hops * buffer.nbytes)

    def progress(self) -> None:
        if self.is_done or not self._across.test_all(self._requests):
            return
        if not self._is_added:
            self._add_and_send_up()
        elif self._below is not None and not self._is_sent_down:
            self._send_down()
        else:
            self.is_done = True

    def _add_and_send_up(self) -> None:
        self._fold(self._incoming)
        self._is_added = True
        if self._above is None:
            self._send_down()
            return
        self._outgoing = self._buffer.copy()  # the result comes back into the buffer
        self._requests = self._across.receive(self._buffer, self._above, self._tag + 1)
        self._requests += self._across.send(self._outgoing, self._above, self._tag)

    def _send_down(self) -> None:
        self._is_sent_down = True
        self._requests = []
        if self._below is not None:
            self._requests = self._across.send(self._buffer, self._below, self._tag + 1)
