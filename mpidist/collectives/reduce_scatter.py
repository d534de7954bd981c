"""Reduce-scatter: arrays of all ranks are reduced, and each rank gets its part of the result."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, final

import numpy as np

from mpidist import nest
from mpidist.collectives.arguments.operands import (
    Operands,
    Spec,
    axis_of,
    host_sizes,
    native_dtype,
    require_memory,
    require_values,
)
from mpidist.collectives.arguments.out_arrays import copy_overwritten, is_target, result_outs
from mpidist.collectives.arguments.signature import Arguments, agreed_call
from mpidist.collectives.plans.arithmetic import Arithmetic, result_dtypes, wire_and_result_dtypes
from mpidist.errors import InvalidArgumentError
from mpidist.nest.text import array_names, form_text
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.replicas import Replicas
from mpidist.transport import arrays
from mpidist.transport.communicator import shard_bounds
from mpidist.transport.group.levels import Levels
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.topology import Topology
from mpidist.values import contributions, require_contributions

__all__ = ["reduce_scatter"]


@final
class _ReduceScatter(Arguments):
    """The arguments of a reduce-scatter; `axes` is the axis of each array, counted from the front.

    `on_host`: the work on each array in host memory; `None` for one in device memory.
    """

    def __init__(
        self,
        group: SyncGroup,
        call: str,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: int,
        options: CommunicationOptions,
        out: Any,
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
        dtypes = result_dtypes(self.op, [spec.dtype for spec in specs], lambda: array_names(self.structure))
        outs = self._outs(group, out, dtypes)
        if outs is None:
            require_memory(sum(host_sizes(specs, dtypes)) * topology.local_size // topology.size, topology.local_size)
        else:
            self.operands = self.operands.with_arrays(copy_overwritten(self.operands.arrays, outs))
        # Made now, so that all ranks learn if one lacks memory. Communicators of device memory may not exist yet.
        self.outs: list[Any] = [None] * len(specs) if outs is None else outs
        self.on_host = [
            None if spec.device else _Scatter(group, group.levels, self.op, array, at, options, own)
            for array, spec, at, own in zip(self.operands.arrays, specs, self.axes, self.outs, strict=True)
        ]

    def _outs(self, group: SyncGroup, out: Any, dtypes: Sequence[np.dtype[Any]]) -> list[Any] | None:
        """Check and list the arrays that take this rank's parts; `None` for new ones."""
        if out is None:
            return None
        topology, specs = group.topology, []
        for spec, at, dtype in zip(self.operands.specs, self.axes, dtypes, strict=True):
            bounds = shard_bounds(spec.shape[at], topology.size)
            length = bounds[topology.rank + 1] - bounds[topology.rank]
            specs.append(Spec((*spec.shape[:at], length, *spec.shape[at + 1 :]), dtype, spec.device))
        outs = result_outs(out, self.structure, specs, Replicas.one_per_rank(topology))
        if any(map(group.shared.is_per_node, outs)):
            raise InvalidArgumentError(
                "out is a per-node array, which is one for all ranks of the node, and each rank gets a part of its own"
            )
        return outs

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
    out: Any = None,
) -> Any:
    """Reduce arrays over all ranks, and give each rank its part of the result along an axis. Collective.

    One reduce-scatter per array: S - s bytes for an array of S bytes of which this rank gets s. Over K nodes with equal
    numbers of ranks, each node sends S (K - 1) / K bytes to other nodes; with `reproducible`, or on uneven nodes, more.

    Rank r gets the r-th part; lengths differ by at most one, longer ones come first.
    """

    def open_arguments() -> _ReduceScatter:
        return _ReduceScatter(group, call, reduce_op, value, axis, options, out)

    with agreed_call(group, call, options, open_arguments, error) as (opened, _):
        results = []
        each = zip(opened.operands.arrays, opened.axes, opened.on_host, opened.outs, strict=True)
        for array, at, on_host, own in each:
            scatter = on_host or _Scatter(group, group.levels_of(True), opened.op, array, at, options, own)
            results.append(scatter.run())
    if out is not None:
        arrays.wait_for_writes(opened.outs)
        return out
    return nest.rebuild(opened.value, opened.operands.restore(results))


