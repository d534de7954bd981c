"""What every rank has already, taken out of a reduction: its mean, minimum and maximum are itself."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from mpidist import nest
from mpidist.options import ReduceOp
from mpidist.transport import SyncGroup
from mpidist.values import any_distributed, contribution, is_mirrored, require_contributions

__all__ = ["NOTHING_KEPT", "Kept", "put_together", "take_apart"]

Kept = Mapping[int, Any]  # a leaf's place in the nest -> this rank's copy of it
NOTHING_KEPT: Final[Kept] = MappingProxyType({})


def take_apart(op: ReduceOp, value: Any, group: SyncGroup) -> tuple[list[Any], nest.Structure, Kept]:
    """List what has to travel of a nest, and keep what is mirrored.

    Args:
        op: The reduction.
        value: The nest.
        group: The ranks.

    Returns:
        The leaves that travel, the form of the nest, and what was kept.

    Raises:
        ValueError: If what is mirrored over several ranks is to be summed or multiplied.
    """
    if type(value) is np.ndarray:
        return [value], nest.LEAF, NOTHING_KEPT
    leaves, structure = nest.flatten(value)
    if not any_distributed(leaves):
        return leaves, structure, NOTHING_KEPT
    require_contributions(op, leaves, group)
    kept = {at: _copied(contribution(leaf)) for at, leaf in enumerate(leaves) if is_mirrored(leaf, group)}
    if not kept:
        return leaves, structure, NOTHING_KEPT
    return [leaf for at, leaf in enumerate(leaves) if at not in kept], structure, kept


def put_together(value: Any, results: list[Any], kept: Kept) -> Any:
    """Build a nest of the results of what travelled and of what was kept."""
    if not kept:
        return nest.rebuild(value, results)
    rest = iter(results)
    return nest.rebuild(value, [kept[at] if at in kept else next(rest) for at in range(len(results) + len(kept))])


def _copied(own: Any) -> Any:
    """Copy an array, so that a result is nobody else's."""
    return own.copy() if hasattr(own, "dtype") and hasattr(own, "copy") else own
