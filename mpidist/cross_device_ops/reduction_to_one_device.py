"""Everything to one rank, added there, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

from mpidist.collectives import ranks_of
from mpidist.cross_device_ops.cross_device_ops import CrossDeviceOps
from mpidist.transport import Levels, Reduction

__all__ = ["ReductionToOneDevice"]


@final
class ReductionToOneDevice(CrossDeviceOps):
    """Add at one rank, in rank order, and send the result to the destinations.

    Rank order means the same bits however the ranks are placed on nodes. With P ranks and S bytes, 2 calls:
    a reduction to the root, S bytes, and a broadcast, S bytes, both over all ranks. With an `accumulation_fn`, a
    gather takes the reduction's place: S (P - 1) bytes into the root.

    Args:
        reduce_to_device: The rank that adds: a rank number or a device string with one, `"/rank:1"`. By default
            the first destination.
        accumulation_fn: Adds a list of flat arrays [n], one of each rank in rank order, and returns [n]. It must
            be elementwise, because arrays travel packed. By default their sum. The function takes the place of the
            sum in SUM and MEAN, with `reproducible=True` as well; a ring is refused. PROD, MIN and MAX do without.

    Raises:
        TypeError: If `accumulation_fn` cannot be called.

    Tying the algorithm to ranks, as a strategy does, raises `ValueError` if `reduce_to_device` means no single one.
    """

    def __init__(
        self, reduce_to_device: int | str | None = None, accumulation_fn: Callable[[list[Any]], Any] | None = None
    ) -> None:
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise TypeError(f"accumulation_fn must be a function of a list of arrays, got {accumulation_fn!r}")
        self._device = reduce_to_device
        self._accumulation_fn = accumulation_fn
        super().__init__(reduce_to_root=self._add_at, is_replaceable=accumulation_fn is None)

    @property
    def configuration(self) -> tuple[Any, ...]:
        """What must be equal on all ranks."""
        return type(self).__name__, self._device, self._accumulation_fn is not None, self._options

    def require_ranks(self, size: int) -> None:
        """Refuse a device that means no single rank of `size`, with a `ValueError`. Local."""
        if self._device is not None and len(ranks_of(self._device, size)) != 1 < size:
            raise ValueError(f"reduce_to_device must mean one rank, got {self._device!r}")

    def _all_reduce(self, levels: Levels, buffer: Any, reduction: Reduction) -> None:
        self._add_at(levels, buffer, reduction, root=0)
        levels.world.broadcast(buffer, 0)

    def _add_at(self, levels: Levels, buffer: Any, reduction: Reduction, root: int) -> None:
        adder = root if self._device is None else ranks_of(self._device, levels.world.size)[0]
        if self._accumulation_fn is None or reduction.op != "sum":
            levels.world.reduce(buffer, replace(reduction, in_rank_order=True), adder)
        else:
            rows = levels.world.gather(buffer, adder)
            if rows is not None:
                total = self._accumulation_fn(list(rows))
                buffer[...] = total if reduction.divisor == 1 else total / reduction.divisor
        if adder != root:
            _move(levels, buffer, adder, root)


def _move(levels: Levels, buffer: Any, source: int, to: int) -> None:
    if levels.world.rank == source:
        levels.world.send_receive(buffer, to, buffer[:0], to)
    elif levels.world.rank == to:
        levels.world.send_receive(buffer[:0], source, buffer, source)
