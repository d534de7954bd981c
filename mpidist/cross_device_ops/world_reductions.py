"""Reductions of a flat buffer by one call on the communicator of all ranks."""

from __future__ import annotations

from typing import Any

from mpidist.transport.group.levels import Levels
from mpidist.transport.mpi.ring import ring_all_reduce
from mpidist.transport.reduction import Reduction

__all__ = ["world_all_reduce", "world_reduce", "world_ring_all_reduce"]


def world_all_reduce(levels: Levels, buffer: Any, reduction: Reduction) -> None:
    """Leave the reduction of all ranks' buffers in every rank's buffer."""
    levels.world.all_reduce(buffer, reduction)


def world_ring_all_reduce(levels: Levels, buffer: Any, reduction: Reduction) -> None:
    """Leave the reduction of all ranks' buffers in every rank's buffer, by a ring. 2 S (P - 1) / P bytes per rank."""
    ring_all_reduce(levels.world, buffer, reduction)


def world_reduce(levels: Levels, buffer: Any, reduction: Reduction, root: int) -> None:
    """Leave the reduction of all ranks' buffers in the root's buffer. S bytes per rank."""
    levels.world.reduce(buffer, reduction, root)
