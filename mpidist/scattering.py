"""Arrays of all ranks, reduced, and each rank's part of the result."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidist import nest
from mpidist.cross_device_ops.operands import Operands
from mpidist.cross_device_ops.plan import reduction_of, wire_and_result_dtypes
from mpidist.errors import InvalidArgumentError
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.transport import arrays
from mpidist.transport.agreement import fingerprint_of
from mpidist.transport.communicator import shard_bounds
from mpidist.transport.sync_group import SyncGroup

__all__ = ["reduce_scatter"]


def reduce_scatter(
    group: SyncGroup, call: str, reduce_op: ReduceOp | str, value: Any, axis: int, options: CommunicationOptions
) -> Any:
    """Reduce arrays over all ranks, and give each rank its part of the result along an axis. Collective.

    One reduce-scatter per array: S - s bytes for an array of S bytes of which this rank gets s.

    Args:
        group: The ranks.
        call: What errors call it.
        reduce_op: A `ReduceOp` or its name in any case.
        value: An array, or a nest of them, of at least one dimension.
        axis: The axis; negative counts from the end.
        options: `timeout_seconds` and `reproducible` count.

    Returns:
        A nest like `value`. Rank r gets the r-th part; lengths differ by at most one, longer ones first.

    Raises:
        InvalidArgumentError: If the ranks' arguments differ, or cannot be reduced. On every rank.
    """
    leaves, structure = nest.flatten(value)
    operands, fields, axes, error = Operands([]), {}, [], None
    op = ReduceOp.SUM
    try:
        op = ReduceOp(reduce_op)
        operands = Operands(leaves)
        axes = [_axis_of(spec.shape, axis) for spec in operands.specs]
        for spec in operands.specs:
            wire_and_result_dtypes(op, spec.dtype)
        fields = {"op": str(op), "axis": str(axis), "form of the nest": repr(structure)}
        fields |= {"reproducible": str(options.reproducible)}
        fields |= {f"array {index}": repr(spec) for index, spec in enumerate(operands.specs)}
    except Exception as problem:  # whatever it is, the other ranks must learn of it
        error = problem
    group.agree(call, fingerprint_of((call, fields)), lambda: fields, options.timeout_seconds, error)
    results = [_scatter(group, op, array, at, options) for array, at in zip(operands.arrays, axes, strict=True)]
    return nest.rebuild(value, operands.restore(results))


def _scatter(group: SyncGroup, op: ReduceOp, array: Any, axis: int, options: CommunicationOptions) -> Any:
    """Reduce one array: the axis goes first, so that every rank's part is one run of memory."""
    device = arrays.is_device(array)
    world = (group.levels.of_device if device else group.levels).world
    native = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
    wire, result_dtype = wire_and_result_dtypes(op, native)
    moved = array.swapaxes(0, axis)
    rows = shard_bounds(moved.shape[0], world.size)
    row = int(np.prod(moved.shape[1:], dtype=np.int64))
    work = arrays.empty(moved.shape, wire, device)
    work[...] = moved
    reduction, divide_by = reduction_of(op, wire, options, world.size)
    shard = world.reduce_scatter(work.reshape(-1), reduction, [bound * row for bound in rows])
    shape = (rows[world.rank + 1] - rows[world.rank], *moved.shape[1:])
    result = arrays.empty(shape, result_dtype, device)
    result[...] = shard.reshape(shape) if divide_by == 1 else shard.reshape(shape) / divide_by
    back = result.swapaxes(0, axis)
    return back if back.flags.c_contiguous else back.copy()


def _axis_of(shape: tuple[int, ...], axis: int) -> int:
    if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
        raise TypeError(f"axis must be a whole number, got {axis!r}")
    if not -len(shape) <= axis < len(shape):
        what = f"an array of shape {list(shape)}" if shape else "a scalar"
        raise InvalidArgumentError(f"cannot scatter along axis {axis}: {what} has no such axis")
    return int(axis) % len(shape)
