"""The staging memory of a node: a few slots for each rank, used in turn, which all ranks of the node read."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Final, final

import numpy as np

from mpidist.transport.communicator import Array
from mpidist.transport.mpi.library import Intracomm
from mpidist.transport.node_memory.barrier import Fence, make_barrier
from mpidist.transport.node_memory.window import LINE_BYTES, SharedWindow
from mpidist.transport.waiting import complete

__all__ = ["BLOCK_BYTES", "Slots"]

BLOCK_BYTES: Final = 128 << 10  # what is added, divided and copied to several places while it is in the cache

# A slot is read until two barriers after its own, or three if a deadline adds one; then it can be filled again.
_LEAST_SLOTS: Final = 4


@final
class Slots:
    """Slots in a shared window, and the barrier after which a slot can be read, or filled again.

    A chunk is copied into the slot that belongs to the next barrier: the number of the barrier, modulo the number of
    slots, on all ranks. Memory: `4 + depth` slots for each rank, however much is sent through the slots.

    Args:
        comm: The ranks of the node, or `None` for a node of one.
        slot_bytes: A multiple of `LINE_BYTES`.
        depth: The number of additional barriers for which a slot is in use.
    """

    def __init__(self, comm: Intracomm | None, slot_bytes: int, depth: int = 0) -> None:
        self.rank = 0 if comm is None else comm.Get_rank()
        self.size = 1 if comm is None else comm.Get_size()
        self.slot_bytes = slot_bytes
        self.depth = depth
        self.num_slots = _LEAST_SLOTS + depth
        self._window = SharedWindow(comm, LINE_BYTES + self.num_slots * slot_bytes)
        self._fence = Fence() if self.size > 1 else None
        self.barrier = make_barrier(self._window, self.rank, None if self._fence is None else self._fence.sync)
        self._copy = getattr(self.barrier, "copy", None)  # of compiled code
        self._views: dict[np.dtype[Any], list[list[Array]]] = {}
        self._blocks: dict[np.dtype[Any], Array] = {}

    def write(self, into: Array, source: Array, is_far: bool = False) -> None:
        """Copy an array to memory that other ranks of the node read, past the caches where that takes less.

        `is_far`: or to memory that lies in no cache.
        """
        if self._copy is None or not self._copy(into, source, is_far):
            into[...] = source

    @property
    def streams(self) -> bool:
        """Whether `write` writes past the caches at the moment, as ranks share none."""
        return self._copy is not None and self.barrier.streams  # type: ignore[attr-defined]

    def block(self, dtype: np.dtype[Any]) -> Array:
        """View private memory that stays in the cache: flat, for what `write` copies next."""
        block = self._blocks.get(dtype)
        if block is None:
            block = self._blocks[dtype] = np.empty(BLOCK_BYTES // dtype.itemsize, dtype)
        return block

    def next_views(self, dtype: np.dtype[Any]) -> list[Array]:
        """View the slot of the next barrier: [ranks], flat, each rank's whole slot."""
        return (self._views.get(dtype) or self.views(dtype))[(self.barrier.count + 1) % self.num_slots]

    def views(self, dtype: np.dtype[Any]) -> list[list[Array]]:
        """View all slots: [slots][ranks]."""
        views = self._views.get(dtype)
        if views is None:
            views = self._views[dtype] = [self._view(slot, dtype) for slot in range(self.num_slots)]
        return views

    def pass_barrier(self, check_peers: Callable[[], None]) -> None:
        """Pass a barrier. `check_peers`: as in `waiting.complete`."""
        self.barrier.post()
        if not self.barrier.has_passed():
            complete(self._wait(), check_peers)

    def synchronize(self) -> Generator[int, None, None]:
        """Pass a barrier. Yields while other ranks have not arrived."""
        self.barrier.post()
        return self._wait()

    def free(self) -> None:
        """Give back the memory, even if arrays refer to it. Local; no rank may use its slots any more."""
        self._views.clear()
        self._window.discard()
        if self._fence is not None:
            self._fence.free()

    def _wait(self) -> Generator[int, None, None]:
        while not self.barrier.has_passed():
            yield self.barrier.count

    def _view(self, slot: int, dtype: np.dtype[Any]) -> list[Array]:
        start = LINE_BYTES + slot * self.slot_bytes
        whole = self.slot_bytes - self.slot_bytes % dtype.itemsize
        return [part[start : start + whole].view(dtype) for part in self._window.parts]
