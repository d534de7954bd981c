"""Arrays of all ranks, concatenated in rank order."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidist import nest
from mpidist.collectives.arguments import Operands
from mpidist.collectives.axes import axis_of
from mpidist.collectives.describing import specs_text
from mpidist.collectives.leaves import require_values
from mpidist.errors import InvalidArgumentError
from mpidist.nest import array_names, form_text
from mpidist.options import CommunicationOptions
from mpidist.transport import Joining, SyncGroup, arrays
from mpidist.values import open_nest

__all__ = ["all_gather"]


def all_gather(
    group: SyncGroup,
    call: str,
    value: Any,
    axis: int,
    options: CommunicationOptions,
    error: Exception | None = None,
) -> Any:
    """Concatenate every rank's arrays along an axis. Collective.

    One all-gather per array: S - s bytes in, for a result of S bytes of which this rank contributes s; before them one
    message with the lengths along the axis, if those differ.

    Args:
        group: The ranks.
        call: What errors call it.
        value: An array, or a nest of them, of at least one dimension.
        axis: The axis; negative counts from the end.
        options: `timeout_seconds` counts.
        error: What is known to be wrong with this rank's arguments: it is raised on all ranks.

    Returns:
        A nest like `value`.

    Raises:
        InvalidArgumentError: If the shapes differ off the axis, or a value has no such axis. On every rank.
    """
    structure: nest.Structure = nest.LEAF
    operands, fingerprint = Operands([]), 0
    axes: list[int] = []
    lengths: tuple[int, ...] = ()
    word = 1

    def describe() -> dict[str, str]:
        fields = {"axis": str(axis), "form of the nest": form_text(structure)}
        for name, spec, at in zip(array_names(structure), operands.specs, axes, strict=True):
            shape = ",".join("*" if dim == at else str(length) for dim, length in enumerate(spec.shape))
            fields[f"{name} (Shape mismatch off the axis)"] = f"{spec.dtype.name}[{shape}] on {spec.device}"
        return fields

    try:
        value = open_nest(value)
        leaves, structure = nest.flatten(value)
        require_values(leaves, value)
        operands = Operands.of(leaves, group.devices, call)
        axes = [axis_of(axis, array.shape, "concatenate") for array in operands.arrays]
        lengths = tuple(_movable(array).shape[at] for array, at in zip(operands.arrays, axes, strict=True))
        word = group.agreement.fingerprint(f"{call}, lengths", lengths, lambda: {"lengths": str(lengths)}) | 1
        fingerprint = group.agreement.fingerprint(call, (repr(axis), structure, operands.key), describe)
    except Exception as problem:  # whatever it is, the other ranks must learn of it
        error = error or problem
    details = specs_text(operands.specs)
    group.enter(call)
    with group.moving():
        are_even = group.agree(Joining(call, fingerprint, describe, options.timeout_seconds, error, word, details))
        everyone = np.empty((group.topology.size, len(lengths)), np.int64)
        if are_even:
            everyone[:] = lengths
        else:
            everyone[group.topology.rank] = lengths
            group.levels.world.all_gather(everyone.reshape(-1))
        results = [
            _gather(group, array, at, everyone[:, index])
            for index, (array, at) in enumerate(zip(operands.arrays, axes, strict=True))
        ]
    return nest.rebuild(value, operands.restore(results))


def _gather(group: SyncGroup, array: Any, axis: int, lengths: np.ndarray[Any, Any]) -> Any:
    """Gather one array: the axis goes first, so that every rank's part is one run of memory."""
    device = arrays.is_device(array)
    world = group.levels_of(device).world
    moved = array.swapaxes(0, axis)
    row = int(np.prod(moved.shape[1:], dtype=np.int64))
    bounds = [0, *(int(bound) * row for bound in np.cumsum(lengths))]
    native = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
    gathered = arrays.empty((int(lengths.sum()), *moved.shape[1:]), native, device)
    flat = gathered.reshape(-1)
    own = flat[bounds[world.rank] : bounds[world.rank + 1]].reshape(moved.shape)
    own[...] = moved
    world.all_gather(flat, bounds)
    result = gathered.swapaxes(0, axis)
    return result if result.flags.c_contiguous else result.copy()


def _movable(array: Any) -> Any:
    dtype = array.dtype
    if dtype.hasobject or dtype.names is not None or dtype.kind in "USM" or dtype.kind == "m":
        raise InvalidArgumentError(f"cannot gather an array of dtype {dtype.name}; needed numbers or booleans")
    return array
