"""Chooses how fused arrays are all-reduced: one-shot or two-shot, on one node or across nodes.

Fused arrays are staged, added and copied out chunk by chunk: the staging copy packs them. One-shot: after one barrier,
every rank adds all elements itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.transport.communicator import Array, Traffic
from mpidist.transport.native.loading import native
from mpidist.transport.node_memory.arena import SharedArena
from mpidist.transport.node_memory.staging_slots import Slots
from mpidist.transport.node_memory.symmetric import Run
from mpidist.transport.reduction import Reduction, is_low_precision
from mpidist.transport.shared_memory.in_place import InPlace
from mpidist.transport.shared_memory.inter_node import ShardExchange
from mpidist.transport.shared_memory.schedule import Schedule, fused_schedule
from mpidist.transport.shared_memory.two_shot import FusedArrays, TwoShot
from mpidist.transport.waiting import complete

__all__ = ["FusedReducer", "InterNode", "OneShot"]

_SCHEDULES: Final = 256  # cached
LEAST_BYTES_OF_GROUPS: Final = 256 << 10  # an estimate, of two more barriers: it was measured on one cache only


@final
class OneShot:
    """All-reduces of one length and dtype within a node, with one barrier. S bytes in, P S bytes read, per rank.

    A call is `stage`, a barrier of the slots, and `Reduction.combine_and_divide`. The elements lie at byte `start` of a
    slot: several all-reduces may share a barrier.
    """

    def __init__(self, slots: Slots, count: int, dtype: np.dtype[Any], start: int = 0) -> None:
        self._slots = slots
        first = start // dtype.itemsize
        self._parts = [[view[first : first + count] for view in views] for views in slots.views(dtype)]

    def stage(self, sources: Sequence[Array]) -> list[Array]:
        """Copy arrays, of any layout, into this rank's slot; return all ranks' parts of it, to be added. Local."""
        slots = self._slots
        parts = self._parts[(slots.barrier.count + 1) % slots.num_slots]
        own = parts[slots.rank]
        if len(sources) == 1:
            source = sources[0]
            slots.write(own, source if source.ndim == 1 else source.reshape(-1))
        else:
            np.concatenate(sources, axis=None, out=own)
        return parts

    def staged_for(self, barrier: int) -> list[Array]:
        """Return what `stage` has returned before the barrier of a number."""
        return self._parts[barrier % self._slots.num_slots]


@final
class InterNode(NamedTuple):
    """All-reduce of fused arrays across nodes.

    Attributes:
        exchange: All-reduces this rank's shards across nodes; `None` on ranks that have no lane.
        is_in_blocks: Whether each node has consecutive ranks, in the order of nodes.
    """

    exchange: ShardExchange | None
    least_bytes: int
    is_in_blocks: bool


@final
class FusedReducer:
    """All-reduces lists of arrays over the ranks of a node, or over all nodes.

    Args:
        slots: The node's staging memory. A chunk has the size of a slot.
        lanes: Number of ranks of each node that add.
        one_shot_bytes: The largest list for a one-shot all-reduce, in bytes; 0 across nodes.
        traffic: The traffic that `count` adds to.
        across: How arrays are all-reduced across nodes; `None` on one node.
        result_arena: The shared memory of results; `None` if there is none.
        groups: The ranks of the node by the cache that they share; `()` if that is one cache, or unknown.

    Attributes:
        check_peers: Called while this rank waits; see `waiting.complete`.
        least_bytes: The smallest list that is faster fused than in one pack, in bytes.
        spans_nodes: Whether there are several nodes.
        keeps_rank_order: Whether contributions can be added in rank order.
        traffic: That of the argument.
    """

    def __init__(
        self,
        slots: Slots,
        lanes: int,
        one_shot_bytes: int,
        traffic: Traffic,
        across: InterNode | None = None,
        result_arena: SharedArena | None = None,
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        self.slots = slots
        self._groups = groups
        self.lanes = lanes
        self.check_peers: Callable[[], None] = lambda: None
        self.least_bytes = 0 if across is None else across.least_bytes
        self.spans_nodes = across is not None
        self.keeps_rank_order = across is None or across.is_in_blocks
        self._exchange = None if across is None else across.exchange
        self._result_arena = result_arena
        self._one_shot_bytes = min(one_shot_bytes, slots.slot_bytes)
        self.traffic = traffic
        self.schedule = lru_cache(_SCHEDULES)(self._schedule)
        self.one_shot = lru_cache(_SCHEDULES)(partial(OneShot, slots))

    def _schedule(self, lengths: tuple[int, ...], itemsize: int) -> Schedule:
        """Cut pieces of these lengths into chunks."""
        return fused_schedule(lengths, self.lanes, max(1, self.slots.slot_bytes // itemsize))

    def count(self, nbytes: int) -> None:
        """Count the traffic of an all-reduce within the node. `ShardExchange` counts that across nodes."""
        self.traffic.add("all_reduce", self.link_bytes(nbytes))

    def link_bytes(self, nbytes: int) -> int:
        """Return how many bytes an all-reduce within the node moves over this rank's link."""
        return 2 * nbytes * (self.slots.size - 1) // self.slots.size

    def is_small(self, nbytes: int) -> bool:
        """Whether a list of this size is reduced by a one-shot all-reduce."""
        return nbytes <= self._one_shot_bytes

    def result_arena(self, reduction: Reduction, wire: np.dtype[Any], result: np.dtype[Any]) -> SharedArena | None:
        """Return the shared memory for results, if compiled code of all ranks can write them there; else `None`."""
        return self._result_arena if wire == result and reduction.is_compiled(wire) else None

    def free(self) -> None:
        """Take no more memory for results; results that exist keep theirs. Local."""
        if self._result_arena is not None:
            self._result_arena.close()

    def two_shot(
        self,
        arrays: FusedArrays,
        reduction: Reduction,
        divide_by: int = 1,
        schedule: Schedule | None = None,
        half: np.dtype[Any] | None = None,
    ) -> TwoShot:
        """Make a two-shot all-reduce. Local; see `TwoShot` for the arguments, which are equal on all ranks."""
        if schedule is None:
            schedule = self.schedule(tuple(array.size for array in arrays.sources), arrays.dtype.itemsize)
        regions = None if self._result_arena is None else self._result_arena.parts
        depth = self.slots.depth if self.spans_nodes else 0
        is_private = arrays.peers is None and arrays.shared is None
        groups = self._groups_for(schedule.count, arrays.dtype, reduction) if is_private else ()
        return TwoShot(self.slots, self._exchange, depth, schedule, arrays, reduction, divide_by, half, regions, groups)

    def in_place(self, runs: Sequence[Run], reduction: Reduction, divide_by: int) -> InPlace:
        """Make an all-reduce of symmetric arrays where they lie. Local; the arguments are equal on all ranks."""
        firsts = [run.targets[0] for run in runs]
        is_everywhere = all(len(run.targets) == self.slots.size for run in runs)
        has_groups = is_everywhere and firsts
        groups = self._groups_for(sum(map(len, firsts)), firsts[0].dtype, reduction) if has_groups else ()
        return InPlace(runs, self.slots, reduction, divide_by, groups)

    def _groups_for(self, count: int, dtype: np.dtype[Any], reduction: Reduction) -> Sequence[Sequence[int]]:
        """Return the groups of ranks that add so many elements each for itself; `()` if all ranks add together."""
        has_any_order = not reduction.in_rank_order and reduction.fold is None and not is_low_precision(dtype)
        return self._groups if has_any_order and count * dtype.itemsize >= LEAST_BYTES_OF_GROUPS else ()

    def whole_call(
        self, reduction: Reduction, dtype: np.dtype[Any], divide_by: int, two_shot: TwoShot | None, flight: Array | None
    ) -> Any:
        """Make what carries calls of private arrays out in compiled code; `None` if there is none. Local.

        Args:
            reduction: The elementwise operation.
            dtype: The dtype of the arrays.
            divide_by: The divisor of the result.
            two_shot: The all-reduce of the arrays; `None` for a one-shot all-reduce of one array.
            flight: The memory of this rank's flight recorder; `None` if no whole call is compiled.
        """
        compiled = None if two_shot is None else two_shot.compiled
        is_possible = flight is not None and self.slots.size > 1 and (two_shot is None or compiled is not None)
        if not is_possible or not reduction.is_compiled(dtype):
            return None
        where = self.slots.slot_bytes, self.slots.num_slots
        divisor = divide_by * reduction.divisor
        return native.WholeCall(self.slots.barrier, flight, *where, reduction.op, dtype, divisor, compiled)

    def all_reduce(self, buffer: Array, reduction: Reduction) -> None:
        """Reduce a flat array in place. Collective."""
        if self.is_small(buffer.nbytes):
            parts = self.one_shot(buffer.size, buffer.dtype).stage([buffer])
            self.synchronize()
            self.traffic.overflowed += reduction.combine(parts, buffer)
        else:
            self.run(self.two_shot(FusedArrays(buffer.dtype, [buffer], [buffer]), reduction))

    def abandon(self) -> None:
        """Abandon messages between nodes that are not complete. Local; the reducer cannot be used again."""
        self.free()
        if self._exchange is not None:
            self._exchange.abandon()

    def synchronize(self) -> None:
        """Pass a barrier of the node. Collective over it."""
        self.slots.pass_barrier(self.check_peers)

    def run(self, transfer: TwoShot) -> None:
        """Execute a two-shot all-reduce. Collective."""
        with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
            complete(transfer.steps(has_passed_barrier=False), self.check_peers)
        self.traffic.overflowed += transfer.overflowed
