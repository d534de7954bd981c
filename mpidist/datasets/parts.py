"""The parts of a step's batch, one for each replica of this rank: filled up, joined, put on devices, described."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist import nest
from mpidist.replicas import Replicas
from mpidist.transport import arrays
from mpidist.transport.devices import Device
from mpidist.values import Contributions, PerReplica, join_components

__all__ = ["MISSING", "ArraySpec", "empty_like", "join_parts", "put_on_devices", "spec_of"]

MISSING: Final = object()  # takes the place of the part of a replica whose own batches have ended


def empty_like(leaf: Any) -> Any:
    """Return an array like a leaf of a batch, but of length 0 on axis 0. A number counts as one row."""
    if not hasattr(leaf, "shape") or leaf.shape == ():
        return np.empty(0, np.asarray(leaf).dtype)
    return leaf[:0]


def join_parts(parts: Sequence[Any], replicas: Replicas) -> Any:
    """Join the parts of this rank's replicas, of which none is missing, into a nest of `PerReplica` values.

    If each rank is one replica, its part stays bare. Nests of different forms are refused.
    """
    if replicas.tree is None:
        return parts[0]
    Contributions(parts).flatten(replicas.ids_here)  # refuses different forms
    return join_components(parts)


def put_on_devices(batch: Any, devices: Sequence[Device]) -> Any:
    """Copy the host arrays of a joined batch to the GPUs of this rank's replicas; the first is current then."""

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica):
            return _put_on(leaf, devices[0])
        return PerReplica([_put_on(part, device) for part, device in zip(leaf.values, devices, strict=True)])

    placed = nest.map_structure(put, batch)
    devices[0].use()
    return placed


def _put_on(leaf: Any, device: Device) -> Any:
    device.use()
    return arrays.to_device(leaf) if device.is_gpu and isinstance(leaf, np.ndarray) else leaf


@final
class ArraySpec(NamedTuple):
    """Shape and dtype of one array of the batches. `None` in the shape is a length that may differ between batches."""

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


def spec_of(leaf: Any) -> ArraySpec:
    """Return the form of a leaf of a batch, of any number of rows."""
    shape = tuple(getattr(leaf, "shape", ()))
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return ArraySpec((None, *shape[1:]) if shape else (), dtype)
