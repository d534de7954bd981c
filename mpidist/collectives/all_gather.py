"""All-gather: arrays of all ranks, concatenated in rank order."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from typing import Any, final

import numpy as np

from mpidist import nest
from mpidist.collectives.arguments import (
    Arguments,
    Operands,
    agreed_call,
    axis_of,
    host_sizes,
    native_dtype,
    replica_components,
    require_memory,
    require_values,
)
from mpidist.errors import InvalidArgumentError
from mpidist.nest import array_names, form_text
from mpidist.options import CommunicationOptions
from mpidist.replicas import Replicas
from mpidist.transport import SyncGroup, arrays, mark_shared, node_bytes, size_text, wait_for_devices
from mpidist.values import Contributions, contributions

__all__ = ["all_gather"]

Array = np.ndarray[Any, Any]


@final
class _AllGather(Arguments):
    """Arrays to concatenate. Lengths along the axis may differ between ranks: `variant` is a digest of them.

    Attributes:
        lengths: The lengths along the axis.
        room: How many bytes of results this rank may have in host memory.
    """

    def __init__(self, group: SyncGroup, call: str, value: Any, axis: int, replicas: Replicas) -> None:
        self.axis = axis
        leaves_of_replicas, self.value, self.structure = _leaves_of_replicas(value, replicas)
        for leaves in leaves_of_replicas:
            require_values(leaves, self.value)
        first, *others = leaves_of_replicas
        self.operands = Operands.of(first, group.devices, call)
        if others:
            if replicas.has_several_gpus:
                wait_for_devices(replicas.devices)
            arrays_of_replicas = [self.operands.arrays, *(Operands(leaves).arrays for leaves in others)]
            joined = [_concatenated(arrays, axis) for arrays in zip(*arrays_of_replicas, strict=True)]
            self.operands = self.operands.with_arrays(joined)
        self.axes = [axis_of(axis, array.shape) for array in self.operands.arrays]
        arrays_and_axes = zip(self.operands.arrays, self.axes, strict=True)
        self.lengths = tuple(_require_gatherable(array).shape[at] for array, at in arrays_and_axes)
        topology, own = group.topology, sum(host_sizes(self.operands.specs, [a.dtype for a in self.operands.arrays]))
        require_memory(own * topology.local_size, topology.local_size)  # of this rank's part alone
        self.room = node_bytes() // topology.local_size
        # Where equal parts of all ranks would not fit, no two ranks are alike: all tell their lengths and room.
        alike = self.lengths, topology.rank if own * topology.size > self.room else None
        digest = group.agreement.fingerprint(f"{call}, lengths", alike, lambda: {"lengths": str(alike)})
        self.variant = digest | 1

    def host_bytes(self, lengths: Array) -> int:
        """Return the bytes of the results in host memory, by the lengths [ranks, arrays]."""
        totals = map(int, lengths.sum(axis=0))
        return sum(
            prod((*spec.shape[:at], total, *spec.shape[at + 1 :])) * spec.dtype.itemsize
            for spec, at, total in zip(self.operands.specs, self.axes, totals, strict=True)
            if not spec.device
        )

    def key(self) -> Hashable:
        return repr(self.axis), self.structure, self.operands.key

    def describe(self) -> dict[str, str]:
        fields = {"axis": str(self.axis), "form of the nest": form_text(self.structure)}
        for name, spec, at in zip(array_names(self.structure), self.operands.specs, self.axes, strict=True):
            shape = ",".join("*" if dim == at else str(length) for dim, length in enumerate(spec.shape))
            fields[f"{name} (Shape mismatch off the axis)"] = f"{spec.dtype.name}[{shape}]{' on a GPU' * spec.device}"
        return fields


def all_gather(
    group: SyncGroup,
    call: str,
    value: Any,
    axis: int,
    options: CommunicationOptions,
    replicas: Replicas,
    error: Exception | None = None,
) -> Any:
    """Concatenate every replica's arrays along an axis. Collective.

    One all-gather per array: S - s bytes received, for a result of S bytes of which this rank contributes s. If lengths
    along the axis differ between ranks, the ranks first all-gather the lengths.

    Args:
        group: The ranks.
        call: The name of the call, for errors.
        value: An array, or a nest of them, of at least one dimension; or the nests of all replicas of this rank.
        axis: The axis; negative counts from the end.
        options: Only `timeout_seconds` is used.
        replicas: Which replicas this rank carries.
        error: An error that the caller found on this rank, which all ranks raise; `None` for none.

    Returns:
        A nest like `value`.

    Raises:
        InvalidArgumentError: If the shapes differ off the axis, or a value has no such axis. On every rank.
    """

    def open_arguments() -> _AllGather:
        return _AllGather(group, call, value, axis, replicas)

    with agreed_call(group, call, options, open_arguments, error) as (opened, are_equal):
        if are_equal:
            lengths, shortage = np.array([opened.lengths] * group.topology.size, np.int64), None
        else:
            lengths, shortage = _exchange(group, call, opened)
        results = [
            _gather(group, array, at, lengths[:, index])
            for index, (array, at) in enumerate(zip(opened.operands.arrays, opened.axes, strict=True))
            if shortage is None  # on all ranks, or on none
        ]
    if shortage is not None:
        raise shortage
    return nest.rebuild(opened.value, opened.operands.restore(results))


def _exchange(group: SyncGroup, call: str, opened: _AllGather) -> tuple[Array, MemoryError | None]:
    """Tell all ranks the lengths, and how many bytes of results this rank may have. Collective.

    Returns:
        The lengths along the axis [ranks, arrays], and the error of all ranks if a node is too small, else `None`.
    """
    of_ranks = np.empty((group.topology.size, len(opened.lengths) + 1), np.int64)
    of_ranks[group.topology.rank] = *opened.lengths, opened.room
    group.levels.world.all_gather(of_ranks.reshape(-1))
    lengths, room = of_ranks[:, :-1], of_ranks[:, -1]
    nbytes, rank = opened.host_bytes(lengths), int(room.argmin())
    if nbytes <= room[rank]:
        return lengths, None
    error = MemoryError(
        f"{call}: the results of one rank need {size_text(nbytes)} of new memory, and rank {rank}'s part of its node's "
        f"memory is {size_text(int(room[rank]))}; pass fewer numbers at a time, or run fewer ranks on a node"
    )
    mark_shared(error, group.agreement.ranks)
    return lengths, error


def _leaves_of_replicas(value: Any, replicas: Replicas) -> tuple[list[list[Any]], Any, nest.Structure]:
    """Return [replicas of this rank][leaves], a nest of their form, and the form."""
    if isinstance(value, Contributions):
        of_replicas, structure = value.flatten(replicas.ids_here)
        return of_replicas, value.nests[0], structure
    if replicas.tree is None:
        value = contributions(value)
        leaves, structure = nest.flatten(value)
        return [leaves], value, structure
    leaves, structure = nest.flatten(value)
    components = [replica_components("gather", leaf, replicas) for leaf in leaves]  # [leaves][replicas]
    of_replicas = [[of_leaf[at] for of_leaf in components] for at in range(replicas.num_here)]
    return of_replicas, nest.rebuild(value, of_replicas[0]), structure


def _concatenated(parts: Sequence[Any], axis: int) -> Any:
    """Concatenate the arrays of this rank's replicas."""
    first = parts[0]
    at = axis_of(axis, first.shape)
    for part in parts:
        if part.dtype != first.dtype or _off_axis(part, at) != _off_axis(first, at):
            raise InvalidArgumentError(
                f"Shape mismatch off axis {axis}: replicas of this rank pass {first.dtype.name}{list(first.shape)} and "
                f"{part.dtype.name}{list(part.shape)}"
            )
    lengths = [_require_gatherable(part).shape[at] for part in parts]
    shape = (*first.shape[:at], sum(lengths), *first.shape[at + 1 :])
    joined = arrays.empty(shape, native_dtype(first.dtype), arrays.is_device(first))
    start = 0
    for part, length in zip(parts, lengths, strict=True):
        joined.swapaxes(0, at)[start : start + length] = part.swapaxes(0, at)
        start += length
    return joined


