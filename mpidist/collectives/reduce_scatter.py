"""Reduce-scatter: arrays of all ranks are reduced, and each rank gets its part of the result."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, final

import numpy as np

from mpidist import nest
from mpidist.collectives.arguments.operands import (
    Operands,
    Spec,
    axis_of,
    host_sizes,
    messages_of,
    open_contributions,
    require_memory,
    specs_along,
    swapped,
    whole_axis,
)
from mpidist.collectives.arguments.out_arrays import copy_overwritten
from mpidist.collectives.arguments.signature import (
    Arguments,
    Form,
    agreed_call,
    form_of,
    merge,
    move_back,
    spec_fields,
)
from mpidist.collectives.plans.arithmetic import Arithmetic, result_dtypes, wire_and_result_dtypes
from mpidist.errors import InvalidArgumentError
from mpidist.nest.text import array_names, form_text
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.transport import arrays
from mpidist.transport.communicator import shard_bounds
from mpidist.transport.group.levels import Levels
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.values import require_contributions

__all__ = ["reduce_scatter"]


def _form(
    group: SyncGroup,
    specs: Sequence[Spec],
    call: str,
    reduce_op: ReduceOp | str,
    axis: int,
    options: CommunicationOptions,
    is_new: bool,
    structure: nest.Structure,
) -> Form:
    """Return what follows from the form of a reduce-scatter's arguments, or refuse it."""
    topology, op, axes = group.topology, ReduceOp.of(reduce_op), [axis_of(axis, spec.shape) for spec in specs]
    dtypes = result_dtypes(op, [spec.dtype for spec in specs], lambda: array_names(structure))
    if is_new:
        require_memory(sum(host_sizes(specs, dtypes)) * topology.local_size // topology.size, topology.local_size)
    bounds = [
        shard_bounds(spec.shape[at], topology.size)[topology.rank :] for spec, at in zip(specs, axes, strict=True)
    ]
    own = specs_along(axes, specs, [stop - start for start, stop, *_ in bounds])
    out_specs = [spec._replace(dtype=dtype) for spec, dtype in zip(own, dtypes, strict=True)]
    plan = []
    for indices in messages_of(specs, of_one_dtype=True):
        make = partial(_Scatter, group, op, options, indices, specs, axes)
        # Communicators for device memory may not exist yet.
        plan.append((make, None if specs[indices[0]].device else make(group.levels)))
    fields = {"op": str(op), "axis": str(axis), "form of the nest": form_text(structure)}
    fields |= {name: str(getattr(options, name)) for name in ("reproducible", "compression", "compress_everywhere")}
    return Form(call, fields | spec_fields(structure, specs), specs, out_specs, axes, plan)


@final
class _ReduceScatter(Arguments):
    """The arguments of a reduce-scatter, and its memory, so that all ranks learn if one has too little."""

    def __init__(
        self,
        group: SyncGroup,
        call: str,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: Any,
        options: CommunicationOptions,
        out: Any,
    ) -> None:
        self.value, leaves, structure = open_contributions(value)
        if self.value is not value:
            require_contributions(ReduceOp.of(reduce_op), nest.flatten(value)[0], group, group.topology.size)
        self.operands = Operands(leaves, group.devices, call)
        op = reduce_op if type(reduce_op) in (str, ReduceOp) else ReduceOp.of(reduce_op)
        key = call, op, axis if type(axis) is int else whole_axis(axis), options, out is None, structure
        self.form = form = form_of(_form, group, self.operands, *key)
        self.arrays, nothing = self.operands.arrays, [None] * len(leaves)
        if out is not None:
            self.outs, self.checked = form.known_outs.open(out, structure, nothing, nothing, group.shared)
            if self.checked.per_node_indices:
                what = "which is one for all ranks of the node, and each rank gets a part of its own"
                raise InvalidArgumentError(f"out is a per-node array, {what}")
            if not self.checked.are_apart_from(self.arrays):
                self.arrays = copy_overwritten(self.arrays, self.outs)
        self.results = self.allocate(group, form.out_specs, form.axes)
        self.work = [scatter and scatter.open(self.arrays, self.results) for _, scatter in form.plan]


def reduce_scatter(
    group: SyncGroup,
    reduce_op: ReduceOp | str,
    value: Any,
    axis: int,
    defaults: CommunicationOptions,
    options: CommunicationOptions | None,
    out: Any = None,
) -> Any:
    """Reduce arrays over all ranks, and give each rank its part: `ReplicaContext.reduce_scatter`. Collective.

    One reduce-scatter for each large array, and for many small ones of a dtype: S - s bytes for S bytes of which this
    rank gets s. Over K nodes with equal numbers of ranks, each node sends S (K - 1) / K bytes to other nodes; with
    `reproducible`, or on uneven nodes, more.

    Rank r gets the r-th part; lengths differ by at most one, longer ones come first.
    """
    call = "reduce_scatter"
    merged, error = merge(defaults, options)
    open_arguments = partial(_ReduceScatter, group, call, reduce_op, value, axis, merged, out)
    with agreed_call(group, call, merged, open_arguments, error) as (opened, _):
        form, results = opened.form, []
        for (make, scatter), work in zip(form.plan, opened.work, strict=True):
            if scatter is None:
                scatter = make(group.levels_of(True))
                work = scatter.open(opened.arrays, opened.results)
            scatter.run(work, opened.results)
        for (front, result), at in zip(opened.results, form.axes, strict=True):
            results.append(move_back(front, result, at))
        if out is not None:
            opened.write_outs(results, group.shared)
            return out
    return nest.rebuild(opened.value, opened.operands.restore(results))


@final
class _Scatter:
    """The reduce-scatter of arrays of one dtype, each with its axis in front: the parts of a rank are contiguous.

    Where it goes level by level, the parts of all ranks with local rank 0 come first, then those with local rank 1, and
    so on: so the node's reduce-scatter leaves each rank the parts of all ranks with which it reduces across nodes.
    """

    def __init__(
        self,
        group: SyncGroup,
        op: ReduceOp,
        options: CommunicationOptions,
        indices: Sequence[int],
        specs: Sequence[Spec],
        axes: Sequence[int],
        levels: Levels,
    ) -> None:
        spec = specs[indices[0]]
        self._indices, self._axes, self._device = indices, axes, spec.device
        arithmetic = Arithmetic.of(op, options, levels, by_node=True)
        self._wire, self._dtype = wire_and_result_dtypes(op, spec.dtype)
        self._reduction, self._divide_by = arithmetic.reduction(self._wire)
        half = arithmetic.half if self._wire == np.float32 else None
        if spec.device:
            group.devices.compile(levels.kernels_for(self._wire, half, self._reduction))
        self._levels, self._topology = levels.compressed(half), group.topology
        is_in_order = self._reduction.in_rank_order or arithmetic.rounds_everywhere
        self._is_by_level = not is_in_order and levels.is_even and levels.world.size > levels.within_node.size > 1
        nodes = self._topology.nodes if self._is_by_level else [range(levels.world.size)]
        fronts = [swapped(specs[index].shape, axes[index]) for index in indices]
        rows = [list(pairwise(shard_bounds(length, levels.world.size))) for length, *_ in fronts]
        self._parts, self._bounds = [], [0]
        for rank in (rank for ranks in zip(*nodes, strict=True) for rank in ranks):
            end = self._bounds[-1]
            for index, (_, *row), of_ranks in zip(indices, fronts, rows, strict=True):
                start, stop = of_ranks[rank]
                if start < stop:  # of a short array most are empty, on many ranks
                    self._parts.append((index, axes[index], slice(start, stop)))
                end += (stop - start) * prod(row)
            if rank == group.topology.rank:
                self._num_own = end - self._bounds[-1]
            self._bounds.append(end)

    def open(self, own: Sequence[Any], results: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
        """Return arrays as they are sent, flat, one as a view if it can be; and the array for the sums. Local."""
        wire, first, is_one = self._wire, self._indices[0], len(self._indices) == 1
        is_direct = is_one and self._dtype == wire
        shard = results[first][0].reshape(-1) if is_direct else arrays.empty((self._num_own,), wire, self._device)
        if is_one and not self._is_by_level and own[first].dtype == wire:
            moved = own[first].swapaxes(0, self._axes[first])
            if moved.flags.c_contiguous:
                return moved.reshape(-1), shard
        work, at = arrays.empty((self._bounds[-1],), wire, self._device), 0
        for index, axis, rows in self._parts:
            part = own[index].swapaxes(0, axis)[rows]
            work[at : at + part.size].reshape(part.shape)[...] = part
            at += part.size
        return work, shard

    def run(self, work: tuple[Any, Any], results: Sequence[tuple[Any, Any]]) -> None:
        """Reduce what `open` returned, and leave this rank's parts, with the axis in front, in results. Collective."""
        (sent, shard), at = work, 0
        if self._is_by_level:
            self._run_by_levels(sent, shard)
        else:
            self._levels.world.reduce_scatter(sent, self._reduction, self._bounds, shard)
        for index in self._indices:
            front = results[index][0]
            part, at = shard[at : at + front.size].reshape(front.shape), at + front.size
            if self._divide_by != 1 or self._dtype != self._wire:
                with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
                    np.divide(part, self._divide_by, out=front)
            elif len(self._indices) > 1:
                front[...] = part

    def _run_by_levels(self, work: Any, shard: Any) -> None:
        """Reduce-scatter within nodes, then across nodes: S (K - 1) / K bytes per node, the least for K nodes."""
        ends, num_nodes = self._bounds, self._topology.num_nodes
        node_sums = self._levels.within_node.reduce_scatter(work, self._reduction, ends[::num_nodes])
        first = self._topology.local_rank * num_nodes
        bounds = [end - ends[first] for end in ends[first : first + num_nodes + 1]]
        self._levels.across_nodes.reduce_scatter(node_sums, self._reduction.rest, bounds, shard)
