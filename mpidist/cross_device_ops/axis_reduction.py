"""Reduction along axes and over ranks at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpidist import nest
from mpidist.collectives import (
    axes_of,
    axes_text,
    axes_tuple,
    native_dtype,
    require_values,
    wire_and_result_dtypes,
)
from mpidist.cross_device_ops.cross_device_ops import CrossDeviceOps
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.transport import accumulator_dtype, arrays
from mpidist.values import contribution, require_contributions

__all__ = ["reduce_along_axis"]


def reduce_along_axis(
    ops: CrossDeviceOps,
    num_ranks: int,
    reduce_op: ReduceOp | str,
    value: Any,
    axis: int | tuple[int, ...],
    options: CommunicationOptions | None,
) -> Any:
    """Reduce arrays along axes on every rank, then over ranks. Collective.

    A mean is the sum of all divided by the count of all: one all-reduce of sums, and one number more.

    Args:
        ops: The algorithm, tied to the ranks.
        num_ranks: Number of ranks.
        reduce_op: A `ReduceOp` or its name in any case.
        value: An array, a distributed value of one, or a nest. Lengths may differ between ranks along the axes.
        axis: An axis, or a tuple of them; negative counts from the end.
        options: Laid over the strategy's.

    Returns:
        A nest like `value`, of arrays without these axes.

    Raises:
        InvalidArgumentError: If the ranks' arguments differ, a value has no such axis, or an axis is there twice. On
            every rank.
        ValueError: If a mirrored value of several ranks is to be summed.
    """
    leaves: list[Any] = []
    parts: list[Any] = []
    error: Exception | None = None
    op = ReduceOp.SUM
    call = "reduce along an axis"
    try:
        axes = axes_tuple(axis)
        call = f"reduce along {axes_text(axes)}"  # as ranks compare it
        op = ReduceOp.of(reduce_op)
        leaves, _ = nest.flatten(value)
        if num_ranks > 1:
            require_contributions(op, leaves, ops.group)
        require_values(leaves, value)
        leaves = [contribution(leaf) for leaf in leaves]
        parts = [_reduce_here(op, leaf, axes) for leaf in leaves]
    except Exception as problem:  # whatever it is, the other ranks must learn of it
        error = problem
    sums = nest.rebuild(value, [part for part, _, _ in parts]) if error is None else []
    if op is not ReduceOp.MEAN:
        results, _ = nest.flatten(ops.all_reduce(op, sums, options, call=call, error=error))
    else:
        counts = [np.asarray(count, np.int64) for _, count, _ in parts]
        totals, counts = ops.all_reduce(ReduceOp.SUM, (sums, counts), options, call=call, error=error)
        results = [
            _divide(total, int(count), dtype)
            for total, count, (_, _, dtype) in zip(nest.flatten(totals)[0], counts, parts, strict=True)
        ]
    restored = [arrays.library_of(leaf).from_native(array, leaf) for array, leaf in zip(results, leaves, strict=True)]
    return nest.rebuild(value, restored)


def _reduce_here(op: ReduceOp, value: Any, axes: tuple[int, ...]) -> tuple[Any, int, np.dtype[Any]]:
    """Reduce one array along the axes.

    Returns:
        The partial result, the product of the axes' lengths, and the dtype of the final result.
    """
    array = arrays.library_of(value).to_native(value)
    axes = axes_of(axes, array.shape, "reduce")
    count = math.prod([array.shape[at] for at in axes])
    native = native_dtype(array.dtype)
    wire, result = wire_and_result_dtypes(op, native)
    wide = accumulator_dtype(wire)
    if op is ReduceOp.MEAN and wide == np.int32:
        wide = np.dtype(np.int64)  # an axis may be long; the ranks alone are few enough for int32
    shape = tuple(length for at, length in enumerate(array.shape) if at not in axes)
    if count == 0:
        part = arrays.empty(shape, wide, arrays.is_device(array))
        part[...] = _identity(op, wide)
    else:
        method = getattr(array.astype(wide), "sum" if op is ReduceOp.MEAN else op.name.lower())
        one_or_all = axes[0] if len(axes) == 1 else axes  # of one, NumPy is quicker
        part = method(axis=one_or_all, keepdims=True).reshape(shape).astype(wide)  # NumPy widens small integers
    return (part if op is ReduceOp.MEAN else part.astype(native)), count, result


def _divide(total: Any, count: int, dtype: np.dtype[Any]) -> Any:
    mean = arrays.empty(total.shape, dtype, arrays.is_device(total))
    mean[...] = total / count
    return mean


def _identity(op: ReduceOp, dtype: np.dtype[Any]) -> Any:
    """Return what an empty part of an array contributes: a number that changes nothing."""
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return dtype.type(op is ReduceOp.PROD)
    if dtype.kind == "b":
        return dtype.type(op is ReduceOp.MIN)
    if dtype.kind == "f":
        return dtype.type(np.inf if op is ReduceOp.MIN else -np.inf)
    limits = np.iinfo(dtype)
    return dtype.type(limits.max if op is ReduceOp.MIN else limits.min)
