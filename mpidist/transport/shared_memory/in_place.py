"""All-reduce of symmetric arrays, in place: each rank adds a shard where the arrays lie, without copies."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import final

import numpy as np

from mpidist.transport.communicator import Array
from mpidist.transport.native.loading import native
from mpidist.transport.node_memory.staging_slots import BLOCK_BYTES, Slots
from mpidist.transport.node_memory.symmetric import Run
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory.schedule import chunk_bounds

__all__ = ["InPlace"]


@final
class InPlace:
    """All-reduces of the same arrays, of which views are made once. Each rank adds a shard of the elements.

    Of S bytes a rank reads S and writes S, block by block, and copies nothing.
    """

    def __init__(self, runs: Sequence[Run], slots: Slots, reduction: Reduction, divide_by: int) -> None:
        self._slots, self._reduction, self._divide_by = slots, reduction, divide_by
        self._blocks: list[tuple[list[Array], Array, list[Array]]] = []
        bounds = chunk_bounds(sum(run.targets[0].size for run in runs), slots.size)
        start, stop = bounds[slots.rank], bounds[slots.rank + 1]
        for run in runs:
            count = run.targets[0].size
            self._cut(run, max(0, start), min(count, stop))
            start, stop = start - count, stop - count

    def _cut(self, run: Run, start: int, stop: int) -> None:
        step = BLOCK_BYTES // run.targets[0].itemsize
        for first in range(start, stop, step):
            block = slice(first, min(stop, first + step))
            total, *others = [target[block] for target in run.targets]
            self._blocks.append(([source[block] for source in run.sources], total, others))

    def steps(self, has_passed_barrier: bool) -> Generator[int, None, None]:
        """All-reduce. Yields while other ranks have not arrived at a barrier.

        `has_passed_barrier`: the node has passed a barrier since the arrays were written.
        """
        if not has_passed_barrier:
            yield from self._slots.synchronize()
        is_compiled = native is not None and self._reduction.is_in_order
        op, divide_by = self._reduction.op, self._divide_by * self._reduction.divisor
        for parts, total, others in self._blocks:
            second = others[0] if len(others) == 1 else None
            if not (is_compiled and native.combine(op, parts, total, divide_by, second)):
                self._reduction.combine_and_divide(parts, total, self._divide_by)
            elif second is not None:  # written in the same pass over the memory
                continue
            for other in others:
                np.copyto(other, total)
        yield from self._slots.synchronize()
