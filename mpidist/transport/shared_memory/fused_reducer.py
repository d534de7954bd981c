"""Streams over all ranks of a group: which way they take, and the memory that they take it through."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.transport.communicator import Array, Traffic
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory.inter_node import LaneExchange
from mpidist.transport.shared_memory.one_shot import OneRound
from mpidist.transport.shared_memory.schedule import Schedule, stream_schedule
from mpidist.transport.shared_memory.staging_slots import Slots
from mpidist.transport.shared_memory.two_shot import Stream, Transfer
from mpidist.transport.waiting import complete

__all__ = ["Across", "StreamReducer"]

_SCHEDULES: Final = 256  # remembered, of flat arrays; plans of lists hold theirs


@final
class Across(NamedTuple):
    """How streams cross nodes.

    Attributes:
        exchange: This lane's way across; `None` for ranks that do not add.
        least_bytes: The smallest stream that is worth its messages, in bytes.
        is_in_blocks: Whether the ranks of each node follow each other, and those of the next node follow them.
    """

    exchange: LaneExchange | None
    least_bytes: int
    is_in_blocks: bool


@final
class StreamReducer:
    """All-reduces streams over the ranks of a node, or over all nodes.

    Args:
        slots: The node's staging memory. A chunk has the size of a slot.
        lanes: How many ranks of each node add.
        one_round_bytes: The largest stream that every rank adds by itself, in bytes. 0 across nodes.
        traffic: Where `count` counts.
        across: How streams cross nodes; `None` on one node.

    Attributes:
        is_over: Asked while this rank waits; see `waiting.complete`.
        least_bytes: The smallest stream that is worth its messages, in bytes.
        spans_nodes: Whether there are several nodes.
        keeps_rank_order: Whether ranks can be added in their order.
    """

    def __init__(
        self, slots: Slots, lanes: int, one_round_bytes: int, traffic: Traffic, across: Across | None = None
    ) -> None:
        self.slots = slots
        self.lanes = lanes
        self.is_over: Callable[[], bool] = lambda: False
        self.least_bytes = 0 if across is None else across.least_bytes
        self.spans_nodes = across is not None
        self.keeps_rank_order = across is None or across.is_in_blocks
        self._exchange = None if across is None else across.exchange
        self._one_round_bytes = min(one_round_bytes, slots.slot_bytes)
        self._traffic = traffic
        self.schedule = lru_cache(_SCHEDULES)(self._schedule)
        self.one_round = lru_cache(_SCHEDULES)(self._one_round)

    def _schedule(self, lengths: tuple[int, ...], itemsize: int) -> Schedule:
        """Cut pieces of these lengths into chunks."""
        return stream_schedule(lengths, self.lanes, max(1, self.slots.slot_bytes // itemsize))

    def _one_round(self, count: int, dtype: np.dtype[Any]) -> OneRound:
        """Prepare for small streams of a length."""
        return OneRound(self.slots, count, dtype)

    def count(self, nbytes: int) -> None:
        """Count an all-reduce of some bytes within the node; what goes across nodes is counted there."""
        self._traffic.add("all_reduce", 2 * nbytes * (self.slots.size - 1) // self.slots.size)

    def is_small(self, nbytes: int) -> bool:
        """Whether every rank adds a stream of this size by itself."""
        return nbytes <= self._one_round_bytes

    def transfer(
        self,
        stream: Stream,
        reduction: Reduction,
        divide_by: int = 1,
        schedule: Schedule | None = None,
    ) -> Transfer:
        """Prepare an all-reduce. Local; all ranks do it alike."""
        if schedule is None:
            schedule = self.schedule(tuple(array.size for array in stream.sources), stream.dtype.itemsize)
        return Transfer(
            self.slots,
            self._exchange,
            self.slots.depth,
            schedule,
            stream,
            reduction,
            divide_by,
        )

    def all_reduce(self, buffer: Array, reduction: Reduction) -> None:
        """Reduce a flat array in place. Collective."""
        if self.is_small(buffer.nbytes):
            small = self.one_round(buffer.size, buffer.dtype)
            parts = small.stage([buffer])
            self.synchronize()
            self._traffic.overflowed += small.add(parts, reduction, 1, buffer)
        else:
            self.run(self.transfer(Stream(buffer.dtype, [buffer], [buffer]), reduction))

    def abandon(self) -> None:
        """Leave to MPI what is under way between nodes. Local; the streams cannot be used again."""
        if self._exchange is not None:
            self._exchange.abandon()

    def synchronize(self) -> None:
        """Pass a barrier of the node. Collective over it."""
        complete(self.slots.synchronize(), self.is_over)

    def run(self, transfer: Transfer, has_begun: bool = False) -> None:
        """Finish a transfer. Collective.

        Args:
            transfer: What `transfer` made.
            has_begun: Whether it has begun, and the ranks have passed a barrier since.
        """
        if not has_begun:
            transfer.begin()
        with np.errstate(all="ignore"):  # an overflow is a result; raising it on one rank would leave the others
            complete(transfer.steps(has_begun), self.is_over)
        self._traffic.overflowed += transfer.overflowed
