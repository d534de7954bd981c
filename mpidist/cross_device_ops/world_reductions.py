"""Reductions of a flat buffer over all ranks at once, as their communicator makes them."""

from __future__ import annotations

from typing import Any

from mpidist.transport import Levels, Reduction, ring_all_reduce

__all__ = ["all_reduce_of_world", "reduce_to_root", "ring_of_world"]


def all_reduce_of_world(levels: Levels, buffer: Any, reduction: Reduction) -> None:
    """Leave the reduction in every rank's buffer, added in the order that `reduction` asks for."""
    levels.world.all_reduce(buffer, reduction)


def ring_of_world(levels: Levels, buffer: Any, reduction: Reduction) -> None:
    """Leave the reduction in every rank's buffer, by way of a ring. 2 S (P - 1) / P bytes a rank."""
    ring_all_reduce(levels.world, buffer, reduction)


def reduce_to_root(levels: Levels, buffer: Any, reduction: Reduction, root: int) -> None:
    """Leave the reduction of all ranks' buffers in the root's, the transport's own way. S bytes a rank."""
    levels.world.reduce(buffer, reduction, root)
