"""Reduce-scatter: arrays of all ranks are reduced, and each rank gets its part of the result."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, final

import numpy as np

from mpidist import nest
from mpidist.collectives.arguments import (
    Arguments,
    Operands,
    Spec,
    agreed_call,
    axis_of,
    host_sizes,
    native_dtype,
    require_memory,
    require_values,
    result_arrays,
)
from mpidist.collectives.plans import Arithmetic, wire_and_result_dtypes
from mpidist.nest import array_names, form_text
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.transport import Levels, Reduction, SyncGroup, Topology, arrays, shard_bounds
from mpidist.values import contributions, require_contributions

__all__ = ["reduce_scatter"]


@final
class _ReduceScatter(Arguments):
    """The arguments of a reduce-scatter; `axes` is the axis of each array, counted from the front.

    Attributes:
        results: New arrays for this rank's parts, with the axis in front.
    """

    def __init__(
        self,
        group: SyncGroup,
        call: str,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: int,
        options: CommunicationOptions,
    ) -> None:
        self.axis, self.options = axis, options
        self.op = ReduceOp.of(reduce_op)
        require_contributions(self.op, nest.flatten(value)[0], group, group.topology.size)
        self.value = contributions(value)
        leaves, self.structure = nest.flatten(self.value)
        require_values(leaves, self.value)
        self.operands = Operands.of(leaves, group.devices, call)
        self.axes = [axis_of(axis, array.shape) for array in self.operands.arrays]
        specs, topology = self.operands.specs, group.topology
        dtypes = [wire_and_result_dtypes(self.op, spec.dtype)[1] for spec in specs]
        require_memory(sum(host_sizes(specs, dtypes)) * topology.local_size // topology.size, topology.local_size)
        # Each [this rank's part of the axis, the other axes]. Made now, so that all ranks learn if one lacks memory.
        self.results = result_arrays(
            [_part_of(spec, at, topology) for spec, at in zip(specs, self.axes, strict=True)],
            dtypes,
            group.result_memory,
        )

    def key(self) -> Hashable:
        hints = self.options.reproducible, self.options.compression, self.options.compress_everywhere
        return self.op, repr(self.axis), self.structure, hints, self.operands.key

    def describe(self) -> dict[str, str]:
        fields = {"op": str(self.op), "axis": str(self.axis), "form of the nest": form_text(self.structure)}
        fields |= {"reproducible": str(self.options.reproducible), "compression": str(self.options.compression)}
        fields["compress_everywhere"] = str(self.options.compress_everywhere)
        names = array_names(self.structure)
        return fields | {name: repr(spec) for name, spec in zip(names, self.operands.specs, strict=True)}


def reduce_scatter(
    group: SyncGroup,
    call: str,
    reduce_op: ReduceOp | str,
    value: Any,
    axis: int,
    options: CommunicationOptions,
    error: Exception | None = None,
) -> Any:
    """Reduce arrays over all ranks, and give each rank its part of the result along an axis. Collective.

    One reduce-scatter per array: S - s bytes for an array of S bytes of which this rank gets s. Over K nodes with equal
    numbers of ranks, each node sends S (K - 1) / K bytes to other nodes; with `reproducible`, or on uneven nodes, more.

    Args:
        group: The ranks.
        call: The name of the call, for errors.
        reduce_op: A `ReduceOp` or its name in any case.
        value: An array, or a nest of them, of at least one dimension.
        axis: The axis; negative counts from the end.
        options: Only `timeout_seconds`, `reproducible` and the compression are used.
        error: An error that the caller found on this rank, which all ranks raise; `None` for none.

    Returns:
        A nest like `value`. Rank r gets the r-th part; lengths differ by at most one, longer ones first.

    Raises:
        InvalidArgumentError: If the ranks' arguments differ, or cannot be reduced. On every rank.
    """

    def open_arguments() -> _ReduceScatter:
        return _ReduceScatter(group, call, reduce_op, value, axis, options)

    with agreed_call(group, call, options, open_arguments, error) as (opened, _):
        results = [
            _scatter(group, opened.op, array, at, result, options)
            for array, at, result in zip(opened.operands.arrays, opened.axes, opened.results, strict=True)
        ]
    return nest.rebuild(opened.value, opened.operands.restore(results))


def _part_of(spec: Spec, axis: int, topology: Topology) -> Spec:
    """Return the shape of this rank's part of an array, with the axis in front."""
    rows = shard_bounds(spec.shape[axis], topology.size)
    length = rows[topology.rank + 1] - rows[topology.rank]
    shape = [*spec.shape]
    shape[0], shape[axis] = shape[axis], shape[0]
    return spec._replace(shape=(length, *shape[1:]))


