"""One-shot all-reduce through shared memory: after one barrier, every rank adds all elements itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from mpidist.transport.communicator import Array
from mpidist.transport.node_memory.staging_slots import Slots

__all__ = ["OneShot"]


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
