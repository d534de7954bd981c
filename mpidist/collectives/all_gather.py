"""All-gather: arrays of all ranks, concatenated in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist import nest
from mpidist.collectives.arguments.checked_outs import KnownOuts
from mpidist.collectives.arguments.operands import (
    Operands,
    Spec,
    axis_of,
    host_sizes,
    leaves_of_replicas,
    messages_of,
    native_dtype,
    require_memory,
    specs_along,
    swapped,
    whole_axis,
)
from mpidist.collectives.arguments.out_arrays import copy_overwritten, result_outs
from mpidist.collectives.arguments.signature import Arguments, Form, agreed_call, form_of, move_back
from mpidist.errors import InvalidArgumentError
from mpidist.nest.text import array_names, form_text
from mpidist.options import CommunicationOptions
from mpidist.replicas import Replicas
from mpidist.transport import arrays
from mpidist.transport.agreement.fingerprint import fingerprint_of
from mpidist.transport.communicator import Communicator
from mpidist.transport.devices import wait_for_devices
from mpidist.transport.group.raise_together import ErrorReport, raise_reported
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.host_memory.result_memory import node_bytes
from mpidist.transport.shared_errors import mark_shared
from mpidist.transport.text import size_text
from mpidist.values import Contributions

__all__ = ["all_gather"]

_SMALL_BYTES: Final = 256 << 10  # memory that hardly lacks: to ask all ranks would take longer than the gather

Array = np.ndarray[Any, Any]


@final
class _Plan(NamedTuple):
    """What is known of parts without the other ranks.

    Attributes:
        axis: The axis as the caller counts it.
        lengths: Those of this rank's parts along the axes; `row_sizes`: elements for one step along each.
        bounds: [arrays][ranks + 1], where parts lie in the flat result if those of all ranks are equal.
        room: How many bytes of results this rank may have in host memory; `fits`: whether results of equal parts do.
        messages: The arrays of each message, by index, if the parts of all ranks are equal.
        variants: Digests of the lengths. The second is for lack of memory: no two ranks have it, so all tell theirs.
    """

    axis: int
    lengths: list[int]
    row_sizes: list[int]
    bounds: list[list[int]]
    room: int
    fits: bool
    messages: list[list[int]]
    variants: list[int]


def _form(
    group: SyncGroup, specs: Sequence[Spec], call: str, axis: int, is_new: bool, structure: nest.Structure
) -> Form:
    """Return what follows from the form of an all-gather's arguments; `out_specs` are of equal parts of all ranks."""
    size, num_local, own = group.topology.size, group.topology.local_size, sum(host_sizes(specs))
    axes = [axis_of(axis, spec.shape) for spec in specs]
    fronts = [swapped(_require_gatherable(spec).shape, at) for spec, at in zip(specs, axes, strict=True)]
    if is_new:
        require_memory(own * num_local, num_local)  # of this rank's part alone
    room = node_bytes() // num_local if is_new else np.iinfo(np.int64).max
    lengths, row_sizes = [length for length, *_ in fronts], [prod(row) for _, *row in fronts]
    bounds = [[rank * prod(front) for rank in range(size + 1)] for front in fronts]
    variants = [fingerprint_of((f"{call}, lengths", lengths, rank)) | 1 for rank in (None, group.topology.rank)]
    fields = {"axis": str(axis), "form of the nest": form_text(structure)}
    for name, spec, at in zip(array_names(structure), specs, axes, strict=True):
        shape = ",".join("*" if dim == at else str(length) for dim, length in enumerate(spec.shape))
        fields[f"{name} (Shape mismatch off the axis)"] = f"{spec.dtype.name}[{shape}]{' on a GPU' * spec.device}"
    out_specs = specs_along(axes, specs, [size * length for length in lengths])
    plan = _Plan(axis, lengths, row_sizes, bounds, room, own * size <= room, messages_of(out_specs), variants)
    return Form(call, fields, specs, out_specs, axes, plan)