def _off_axis(array: Any, axis: int) -> tuple[int, ...]:
    return (*array.shape[:axis], -1, *array.shape[axis + 1 :])


def _gather(group: SyncGroup, array: Any, axis: int, lengths: Array) -> Any:
    """Gather one array. Gathered with the axis in front, so that the part of every rank is contiguous."""
    device = arrays.is_device(array)
    world = group.levels_of(device).world
    moved = array.swapaxes(0, axis)
    row_size = int(np.prod(moved.shape[1:], dtype=np.int64))
    bounds = [0, *(int(bound) * row_size for bound in np.cumsum(lengths))]
    shape, dtype = (int(lengths.sum()), *moved.shape[1:]), native_dtype(array.dtype)
    gathered = group.result_memory.empty(shape, dtype, device)
    flat = gathered.reshape(-1)
    own = flat[bounds[world.rank] : bounds[world.rank + 1]].reshape(moved.shape)
    own[...] = moved
    world.all_gather(flat, bounds)
    result = gathered.swapaxes(0, axis)
    return result if result.flags.c_contiguous else result.copy()


def _require_gatherable(array: Any) -> Any:
    """Return an array, unless ranks cannot gather its dtype."""
    dtype = array.dtype
    if dtype.hasobject or dtype.names is not None or dtype.kind in "USM" or dtype.kind == "m":
        raise InvalidArgumentError(f"cannot gather an array of dtype {dtype.name}; needed numbers or booleans")
    return array
