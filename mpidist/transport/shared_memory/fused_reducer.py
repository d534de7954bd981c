"""Which way fused arrays take over all ranks of a group, and the memory that they take it through.

Fused arrays are staged, added and delivered chunk by chunk: packing them is the staging copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.transport.communicator import Array, Traffic
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory.inter_node import ShardExchange
from mpidist.transport.shared_memory.one_shot import OneShot
from mpidist.transport.shared_memory.schedule import Schedule, fused_schedule
from mpidist.transport.shared_memory.staging_slots import Slots
from mpidist.transport.shared_memory.two_shot import FusedArrays, TwoShot
from mpidist.transport.waiting import complete

__all__ = ["InterNode", "FusedReducer"]

_SCHEDULES: Final = 256  # remembered, of flat arrays; plans of lists hold theirs


@final
class InterNode(NamedTuple):
    """How fused arrays cross nodes.

    Attributes:
        exchange: This lane's way across; `None` for ranks that do not add.
        least_bytes: The smallest list that is worth its messages, in bytes.
        is_in_blocks: Whether the ranks of each node follow each other, and those of the next node follow them.
    """

    exchange: ShardExchange | None
    least_bytes: int
    is_in_blocks: bool


@final
class FusedReducer:
    """All-reduces lists of arrays over the ranks of a node, or over all nodes.

    Args:
        slots: The node's staging memory. A chunk has the size of a slot.
        lanes: How many ranks of each node add.
        one_shot_bytes: The largest list that every rank adds by itself, in bytes. 0 across nodes.
        traffic: Where `count` counts.
        across: How the arrays cross nodes; `None` on one node.

    Attributes:
        check_peers: Asked while this rank waits; see `waiting.complete`.
        least_bytes: The smallest list that is worth its messages, in bytes.
        spans_nodes: Whether there are several nodes.
        keeps_rank_order: Whether ranks can be added in their order.
    """

    def __init__(
        self, slots: Slots, lanes: int, one_shot_bytes: int, traffic: Traffic, across: InterNode | None = None
    ) -> None:
        self.slots = slots
        self.lanes = lanes
        self.check_peers: Callable[[], None] = lambda: None
        self.least_bytes = 0 if across is None else across.least_bytes
        self.spans_nodes = across is not None
        self.keeps_rank_order = across is None or across.is_in_blocks
        self._exchange = None if across is None else across.exchange
        self._one_shot_bytes = min(one_shot_bytes, slots.slot_bytes)
        self._traffic = traffic
        self.schedule = lru_cache(_SCHEDULES)(self._schedule)
        self.one_shot = lru_cache(_SCHEDULES)(self._one_shot)

    def _schedule(self, lengths: tuple[int, ...], itemsize: int) -> Schedule:
        """Cut pieces of these lengths into chunks."""
        return fused_schedule(lengths, self.lanes, max(1, self.slots.slot_bytes // itemsize))

    def _one_shot(self, count: int, dtype: np.dtype[Any]) -> OneShot:
        """Prepare for small lists of a length."""
        return OneShot(self.slots, count, dtype)

    def count(self, nbytes: int) -> None:
        """Count an all-reduce of some bytes within the node; what goes across nodes is counted there."""
        self._traffic.add("all_reduce", 2 * nbytes * (self.slots.size - 1) // self.slots.size)

    def is_small(self, nbytes: int) -> bool:
        """Whether every rank adds a list of this size by itself."""
        return nbytes <= self._one_shot_bytes

    def two_shot(
        self,
        arrays: FusedArrays,
        reduction: Reduction,
        divide_by: int = 1,
        schedule: Schedule | None = None,
        half: np.dtype[Any] | None = None,
    ) -> TwoShot:
        """Prepare an all-reduce. Local; all ranks do it alike. The arguments are those of `TwoShot`."""
        if schedule is None:
            schedule = self.schedule(tuple(array.size for array in arrays.sources), arrays.dtype.itemsize)
        return TwoShot(self.slots, self._exchange, self.slots.depth, schedule, arrays, reduction, divide_by, half)

    def all_reduce(self, buffer: Array, reduction: Reduction) -> None:
        """Reduce a flat array in place. Collective."""
        if self.is_small(buffer.nbytes):
            small = self.one_shot(buffer.size, buffer.dtype)
            parts = small.stage([buffer])
            self.synchronize()
            self._traffic.overflowed += small.add(parts, reduction, 1, buffer)
        else:
            self.run(self.two_shot(FusedArrays(buffer.dtype, [buffer], [buffer]), reduction))

    def abandon(self) -> None:
        """Leave to MPI what is under way between nodes. Local; nothing else can follow."""
        if self._exchange is not None:
            self._exchange.abandon()

    def synchronize(self) -> None:
        """Pass a barrier of the node. Collective over it."""
        complete(self.slots.synchronize(), self.check_peers)

    def run(self, transfer: TwoShot) -> None:
        """Do what `two_shot` prepared. Collective."""
        with np.errstate(all="ignore"):  # an overflow is a result; raising it on one rank would leave the others
            complete(transfer.steps(has_passed_barrier=False), self.check_peers)
        self._traffic.overflowed += transfer.overflowed
