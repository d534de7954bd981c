"""One lane's way across nodes: a shard is reduced with its counterparts, while the rank does other work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, final

import numpy as np

from mpidist.transport.communicator import Array, shard_bounds
from mpidist.transport.mpi import MpiCommunicator
from mpidist.transport.reduction import Reduction, narrow, widen
from mpidist.transport.waiting import never_free

__all__ = ["ShardAllReduce", "ShardExchange"]

_TAGS: Final = 16384  # in turn; MPI promises 32,768, and far fewer are under way


class ShardAllReduce(ABC):
    """One shard under way. It gets on in `progress` alone."""

    def __init__(self) -> None:
        self.is_done = False

    @abstractmethod
    def progress(self) -> None:
        """Take what has come, and send on what can be sent. Local."""


@final
class ShardExchange:
    """All-reduces shards among the ranks of a lane, one on every node, several shards at a time.

    Nothing moves unless `progress` is called.

    Args:
        across_nodes: The ranks of the lane, in order of nodes.
    """

    def __init__(self, across_nodes: MpiCommunicator) -> None:
        self._across = across_nodes
        self._under_way: deque[ShardAllReduce] = deque()
        self._started = 0

    def start(self, buffer: Array, reduction: Reduction, half: np.dtype[Any] | None = None) -> ShardAllReduce:
        """Reduce a shard, in the order of nodes.

        With K nodes and m bytes: every rank sends each other rank its K-th of the shard, adds what it gets, and
        sends the sum to all. 2 steps, 2 (K - 1) messages and 2 m (K - 1) / K bytes a rank: the least that an
        all-reduce can send. Half as many bytes where numbers are rounded to `half`.

        Args:
            buffer: [m], reduced in place. It must not be touched until the shard is done.
            reduction: The elementwise operation.
            half: Half precision that float32 numbers are rounded to on their way; `None` leaves them as they are.
        """
        tag = self._next_tag()
        if half is None:
            return self._keep(_DirectAllReduce(self._across, buffer, reduction, tag))
        return self._keep(_CompressedAllReduce(self._across, buffer, reduction, half, tag))

    def start_chain(self, buffer: Array, fold: Callable[[Array | None], None]) -> ShardAllReduce:
        """Reduce a shard from node to node, each adding its ranks' parts in turn, and send the result back.

        With K nodes and m bytes: 2 (K - 1) steps; the first and the last node send m bytes, those between 2 m.

        Args:
            buffer: [m], which takes the result.
            fold: Adds this node's parts to what it is given, the sum of all nodes before, or to nothing, and leaves
                the sum in `buffer`.
        """
        return self._keep(_ChainAllReduce(self._across, buffer, fold, self._next_tag()))

    def progress(self) -> None:
        """Let the shards under way get on. Local."""
        for shard in self._under_way:
            shard.progress()
        while self._under_way and self._under_way[0].is_done:
            self._under_way.popleft()

    def abandon(self) -> None:
        """Leave what is under way to MPI, which may still read and write it. Local."""
        never_free(tuple(self._under_way))
        self._under_way.clear()

    def _keep(self, shard: ShardAllReduce) -> ShardAllReduce:
        self._under_way.append(shard)
        return shard

    def _next_tag(self) -> int:
        self._started = (self._started + 1) % (_TAGS // 2)
        return 2 * self._started


@final
class _DirectAllReduce(ShardAllReduce):
    """Parts to their owners, sums to everybody."""

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
    """A shard of float32 that travels in half precision, its owner's part, too: all get the same bits."""

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
    """Partial sums up the nodes, the result back down."""

    def __init__(self, across: MpiCommunicator, buffer: Array, fold: Callable[[Array | None], None], tag: int) -> None:
        super().__init__()
        self._across, self._buffer, self._fold, self._tag = across, buffer, fold, tag
        self._below = across.rank - 1 if across.rank > 0 else None
        self._above = across.rank + 1 if across.rank + 1 < across.size else None
        self._is_up = self._is_sent_down = False
        self._incoming: Array | None = None
        if self._below is None:
            self._up()
        else:
            self._incoming = np.empty(buffer.size, buffer.dtype)
            self._requests = [across.receive(self._incoming, self._below, tag)]
        hops = (self._below is not None) + (self._above is not None)
        across.traffic.add("exchange", hops * buffer.nbytes)

    def progress(self) -> None:
        if self.is_done or not self._across.test_all(self._requests):
            return
        if not self._is_up:
            self._up()
        elif self._below is not None and not self._is_sent_down:
            self._down()
        else:
            self.is_done = True

    def _up(self) -> None:
        self._fold(self._incoming)
        self._is_up = True
        if self._above is None:
            self._down()
            return
        self._outgoing = self._buffer.copy()  # the result comes back into the buffer
        self._requests = [
            self._across.send(self._outgoing, self._above, self._tag),
            self._across.receive(self._buffer, self._above, self._tag + 1),
        ]

    def _down(self) -> None:
        self._is_sent_down = True
        self._requests = []
        if self._below is not None:
            self._requests = [self._across.send(self._buffer, self._below, self._tag + 1)]
