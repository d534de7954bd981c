"""The parts of a step's batch, one for each replica of this rank: filled up, joined and put on devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from mpidist import nest
from mpidist.replicas import Replicas
from mpidist.transport import Device, arrays
from mpidist.values import Contributions, PerReplica, join_components

__all__ = ["MISSING", "empty_like", "join_parts", "put_on_devices"]

MISSING: Final = object()  # takes the place of the part of a replica whose own batches have ended


def empty_like(leaf: Any) -> Any:
    """Return an array like a leaf of a batch, but of length 0 on axis 0. A number counts as one row."""
    if not hasattr(leaf, "shape") or leaf.shape == ():
        return np.empty(0, np.asarray(leaf).dtype)
    return leaf[:0]


def join_parts(parts: Sequence[Any], replicas: Replicas) -> Any:
    """Join the parts of this rank's replicas, of which none is missing, into a nest of `PerReplica` values.

    If each rank is one replica, its part stays bare.

    Raises:
        InvalidArgumentError: If the parts of two replicas are nests of different forms.
    """
    if replicas.tree is None:
        return parts[0]
    Contributions(parts).flatten(replicas.ids_here)  # refuses different forms
    return join_components(parts)


def put_on_devices(batch: Any, devices: Sequence[Device]) -> Any:
    """Copy the arrays of a batch that are in host memory to the GPUs of this rank's replicas.

    Args:
        batch: What `join_parts` returned.
        devices: The device of each replica of this rank. The first one is current afterwards.
    """

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica):
            return _put(leaf)
        return PerReplica([_put_on(part, device) for part, device in zip(leaf.values, devices, strict=True)])

    placed = nest.map_structure(put, batch)
    if len(devices) > 1:
        devices[0].use()
    return placed


def _put_on(leaf: Any, device: Device) -> Any:
    device.use()
    return _put(leaf) if device.is_gpu else leaf


def _put(leaf: Any) -> Any:
    return arrays.to_device(leaf) if isinstance(leaf, np.ndarray) else leaf