def _scatter(group: SyncGroup, op: ReduceOp, array: Any, axis: int, result: Any, options: CommunicationOptions) -> Any:
    """Reduce one array. Reduced with the axis in front, so that the part of every rank is contiguous."""
    device = arrays.is_device(array)
    levels = group.levels_of(device)
    arithmetic = Arithmetic.of(op, options, levels, by_node=True)
    wire, result_dtype = wire_and_result_dtypes(op, native_dtype(array.dtype))
    moved = array.swapaxes(0, axis)
    rows = shard_bounds(moved.shape[0], levels.world.size)
    reduction, divide_by = arithmetic.reduction(wire)
    shard = result.reshape(-1) if result_dtype == wire else arrays.empty(result.size, wire, device)
    by_level = levels.world.size > levels.within_node.size > 1 and levels.is_even and not arithmetic.rounds_everywhere
    half = arithmetic.half if wire == np.float32 else None
    if device:
        group.devices.compile(levels.kernels_for(wire, half, reduction))
    levels = levels.compressed(half)
    if by_level and not reduction.in_rank_order:
        _scatter_by_levels(levels, group.topology, moved, rows, reduction, shard)
    else:
        row_size = int(np.prod(moved.shape[1:], dtype=np.int64))
        flat, bounds = _flat(moved, wire, device), [bound * row_size for bound in rows]
        levels.world.reduce_scatter(flat, reduction, bounds, shard)
    if divide_by != 1 or result_dtype != wire:
        with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
            np.divide(shard.reshape(result.shape), divide_by, out=result)
    back = result.swapaxes(0, axis)
    return back if back.flags.c_contiguous else back.copy()


def _scatter_by_levels(
    levels: Levels, topology: Topology, moved: Any, rows: Sequence[int], reduction: Reduction, shard: Any
) -> None:
    """Reduce-scatter within nodes, then across nodes: S (K - 1) / K bytes per node, the least for K nodes."""
    # The parts of all ranks with local rank 0 come first, then those with local rank 1, and so on: so the node's
    # reduce-scatter leaves each rank the parts of all ranks with which it reduces across nodes.
    order = [rank for ranks in zip(*topology.nodes, strict=True) for rank in ranks]
    row_size = int(np.prod(moved.shape[1:], dtype=np.int64))
    work = arrays.empty(moved.shape[0] * row_size, shard.dtype, arrays.is_device(moved))
    ends = [0]
    for rank in order:
        part = moved[rows[rank] : rows[rank + 1]]
        ends.append(ends[-1] + part.size)
        work[ends[-2] : ends[-1]].reshape(part.shape)[...] = part
    num_nodes = topology.num_nodes
    node_sums = levels.within_node.reduce_scatter(work, reduction, ends[::num_nodes])
    first = topology.local_rank * num_nodes
    bounds = [end - ends[first] for end in ends[first : first + num_nodes + 1]]
    levels.across_nodes.reduce_scatter(node_sums, reduction.rest, bounds, shard)


def _flat(moved: Any, wire: np.dtype[Any], device: bool) -> Any:
    """Return an array flat and in the dtype `wire`: a view, if it is contiguous and of that dtype."""
    if moved.dtype == wire and moved.flags.c_contiguous:
        return moved.reshape(-1)
    work = arrays.empty(moved.shape, wire, device)
    work[...] = moved
    return work.reshape(-1)
