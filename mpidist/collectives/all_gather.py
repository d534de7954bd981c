"""All-gather: arrays of all ranks, concatenated in rank order."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist import nest
from mpidist.collectives.arguments.destinations import replica_components
from mpidist.collectives.arguments.operands import (
    Operands,
    Spec,
    axis_of,
    host_sizes,
    native_dtype,
    require_memory,
    require_values,
)
from mpidist.collectives.arguments.out_arrays import copy_overwritten, is_target, result_outs, write_outs
from mpidist.collectives.arguments.signature import Arguments, agreed_call
from mpidist.errors import InvalidArgumentError
from mpidist.nest.text import array_names, form_text
from mpidist.options import CommunicationOptions
from mpidist.replicas import Replicas
from mpidist.transport import arrays
from mpidist.transport.devices import wait_for_devices
from mpidist.transport.group.raise_together import ErrorReport, raise_reported
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.host_memory.result_memory import node_bytes
from mpidist.transport.shared_errors import mark_shared
from mpidist.transport.text import size_text
from mpidist.values import Contributions, contributions

__all__ = ["all_gather"]

_SMALL_BYTES: Final = 256 << 10  # memory that hardly lacks: to ask all ranks would take longer than the gather

Array = np.ndarray[Any, Any]


@final
class _Memory(NamedTuple):
    """Memory for one array: `gathered`, with the axis in front, and `result`, a view of it where contiguous."""

    gathered: Any
    result: Any

    @classmethod
    def of(cls, group: SyncGroup, array: Any, axis: int, length: int, out: Any) -> _Memory:
        """Find memory for parts like an array, of a length along the axis in all, in `out` if given. Local."""
        shape, dtype, device = array.swapaxes(0, axis).shape, native_dtype(array.dtype), arrays.is_device(array)
        is_target_of_result = out is not None and is_target(out, group.shared)
        if is_target_of_result and out.swapaxes(0, axis).flags.c_contiguous:
            return cls(out.swapaxes(0, axis), out)
        gathered = group.result_memory.empty((length, *shape[1:]), dtype, device)
        result = gathered.swapaxes(0, axis)
        if is_target_of_result:
            return cls(gathered, out)
        return cls(gathered, result if result.flags.c_contiguous else arrays.empty(result.shape, dtype, device))


@final
class _AllGather(Arguments):
    """Arrays to concatenate. Lengths along the axis may differ between ranks: `variant` is a digest of them.

    Attributes:
        room: How many bytes of results this rank may have in host memory.
        outs: The arrays that take the results, `None` for new ones.
        out_lengths: Their lengths along the axis; none for new ones.
        per_node_indices: The indices of outs that a node shares.
        memory: For results of equal parts of all ranks, made before ranks agree, so that all raise if one lacks memory;
            `None` where there is too little.
    """

    outs: list[Any]
    out_lengths: tuple[int, ...] = ()
    per_node_indices: tuple[int, ...] = ()
    _in_place: Sequence[bool] = ()

    def __init__(self, group: SyncGroup, call: str, value: Any, axis: int, replicas: Replicas, out: Any) -> None:
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
        self.memory, self.outs = None, [None] * len(self.axes)
        if out is None:
            require_memory(own * topology.local_size, topology.local_size)  # of this rank's part alone
            self.room = node_bytes() // topology.local_size
            fits = own * topology.size <= self.room
        else:
            self._open_outs(group, out, replicas)
            self.room = np.iinfo(np.int64).max
            fits = self.out_lengths == tuple([length * topology.size for length in self.lengths])
        if fits:
            with suppress(MemoryError):  # `_allocate_together` tries again, and tells the other ranks
                self.memory = self.allocate(group, np.array([self.lengths] * topology.size, np.int64))
        # Where equal parts of all ranks would not fit, no two ranks are alike: all tell their lengths and room.
        alike = self.lengths, topology.rank if self.memory is None else None
        digest = group.agreement.fingerprint(f"{call}, lengths", alike, lambda: {"lengths": str(alike)})
        self.variant = digest | 1

    def _open_outs(self, group: SyncGroup, out: Any, replicas: Replicas) -> None:
        """Check the arrays that take the results, but for their lengths along the axis. Local."""
        first = out.nests[0] if isinstance(out, Contributions) else out
        flat, specs = nest.flatten(first)[0], []
        for index, (spec, at) in enumerate(zip(self.operands.specs, self.axes, strict=True)):
            shape = getattr(flat[index], "shape", ()) if index < len(flat) else ()
            length = shape[at] if len(shape) == len(spec.shape) else spec.shape[at] * group.topology.size
            specs.append(Spec((*spec.shape[:at], int(length), *spec.shape[at + 1 :]), spec.dtype, spec.device))
        self.outs = outs = result_outs(out, self.structure, specs, replicas)
        self.out_lengths = tuple(spec.shape[at] for spec, at in zip(specs, self.axes, strict=True))
        self.per_node_indices = tuple(index for index, its in enumerate(outs) if group.shared.is_per_node(its))
        values, rank = self.operands.arrays, group.topology.rank
        self._in_place = [*map(partial(_is_own_part, rank), values, outs, self.axes)]
        hidden = [its if is_part else array for array, its, is_part in zip(values, outs, self._in_place, strict=True)]
        apart = copy_overwritten(hidden, outs)
        own = [array if is_part else one for array, one, is_part in zip(values, apart, self._in_place, strict=True)]
        self.operands = self.operands.with_arrays(own)

    def give_up_equal_parts(self) -> None:
        """Prepare for parts of different lengths: values are not where their parts of the outs are. Local."""
        self.memory = None
        if any(self._in_place):
            moved = zip(self.operands.arrays, self._in_place, strict=True)
            self.operands = self.operands.with_arrays([its.copy() if is_part else its for its, is_part in moved])

    def allocate(self, group: SyncGroup, lengths: Array) -> list[_Memory]:
        """Allocate memory for each array, by the lengths [ranks, arrays]. Local."""
        parts = zip(self.operands.arrays, self.axes, lengths.sum(axis=0), self.outs, strict=True)
        return [_Memory.of(group, array, at, int(total), out) for array, at, total, out in parts]

    def host_bytes(self, lengths: Array) -> int:
        """Return the bytes of the results in host memory, by the lengths [ranks, arrays]."""
        totals = map(int, lengths.sum(axis=0))
        return sum(
            prod((*spec.shape[:at], total, *spec.shape[at + 1 :])) * spec.dtype.itemsize
            for spec, at, total in zip(self.operands.specs, self.axes, totals, strict=True)
            if not spec.device
        )

    def key(self) -> Hashable:
        return repr(self.axis), self.per_node_indices, self.structure, self.operands.key

    def describe(self) -> dict[str, str]:
        fields = {
            "axis": str(self.axis),
            "outs that are per-node arrays": ", ".join(f"out {index}" for index in self.per_node_indices) or "none",
            "form of the nest": form_text(self.structure),
        }
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
    out: Any = None,
) -> Any:
    """Concatenate every replica's arrays along an axis, in `out` if given. Collective; errors are raised on every rank.

    One all-gather per array: S - s bytes received, for a result of S bytes of which this rank contributes s. If lengths
    along the axis differ between ranks, the ranks first all-gather the lengths.

    `value` and `out` are nests, or the nests of all replicas of this rank, of which only the first `out` is written.
    """

    def open_arguments() -> _AllGather:
        return _AllGather(group, call, value, axis, replicas, out)

    with agreed_call(group, call, options, open_arguments, error) as (opened, are_equal):
        if are_equal and opened.memory is not None:
            lengths, memory = np.array([opened.lengths] * group.topology.size, np.int64), opened.memory
        else:
            opened.give_up_equal_parts()
            lengths = _exchange(group, call, opened)
            memory = _allocate_together(group, opened, lengths)
        for index, (array, at, own) in enumerate(zip(opened.operands.arrays, opened.axes, memory, strict=True)):
            _gather(group, array, at, lengths[:, index], own)
        if out is not None:
            write_outs(opened.outs, [own.result for own in memory], group.shared)
            arrays.wait_for_writes(opened.outs)
            return out
    return nest.rebuild(opened.value, opened.operands.restore([own.result for own in memory]))


def _exchange(group: SyncGroup, call: str, opened: _AllGather) -> Array:
    """Exchange the lengths, those of outs, and the room; return the lengths [ranks, arrays]. Collective.

    Raises:
        InvalidArgumentError: If an out of a rank has another length than its result. On all ranks.
        MemoryError: If a node is too small. On all ranks.
    """
    count = len(opened.lengths)
    of_ranks = np.empty((group.topology.size, 2 * count + 1), np.int64)
    of_ranks[group.topology.rank] = *opened.lengths, *(opened.out_lengths or (-1,) * count), opened.room
    group.levels.world.all_gather(of_ranks.reshape(-1))
    lengths, out_lengths, room = of_ranks[:, :count], of_ranks[:, count:-1], of_ranks[:, -1]
    totals = lengths.sum(axis=0)
    for rank, index in zip(*np.nonzero((out_lengths != totals) & (out_lengths >= 0)), strict=True):
        refusal = InvalidArgumentError(
            f"{call}: out {index} of rank {rank} has length {out_lengths[rank, index]} along axis {opened.axis}, and "
            f"the parts of all ranks together have {totals[index]}"
        )
        mark_shared(refusal, group.agreement.ranks)
        raise refusal
    nbytes, rank = opened.host_bytes(lengths), int(room.argmin())
    if nbytes <= room[rank]:
        return lengths
    error = MemoryError(
        f"{call}: the results of one rank need {size_text(nbytes)} of new memory, and rank {rank}'s part of its node's "
        f"memory is {size_text(int(room[rank]))}; pass fewer numbers at a time, or run fewer ranks on a node"
    )
    mark_shared(error, group.agreement.ranks)
    raise error


def _allocate_together(group: SyncGroup, opened: _AllGather, lengths: Array) -> list[_Memory]:
    """Allocate the memory on all ranks, or raise on all ranks if one has too little. Collective."""
    if 0 < opened.host_bytes(lengths) < _SMALL_BYTES:  # the same on all ranks
        return opened.allocate(group, lengths)
    memory, error = [], None
    try:
        memory = opened.allocate(group, lengths)
    except MemoryError as problem:
        error = problem
    if group.agreement.all_reduce_or(error is not None):
        reports = group.agreement.all_gather_object(None if error is None else ErrorReport.of(error))
        raise_reported(error, reports, group)
    return memory


def _leaves_of_replicas(value: Any, replicas: Replicas) -> tuple[list[list[Any]], Any, nest.Structure]:
    """Return [replicas of this rank][leaves], a nest of their form, and the form."""
    if isinstance(value, Contributions):
        of_replicas, structure = value.flatten(replicas.ids_here)
        return of_replicas, value.nests[0], structure
    if replicas.are_bare:
        value = contributions(value)
        leaves, structure = nest.flatten(value)
        return [leaves], value, structure
    leaves, structure = nest.flatten(value)
    components = [replica_components("gather", leaf, replicas) for leaf in leaves]  # [leaves][replicas]
    of_replicas = [[of_leaf[at] for of_leaf in components] for at in range(replicas.num_here)]
    return of_replicas, nest.rebuild(value, of_replicas[0]), structure


def _is_own_part(rank: int, array: Any, out: Any, axis: int) -> bool:
    """Whether a value is this rank's part of an array that takes the result, if the parts of all ranks are equal."""
    length = array.shape[axis]
    part = out.swapaxes(0, axis)[rank * length : (rank + 1) * length].swapaxes(0, axis)
    is_like = part.shape == array.shape and part.strides == array.strides and part.dtype == array.dtype
    return is_like and arrays.memory_bounds(part) == arrays.memory_bounds(array)


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


def _gather(group: SyncGroup, array: Any, axis: int, lengths: Array, memory: _Memory) -> None:
    """Gather one array. Gathered with the axis in front, so that the part of every rank is contiguous."""
    world = group.levels_of(arrays.is_device(array)).world
    moved = array.swapaxes(0, axis)
    row_size = int(np.prod(moved.shape[1:], dtype=np.int64))
    bounds = [0, *(int(bound) * row_size for bound in np.cumsum(lengths))]
    flat = memory.gathered.reshape(-1)
    flat[bounds[world.rank] : bounds[world.rank + 1]].reshape(moved.shape)[...] = moved
    world.all_gather(flat, bounds)
    result = memory.gathered.swapaxes(0, axis)
    if not result.flags.c_contiguous:
        memory.result[...] = result


def _require_gatherable(array: Any) -> Any:
    """Return an array, unless ranks cannot gather its dtype."""
    dtype = array.dtype
    if dtype.hasobject or dtype.names is not None or dtype.kind in "USM" or dtype.kind == "m":
        raise InvalidArgumentError(f"cannot gather an array of dtype {dtype.name}; needed numbers or booleans")
    return array
