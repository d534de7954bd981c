"""All-reduce of rows of a replica tree (see `transport.tree`) through shared memory, and across nodes, in chunks.

Every rank copies its rows of a chunk into its slot. After a barrier, each lane (a rank that adds) adds its shard from
the rows in all ranks' slots. On several nodes, the lanes of all nodes then all-reduce the node's rows of the shard.
After a second barrier, which is the first one of the next chunk, all ranks copy the sums out.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Any, final

import numpy as np

from mpidist.transport.communicator import Array
from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.mpi.rows import all_reduce_rows as all_reduce_by_messages
from mpidist.transport.mpi.rows import row_traffic
from mpidist.transport.shared_memory.fused_reducer import FusedReducer
from mpidist.transport.shared_memory.schedule import chunk_bounds
from mpidist.transport.tree import ReplicaTree
from mpidist.transport.waiting import complete

__all__ = ["RowsInSlots", "fits_into_slots"]


def fits_into_slots(reducer: FusedReducer, tree: ReplicaTree, dtype: np.dtype[Any]) -> bool:
    """Whether a slot has room for at least one element of each row of any rank. The same on all ranks."""
    return _chunk_count(reducer, tree, dtype) > 0


@final
class RowsInSlots:
    """One all-reduce of rows: adds the rows of all ranks on every rank.

    Args:
        across_nodes: The ranks of this rank's lane; `None` on one node. Only ranks that add use it.
        rows: This rank's rows, each [n], flat, contiguous and of one dtype.
        out: [n], takes the sum. May be one of `rows`.
    """

    def __init__(
        self,
        reducer: FusedReducer,
        across_nodes: MpiCommunicator | None,
        tree: ReplicaTree,
        ufunc: np.ufunc,
        rows: Sequence[Array],
        out: Array,
    ) -> None:
        self._slots, self._tree, self._ufunc, self._rows, self._out = reducer.slots, tree, ufunc, rows, out
        self._across, self._reducer = across_nodes, reducer
        self._ranks = tree.topology.nodes[tree.topology.node]
        self._count = _chunk_count(reducer, tree, out.dtype)
        self._starts = range(0, out.size, self._count)
        self._bounds = [chunk_bounds(min(self._count, out.size - start), reducer.lanes) for start in self._starts]
        self._lane = self._slots.rank if self._slots.rank < reducer.lanes else None
        self._views: list[list[Array]] = []

    def run(self) -> None:
        """All-reduce. Collective."""
        own = 0 if self._lane is None else sum(at[self._lane + 1] - at[self._lane] for at in self._bounds)
        of_node, nbytes = [self._tree.num_rows[rank] for rank in self._ranks], self._out.nbytes
        traffic = row_traffic(of_node, self._slots.rank, nbytes, own * self._out.itemsize)
        self._reducer.traffic.add("all_reduce", max(traffic))
        complete(self._steps(), self._reducer.check_peers)

    def _steps(self) -> Generator[int, None, None]:
        """All-reduce. Yields while other ranks have not arrived at a barrier."""
        num_chunks = len(self._starts)
        for at in range(-1 if num_chunks else 0, num_chunks):
            if at + 1 < num_chunks:
                self._stage(at + 1)
            if at >= 0 and self._lane is not None:
                self._add(self._views[at], *self._bounds[at][self._lane : self._lane + 2])
            yield from self._slots.synchronize()
            if at >= 0:
                self._copy_out(at)

    def _stage(self, index: int) -> None:
        """Copy this rank's rows of a chunk into its slot, one after the other."""
        views = self._slots.next_views(self._out.dtype)
        self._views.append(views)
        slot, start = views[self._slots.rank], self._starts[index]
        for row, numbers in enumerate(self._rows):
            part = numbers[start : start + self._count]
            self._slots.write(slot[row * self._count : row * self._count + part.size], part)

    def _add(self, views: Sequence[Array], start: int, stop: int) -> None:
        """Add elements `start` to `stop` of a chunk of all ranks' rows, into the first row of this rank's slot.

        The sum may overwrite a row there, because no other lane reads these elements.
        """
        parts = [
            view[row * self._count + start : row * self._count + stop]
            for rank, view in zip(self._ranks, views, strict=True)
            for row in range(self._tree.num_rows[rank])
        ]
        total = views[self._slots.rank][start:stop]
        fold = self._tree.within_node
        if self._across is None:
            fold.combine(self._ufunc, parts, (total,))
            return
        rows = list(np.empty((fold.num_rows, stop - start), total.dtype))
        fold.combine(self._ufunc, parts, rows)
        order = self._tree.across_nodes, self._tree.num_node_rows
        all_reduce_by_messages(self._across, *order, self._ufunc, rows, total)

    def _copy_out(self, index: int) -> None:
        """Copy the sums of a chunk out of the slots of all lanes."""
        begin = self._starts[index]
        for view, (start, stop) in zip(self._views[index], pairwise(self._bounds[index]), strict=False):
            self._out[begin + start : begin + stop] = view[start:stop]


def _chunk_count(reducer: FusedReducer, tree: ReplicaTree, dtype: np.dtype[Any]) -> int:
    """Return the number of elements of a chunk, the same on all nodes: a slot has room for a chunk of every row."""
    return reducer.slots.slot_bytes // dtype.itemsize // max(tree.num_rows)
