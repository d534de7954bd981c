"""All-reduces of shards across nodes, among the ranks of a lane (one on each node), in the background of other work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias, final

import numpy as np

from mpidist.transport.communicator import Array, shard_bounds
from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.mpi.library import Request
from mpidist.transport.reduction import Reduction, narrow, widen
from mpidist.transport.waiting import never_free

__all__ = ["ShardAllReduce", "ShardExchange"]

_TAGS: Final = 16384  # used in turn; MPI guarantees 32,768, and far fewer are in use at once

# The steps of a shard's all-reduce: each yields messages, and the next step begins when they are complete. The argument
# gets the memory of messages, which MPI may still use if an interrupt ends a step.
_Steps: TypeAlias = Callable[[list[Array]], Iterator[list[Request]]]


@final
class ShardAllReduce:
    """The all-reduce of one shard across nodes. Only `progress` advances it."""

    def __init__(self, across: MpiCommunicator, steps: _Steps) -> None:
        self._across, self._memory = across, list[Array]()
        self._steps = steps(self._memory)
        self._messages: list[Request] | None = []

    @property
    def is_done(self) -> bool:
        """Whether the result is in the shard."""
        return self._messages is None

    def progress(self) -> None:
        """Handle messages that have arrived, and send what can be sent. Local."""
        while self._messages is not None and self._across.test_all(self._messages):
            self._messages = next(self._steps, None)


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
            return self._track(partial(_direct, self._across, buffer, reduction, tag))
        return self._track(partial(_compressed, self._across, buffer, reduction, half, tag))

    def start_chain(self, buffer: Array, fold: Callable[[Array | None], None]) -> ShardAllReduce:
        """Start to all-reduce a shard in rank order: node after node adds its parts; the result returns the same way.

        With K nodes and m bytes: 2 (K - 1) steps; the first and the last node send m bytes, those between 2 m. `fold`
        adds the parts of this node to the sum of all earlier nodes (`None` on the first), and leaves the sum in
        `buffer` [m].
        """
        return self._track(partial(_chain, self._across, buffer, fold, self._next_tag()))

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

    def _track(self, steps: _Steps) -> ShardAllReduce:
        shard = ShardAllReduce(self._across, steps)
        self._unfinished.append(shard)  # before its first step, which an interrupt may end
        shard.progress()
        return shard

    def _next_tag(self) -> int:
        self._started = (self._started + 1) % (_TAGS // 2)
        return 2 * self._started


def _direct(
    across: MpiCommunicator, buffer: Array, reduction: Reduction, tag: int, memory: list[Array]
) -> Iterator[list[Request]]:
    """Send each part of the shard to the rank that owns the part. The owner adds, and sends the sum to all ranks."""
    bounds = shard_bounds(buffer.size, across.size)
    own = buffer[bounds[across.rank] : bounds[across.rank + 1]]
    incoming = np.empty((across.size, own.size), buffer.dtype)
    memory += buffer, incoming
    across.traffic.add("exchange", 2 * (buffer.nbytes - own.nbytes))
    yield across.start_parts(buffer, bounds, incoming, tag)
    across.join_parts(incoming, own, reduction, own)
    yield across.start_shards(buffer, bounds, tag + 1)


def _compressed(
    across: MpiCommunicator, buffer: Array, reduction: Reduction, half: np.dtype[Any], tag: int, memory: list[Array]
) -> Iterator[list[Request]]:
    """Send a float32 shard in half precision. The owner of a part rounds it, too, so that all ranks get equal bits."""
    rounded = np.empty(buffer.size, half)
    across.traffic.overflowed += narrow(buffer, rounded)
    yield from _direct(across, rounded, replace(reduction, counts_overflow=True), tag, memory)
    widen(rounded, buffer)


def _chain(
    across: MpiCommunicator, buffer: Array, fold: Callable[[Array | None], None], tag: int, memory: list[Array]
) -> Iterator[list[Request]]:
    """Send partial sums up the nodes, and the result back down."""
    rank, last, incoming = across.rank, across.size - 1, None
    across.traffic.add("exchange", ((rank > 0) + (rank < last)) * buffer.nbytes)
    memory.append(buffer)
    if rank > 0:
        incoming = np.empty(buffer.size, buffer.dtype)
        memory.append(incoming)
        yield across.receive(incoming, rank - 1, tag)
    fold(incoming)
    if rank < last:
        outgoing = buffer.copy()  # the result comes back into the buffer
        memory.append(outgoing)
        yield across.receive(buffer, rank + 1, tag + 1) + across.send(outgoing, rank + 1, tag)
    if rank > 0:
        yield across.send(buffer, rank - 1, tag + 1)