@final
class _Scatter:
    """The reduce-scatter of one array, with the axis in front, so that the part of every rank is contiguous."""

    def __init__(
        self,
        group: SyncGroup,
        levels: Levels,
        op: ReduceOp,
        array: Any,
        axis: int,
        options: CommunicationOptions,
        out: Any,
    ) -> None:
        device = arrays.is_device(array)
        arithmetic = Arithmetic.of(op, options, levels, by_node=True)
        wire, dtype = wire_and_result_dtypes(op, native_dtype(array.dtype))
        self._reduction, self._divide_by = arithmetic.reduction(wire)
        half = arithmetic.half if wire == np.float32 else None
        if device:
            group.devices.compile(levels.kernels_for(wire, half, self._reduction))
        self._levels, self._topology = levels.compressed(half), group.topology
        is_in_order = self._reduction.in_rank_order or arithmetic.rounds_everywhere
        self._is_by_level = not is_in_order and levels.is_even and levels.world.size > levels.within_node.size > 1
        moved = array.swapaxes(0, axis)
        rows, own = shard_bounds(moved.shape[0], levels.world.size), levels.world.rank
        shape = (rows[own + 1] - rows[own], *moved.shape[1:])
        is_made_in_out = out is not None and axis == 0 and is_target(out, group.shared)
        self._result = out if is_made_in_out else group.result_memory.empty(shape, dtype, device)
        self._shard = self._result.reshape(-1) if dtype == wire else arrays.empty(self._result.size, wire, device)
        back = self._result.swapaxes(0, axis)
        self._has_copy = not is_made_in_out if out is not None else not back.flags.c_contiguous
        self._back = out if out is not None else arrays.empty(back.shape, dtype, device) if self._has_copy else back
        self._axis = axis
        if self._is_by_level:
            self._work, self._bounds = _in_order_of_nodes(moved, rows, self._topology, wire, device)
        else:
            row_size = int(np.prod(moved.shape[1:], dtype=np.int64))
            self._work, self._bounds = _flat(moved, wire, device), [bound * row_size for bound in rows]

    def run(self) -> Any:
        """Reduce, and return this rank's part. Collective."""
        if self._is_by_level:
            self._run_by_levels()
        else:
            self._levels.world.reduce_scatter(self._work, self._reduction, self._bounds, self._shard)
        if self._divide_by != 1 or self._result.dtype != self._shard.dtype:
            with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
                np.divide(self._shard.reshape(self._result.shape), self._divide_by, out=self._result)
        if self._has_copy:
            self._back[...] = self._result.swapaxes(0, self._axis)
        return self._back

    def _run_by_levels(self) -> None:
        """Reduce-scatter within nodes, then across nodes: S (K - 1) / K bytes per node, the least for K nodes."""
        ends, num_nodes = self._bounds, self._topology.num_nodes
        node_sums = self._levels.within_node.reduce_scatter(self._work, self._reduction, ends[::num_nodes])
        first = self._topology.local_rank * num_nodes
        bounds = [end - ends[first] for end in ends[first : first + num_nodes + 1]]
        self._levels.across_nodes.reduce_scatter(node_sums, self._reduction.rest, bounds, self._shard)


def _in_order_of_nodes(
    moved: Any, rows: Sequence[int], topology: Topology, wire: np.dtype[Any], device: bool
) -> tuple[Any, list[int]]:
    """Return a copy of an array, flat, and the bounds of the ranks' parts in it.

    The parts of all ranks with local rank 0 come first, then those with local rank 1, and so on: so the node's
    reduce-scatter leaves each rank the parts of all ranks with which it reduces across nodes.
    """
    order = [rank for ranks in zip(*topology.nodes, strict=True) for rank in ranks]
    work = arrays.empty(moved.size, wire, device)
    ends = [0]
    for rank in order:
        part = moved[rows[rank] : rows[rank + 1]]
        ends.append(ends[-1] + part.size)
        work[ends[-2] : ends[-1]].reshape(part.shape)[...] = part
    return work, ends


def _flat(moved: Any, wire: np.dtype[Any], device: bool) -> Any:
    """Return an array flat and in the dtype `wire`: a view, if it is contiguous and of that dtype."""
    if moved.dtype == wire and moved.flags.c_contiguous:
        return moved.reshape(-1)
    work = arrays.empty(moved.shape, wire, device)
    work[...] = moved
    return work.reshape(-1)
