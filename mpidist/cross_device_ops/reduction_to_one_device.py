"""All-reduce through one rank: reduce to that rank, then broadcast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, final

from mpidist.collectives.arguments.destinations import ranks_of, send_to
from mpidist.cross_device_ops.cross_device_ops import CrossDeviceOps
from mpidist.transport import arrays
from mpidist.transport.group.levels import Levels
from mpidist.transport.reduction import Reduction
from mpidist.transport.text import value_text

__all__ = ["ReductionToOneDevice"]

_KINDS: Final = {"i": 0, "u": 0, "f": 1, "c": 2}  # a total of a later kind does not fit into arrays of an earlier one


@final
class ReductionToOneDevice(CrossDeviceOps):
    """Add at one rank, in rank order, and send the result to the destinations.

    Rank order gives the same bits on any placement of ranks on nodes. With P ranks and S bytes, 2 calls: a reduction to
    the root, S bytes, and a broadcast, S bytes, both over all ranks. With an `accumulation_fn`, a message of each other
    rank takes the place of the reduction: S (P - 1) bytes into the root.

    Args:
        reduce_to_device: The rank that adds: a rank number or a device string with a rank, `"/rank:1"`. By default
            the first destination.
        accumulation_fn: Takes a list of flat arrays [n], one per rank in rank order, and returns [n]. It must be
            elementwise, because arrays are packed. It takes the place of the sum in SUM and MEAN, also with
            `reproducible=True`; `implementation="ring"` is refused. PROD, MIN and MAX do not call it. By default the
            sum.

    Raises:
        TypeError: If `accumulation_fn` cannot be called.

    Binding the algorithm to ranks, as a strategy does, raises `ValueError` if `reduce_to_device` is not one rank. A
    call raises it on the adding rank, if `accumulation_fn` returns no such array, and `PeerFailedError` on others.
    """

    def __init__(
        self, reduce_to_device: int | str | None = None, accumulation_fn: Callable[[list[Any]], Any] | None = None
    ) -> None:
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise TypeError(f"accumulation_fn must be a function of a list of arrays, got {accumulation_fn!r}")
        self._device = reduce_to_device
        self._accumulation_fn = accumulation_fn
        super().__init__(reduce_to_root=self._reduce_at, is_replaceable=accumulation_fn is None)

    @property
    def _configuration(self) -> tuple[Any, ...]:
        return type(self).__name__, self._device, self._accumulation_fn is not None

    def _require_ranks(self, size: int) -> None:
        if self._device is not None and len(ranks_of(self._device, size)) != 1 < size:
            raise ValueError(f"reduce_to_device must mean one rank, got {self._device!r}")

    def _all_reduce(self, levels: Levels, buffer: Any, reduction: Reduction) -> None:
        self._reduce_at(levels, buffer, reduction, root=0)
        levels.world.broadcast(buffer, 0)

    def _reduce_at(self, levels: Levels, buffer: Any, reduction: Reduction, root: int) -> None:
        adding_rank = root if self._device is None else ranks_of(self._device, levels.world.size)[0]
        if self._accumulation_fn is None or reduction.op != "sum":
            levels.world.reduce(buffer, replace(reduction, in_rank_order=True), adding_rank)
        else:
            parts = _parts_of_all(levels, buffer, adding_rank)
            if parts:
                total = _checked(self._accumulation_fn(parts), buffer)
                buffer[...] = total if reduction.divisor == 1 else total / reduction.divisor
        if adding_rank != root:
            send_to(levels.world, buffer, adding_rank, [root])


def _checked(total: Any, like: Any) -> Any:
    """Return what `accumulation_fn` has returned; refuse what is no array like its arguments."""
    kind = getattr(getattr(total, "dtype", None), "kind", "")
    if getattr(total, "shape", None) == like.shape and _KINDS.get(kind, 0) <= _KINDS.get(like.dtype.kind, 2):
        return total
    got = f"{total.dtype.name}{list(total.shape)}" if kind else value_text(total)
    hint = " (is a `return` missing?)" if total is None else ""
    needed = f"needed an array like those it takes, {like.dtype.name}{list(like.shape)}"
    raise ValueError(f"accumulation_fn returned {got}{hint}; {needed}")


def _parts_of_all(levels: Levels, buffer: Any, root: int) -> list[Any]:
    """Return the arrays of all ranks, in rank order, at the root; none at other ranks. Collective."""
    rank, parts = levels.world.rank, [buffer] * levels.world.size
    for source in range(levels.world.size):
        if source != root:
            if rank == root:
                parts[source] = arrays.empty(buffer.shape, buffer.dtype, arrays.is_device(buffer))
            send_to(levels.world, parts[source], source, [root])
    return parts if rank == root else []
