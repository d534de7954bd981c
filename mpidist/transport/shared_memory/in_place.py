"""All-reduce of symmetric arrays, in place: each rank adds a shard where the arrays lie, without copies."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, final

import numpy as np

from mpidist.transport.communicator import Array
from mpidist.transport.native.loading import native
from mpidist.transport.node_memory.staging_slots import BLOCK_BYTES, Slots
from mpidist.transport.node_memory.symmetric import Run
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory.schedule import chunk_bounds

__all__ = ["InPlace"]


@final
class _Block(NamedTuple):
    """Elements to add into `total`, if there are parts, and to copy from there to other places."""

    parts: list[Array]
    total: Array
    others: list[Array]


@final
class InPlace:
    """All-reduces of the same arrays, of which views are made once. Each rank adds a shard of the elements.

    Of S bytes a rank reads S and writes S, block by block, and copies nothing. Where ranks of the node share several
    caches, they add by groups, as in `two_shot.py`, with two barriers more.

    Args:
        groups: The ranks of the node by the cache that they share; `()` for one group, or where there is one target.

    Attributes:
        entered: Bytes that a call reads from the memory of other groups.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        slots: Slots,
        reduction: Reduction,
        divide_by: int,
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        self._slots, self._reduction, self._divide_by, self._runs = slots, reduction, divide_by, runs
        self.entered = 0
        self._phases = self._by_groups(groups) if groups else [self._by_all()]

    def _by_all(self) -> list[_Block]:
        """Return the blocks of this rank's shard."""
        bounds = chunk_bounds(self._count, self._slots.size)
        cut = self._cut(bounds[self._slots.rank], bounds[self._slots.rank + 1])
        return [
            _Block([part[at] for part in run.sources], run.targets[0][at], [other[at] for other in run.targets[1:]])
            for run, at in cut
        ]

    def _by_groups(self, groups: Sequence[Sequence[int]]) -> list[list[_Block]]:
        """Return what is added in this rank's group, then of all groups, and what is copied from the other groups."""
        own = self._slots.rank
        group = next(at for at, ranks in enumerate(groups) if own in ranks)
        members, lanes = groups[group], min(map(len, groups))
        lane = members.index(own)
        if lane >= lanes:
            return [[], [], []]
        start, stop = chunk_bounds(self._count, lanes)[lane : lane + 2]
        parts = [start + bound for bound in chunk_bounds(stop - start, len(groups))]
        peers = [ranks[lane] for ranks in groups]
        within = [
            _Block([run.sources[rank][at] for rank in members], run.targets[own][at], [])
            for run, at in self._cut(start, stop)
        ]
        across = [
            _Block([run.targets[rank][at] for rank in peers], run.targets[own][at], [])
            for run, at in self._cut(parts[group], parts[group + 1])
        ]
        copied = [
            _Block([], run.targets[peer][at], [run.targets[rank][at] for rank in members if rank != peer])
            for peer, bounds in zip(peers, pairwise(parts), strict=True)
            for run, at in self._cut(*bounds)
        ]
        self.entered = sum(block.total.nbytes for block in across) * (len(groups) - 1)
        self.entered += sum(block.total.nbytes for block in copied if len(block.others) == len(members))
        return [within, across, copied]

    @property
    def _count(self) -> int:
        return sum(run.targets[0].size for run in self._runs)

    def _cut(self, start: int, stop: int) -> Iterator[tuple[Run, slice]]:
        """Yield blocks of elements of all runs, of which each stays in the cache."""
        for run in self._runs:
            count = run.targets[0].size
            step = BLOCK_BYTES // run.targets[0].itemsize
            for first in range(max(0, start), min(count, stop), step):
                yield run, slice(first, min(count, stop, first + step))
            start, stop = start - count, stop - count

    def steps(self, has_passed_barrier: bool) -> Generator[int, None, None]:
        """All-reduce. Yields while other ranks have not arrived at a barrier.

        `has_passed_barrier`: the node has passed a barrier since the arrays were written.
        """
        if not has_passed_barrier:
            yield from self._slots.synchronize()
        for number, blocks in enumerate(self._phases):  # groups divide what they have added of all
            self._carry_out(blocks, self._divide_by if number == len(self._phases) // 2 else 1)
            yield from self._slots.synchronize()

    def _carry_out(self, blocks: Sequence[_Block], divide_by: int) -> None:
        is_compiled = native is not None and self._reduction.is_in_order
        op, divisor = self._reduction.op, divide_by * self._reduction.divisor
        for parts, total, others in blocks:
            second = others[0] if len(others) == 1 else None
            if parts and not (is_compiled and native.combine(op, parts, total, divisor, second)):
                self._reduction.combine_and_divide(parts, total, divide_by)
            elif parts and second is not None:  # written in the same pass over the memory
                continue
            for other in others:
                np.copyto(other, total)