@final
class _AllGather(Arguments):
    """Arrays to concatenate. Lengths along the axis may differ between ranks: `variant` is a digest of them.

    `operands` are the values of the first replica, `arrays` those of the rank, and `out_specs` those of outs, or of new
    results of equal parts. For these is `memory`, made before ranks agree, so that all raise if one has too little.
    """

    _in_place: Sequence[bool] = ()

    def __init__(self, group: SyncGroup, call: str, value: Any, axis: Any, replicas: Replicas, out: Any) -> None:
        (first, *others), self.value, structure = leaves_of_replicas("gather", value, replicas)
        self.operands = operands = Operands(first, group.devices, call)
        axis = axis if type(axis) is int else whole_axis(axis)
        if others:
            if replicas.has_several_gpus:
                wait_for_devices(replicas.devices)
            arrays_of_replicas = [operands.arrays, *(Operands(leaves).arrays for leaves in others)]
            operands = Operands([_concatenated(parts, axis) for parts in zip(*arrays_of_replicas, strict=True)])
        self.form = form = form_of(_form, group, operands, call, axis, out is None, structure)
        self.plan: _Plan = form.plan
        self.arrays, self.out_specs, self.memory = operands.arrays, form.out_specs, None
        if out is not None:
            self._open_outs(group, out, structure, replicas)
        if self.plan.fits and self.out_specs is form.out_specs:
            with suppress(MemoryError):  # `_allocate_together` tries again, and tells the other ranks
                self.memory = self.allocate(group, form.out_specs, form.axes)
        self.variant = self.plan.variants[self.memory is None]

    def _open_outs(self, group: SyncGroup, out: Any, structure: nest.Structure, replicas: Replicas) -> None:
        """Check the arrays that take the results, but for their lengths along the axis. Local."""
        form, known, nothing = self.form, self.form.known_outs, [None] * len(self.arrays)
        outs, own = nest.flatten(out.nests[0] if isinstance(out, Contributions) else out)
        checked = None if isinstance(out, Contributions) or own != structure else known.find(outs, nothing)
        if checked is None:
            lengths = list(self.plan.lengths)
            for index, (spec, at, one) in enumerate(zip(form.out_specs, form.axes, outs, strict=False)):
                shape = getattr(one, "shape", ())
                lengths[index] = (shape if len(shape) == len(spec.shape) else spec.shape)[at]
            specs = specs_along(form.axes, form.specs, lengths)
            if specs != form.out_specs:
                self.out_specs, known = specs, KnownOuts(specs)
            outs = result_outs(out, structure, specs, replicas)
            checked = known.check(outs, nothing, group.shared)
        self.outs, self.checked = outs, checked
        if not checked.are_apart_from(self.arrays):
            self._keep_apart(group.topology.rank)

    def _keep_apart(self, rank: int) -> None:
        """Copy values that results may overwrite too early, but for those that are this rank's parts of outs. Local."""
        values = self.arrays
        self._in_place = [*map(partial(_is_own_part, rank), values, self.outs, self.form.axes)]
        each = zip(values, self.outs, self._in_place, strict=True)
        apart = copy_overwritten([out if is_part else array for array, out, is_part in each], self.outs)
        each = zip(values, apart, self._in_place, strict=True)
        self.arrays = [array if is_part else one for array, one, is_part in each]

    def give_up_equal_parts(self) -> None:
        """Prepare for parts of different lengths: values are not where their parts of the outs are. Local."""
        if any(self._in_place):
            moved = zip(self.arrays, self._in_place, strict=True)
            self.arrays = [array.copy() if is_part else array for array, is_part in moved]


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

    One all-gather per array, or for several small ones in host memory: S - s bytes received, for a result of S bytes of
    which this rank contributes s. If lengths along the axis differ between ranks, the ranks first all-gather the
    lengths, and then each array alone.

    `value` and `out` are nests, or the nests of all replicas of this rank, of which only the first `out` is written.
    """
    open_arguments = partial(_AllGather, group, call, value, axis, replicas, out)
    with agreed_call(group, call, options, open_arguments, error) as (opened, are_equal):
        form, memory, bounds, messages = opened.form, opened.memory, opened.plan.bounds, opened.plan.messages
        if not are_equal or memory is None:
            opened.give_up_equal_parts()
            lengths = _exchange(group, call, opened)
            memory = _allocate_together(group, opened, specs_along(form.axes, form.specs, lengths.sum(axis=0)))
            bounds = (np.insert(lengths.cumsum(axis=0), 0, 0, axis=0) * opened.plan.row_sizes).T.tolist()
            messages = [[index] for index in range(len(memory))]
        flats = [front.reshape(-1) for front, _ in memory]
        rank = group.topology.rank
        for array, at, ends, flat in zip(opened.arrays, form.axes, bounds, flats, strict=True):
            moved = array.swapaxes(0, at)
            flat[ends[rank] : ends[rank + 1]].reshape(moved.shape)[...] = moved
        for message in messages:
            first = message[0]
            world = group.levels_of(form.specs[first].device).world
            if len(message) > 1:
                _gather_together(world, list(map(flats.__getitem__, message)))
            else:
                world.all_gather(flats[first], bounds[first])
        results = [move_back(front, result, at) for (front, result), at in zip(memory, form.axes, strict=True)]
        if out is not None:
            opened.write_outs(results, group.shared)
            return out
    return nest.rebuild(opened.value, opened.operands.restore(results))


def _gather_together(world: Communicator, flats: Sequence[Array]) -> None:
    """Gather equal parts of several arrays in one message, in place."""
    parts = [flat.reshape(world.size, -1).view(np.uint8) for flat in flats]
    ends = [0, *accumulate(of_ranks.shape[1] for of_ranks in parts)]
    bounds = range(0, world.size * ends[-1] + 1, ends[-1])
    buffer = world.pack_buffer(bounds[-1], np.dtype(np.uint8))
    rows = buffer.reshape(world.size, -1)
    for of_ranks, (start, stop) in zip(parts, pairwise(ends), strict=True):
        rows[world.rank, start:stop] = of_ranks[world.rank]
    world.all_gather(buffer, bounds)
    for of_ranks, (start, stop) in zip(parts, pairwise(ends), strict=True):
        of_ranks[...] = rows[:, start:stop]


def _exchange(group: SyncGroup, call: str, opened: _AllGather) -> Array:
    """Exchange the lengths, those of outs, and the room; return the lengths [ranks, arrays]. Collective.

    Raises:
        InvalidArgumentError: If an out of a rank has another length than its result. On all ranks.
        MemoryError: If a node is too small. On all ranks.
    """
    form, plan, count = opened.form, opened.plan, len(opened.plan.lengths)
    of_ranks = np.empty((group.topology.size, 2 * count + 1), np.int64)
    own = [spec.shape[at] if opened.outs else -1 for spec, at in zip(opened.out_specs, form.axes, strict=True)]
    of_ranks[group.topology.rank] = *plan.lengths, *own, plan.room
    group.levels.world.all_gather(of_ranks.reshape(-1))
    lengths, out_lengths, room = of_ranks[:, :count], of_ranks[:, count:-1], of_ranks[:, -1]
    totals = lengths.sum(axis=0)
    for rank, index in zip(*np.nonzero((out_lengths != totals) & (out_lengths >= 0)), strict=True):
        error: Exception = InvalidArgumentError(
            f"{call}: out {index} of rank {rank} has length {out_lengths[rank, index]} along axis {plan.axis}, and "
            f"the parts of all ranks together have {totals[index]}"
        )
        break
    else:
        nbytes, rank = sum(host_sizes(specs_along(form.axes, form.specs, totals))), int(room.argmin())
        if nbytes <= room[rank]:
            return lengths
        error = MemoryError(
            f"{call}: the results of one rank need {size_text(nbytes)} of new memory, and rank {rank}'s part of its "
            f"node's memory is {size_text(int(room[rank]))}; pass fewer numbers at a time, or run fewer ranks on a node"
        )
    mark_shared(error, group.agreement.ranks)
    raise error


def _allocate_together(group: SyncGroup, opened: _AllGather, specs: Sequence[Spec]) -> list[tuple[Any, Any]]:
    """Allocate the memory on all ranks, or raise on all ranks if one has too little. Collective."""
    if 0 < sum(host_sizes(specs)) < _SMALL_BYTES:  # the same on all ranks
        return opened.allocate(group, specs, opened.form.axes)
    memory, error = [], None
    try:
        memory = opened.allocate(group, specs, opened.form.axes)
    except MemoryError as problem:
        error = problem
    if group.agreement.all_reduce_or(error is not None):
        reports = group.agreement.all_gather_object(None if error is None else ErrorReport.of(error))
        raise_reported(error, reports, group)
    return memory


def _is_own_part(rank: int, array: Any, out: Any, axis: int) -> bool:
    """Whether a value is this rank's part of an array that takes the result, if the parts of all ranks are equal."""
    length = array.shape[axis]
    part = out.swapaxes(0, axis)[rank * length : (rank + 1) * length].swapaxes(0, axis)
    is_like = part.shape == array.shape and part.strides == array.strides and part.dtype == array.dtype
    return is_like and arrays.memory_bounds(part) == arrays.memory_bounds(array)


def _concatenated(parts: Sequence[Any], axis: int) -> Any:
    """Concatenate the arrays of this rank's replicas."""
    first, at = parts[0], axis_of(axis, parts[0].shape)
    dtype = native_dtype(first.dtype)
    for part in parts:
        shapes = [one.shape[:at] + one.shape[at + 1 :] for one in (first, part)]
        if native_dtype(part.dtype) != dtype or part.ndim != first.ndim or shapes[0] != shapes[1]:
            raise InvalidArgumentError(
                f"Shape mismatch off axis {axis}: replicas of this rank pass {first.dtype.name}{list(first.shape)} and "
                f"{part.dtype.name}{list(part.shape)}"
            )
    gathered = [*map(_require_gatherable, parts)]
    return np.concatenate(gathered, axis=at, dtype=dtype, casting="unsafe")


def _require_gatherable(array: Any) -> Any:
    """Return an array, unless ranks cannot gather its dtype."""
    dtype = array.dtype
    if dtype.hasobject or dtype.names is not None or dtype.kind in "USM" or dtype.kind == "m":
        raise InvalidArgumentError(f"cannot gather an array of dtype {dtype.name}; needed numbers or booleans")
    return array
