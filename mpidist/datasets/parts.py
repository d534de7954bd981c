"""The parts of a step's batch, one for each replica of this rank: filled up, joined, put on devices, described."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist import nest
from mpidist.replicas import Replicas
from mpidist.transport import arrays
from mpidist.transport.devices import Device
from mpidist.values import Contributions, PerReplica, join_components

__all__ = ["MISSING", "ArraySpec", "element_spec_of", "empty_like", "join_parts", "put_on_devices"]

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


@final
class ArraySpec(NamedTuple):
    """Shape and dtype of one array of the batches. `None` in the shape is a length that may differ between batches."""

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


def element_spec_of(batches: Iterable[Any], parts_of: Callable[[Any], Sequence[Any]]) -> Any:
    """Return the form of a batch, as one replica gets it: a nest with an `ArraySpec` for each array. Local.

    Args:
        batches: The batches of a data set. Their `element_spec` is returned, if they have one; else a pass is begun.
        parts_of: Returns the parts of a batch, one for each replica of this rank.

    Raises:
        ValueError: If there is no batch.
    """
    spec = getattr(batches, "element_spec", None)
    if spec is not None:
        return spec
    for batch in batches:
        return nest.map_structure(_spec_of, next(part for part in parts_of(batch) if part is not MISSING))
    raise ValueError("an empty data set has no element_spec")


def _spec_of(leaf: Any) -> ArraySpec:
    shape = tuple(getattr(leaf, "shape", ()))
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return ArraySpec((None, *shape[1:]) if shape else (), dtype)
