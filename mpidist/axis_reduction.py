"""Reduction along an axis and over ranks at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidist import nest
from mpidist.cross_device_ops import CrossDeviceOps
from mpidist.cross_device_ops.plan import wire_and_result_dtypes
from mpidist.errors import InvalidArgumentError
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.transport import arrays
from mpidist.transport.reduction import accumulator_dtype
from mpidist.values import contribution, require_contributions

__all__ = ["reduce_along_axis"]


def reduce_along_axis(
    ops: CrossDeviceOps,
    num_ranks: int,
    reduce_op: ReduceOp | str,
    value: Any,
    axis: int,
    options: CommunicationOptions | None,
) -> Any:
    """Reduce arrays along an axis on every rank, then over ranks. Collective.

    A mean is the sum of all divided by the count of all: one all-reduce of sums, and one number more.

    Args:
        ops: The algorithm, tied to the ranks.
        num_ranks: Number of ranks.
        reduce_op: A `ReduceOp` or its name in any case.
        value: An array, a distributed value of one, or a nest. Lengths may differ between ranks along `axis`.
        axis: The axis; negative counts from the end.
        options: Laid over the strategy's.

    Returns:
        A nest like `value`, of arrays without that axis.

    Raises:
        InvalidArgumentError: If the ranks' arguments differ, or a value has no such axis. On every rank.
        ValueError: If a mirrored value of several ranks is to be summed.
    """
    leaves: list[Any] = []
    parts: list[Any] = []
    error: Exception | None = None
    op = ReduceOp.SUM
    try:
        op = ReduceOp(reduce_op)
        leaves, _ = nest.flatten(value)
        if num_ranks > 1:
            require_contributions(op, leaves, ops.group)
        parts = [_reduce_here(op, contribution(leaf), axis) for leaf in leaves]
    except Exception as problem:  # whatever it is, the other ranks must learn of it
        error = problem
    call = f"reduce along axis {axis}"  # as ranks compare it
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
    likes = [contribution(leaf) for leaf in leaves]
    kinds = map(arrays.library_of, likes)
    restored = [kind.from_native(array, like) for kind, array, like in zip(kinds, results, likes, strict=True)]
    return nest.rebuild(value, restored)


def _reduce_here(op: ReduceOp, value: Any, axis: int) -> tuple[Any, int, np.dtype[Any]]:
    """Reduce one array along the axis.

    Returns:
        The partial result, the length of the axis, and the dtype of the final result.
    """
    array = arrays.library_of(value).to_native(value)
    if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
        raise TypeError(f"axis must be a whole number or None, got {axis!r}")
    if not -array.ndim <= axis < array.ndim:
        raise InvalidArgumentError(f"axis {axis} is out of range for an array of shape {list(array.shape)}")
    native = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
    wire, result = wire_and_result_dtypes(op, native)
    wide = accumulator_dtype(wire)
    shape = tuple(length for dim, length in enumerate(array.shape) if dim != axis % array.ndim)
    if array.shape[axis] == 0:
        part = arrays.empty(shape, wide, arrays.is_device(array))
        part[...] = _identity(op, wide)
    else:
        method = getattr(array.astype(wide), "sum" if op is ReduceOp.MEAN else op.name.lower())
        part = method(axis=axis, keepdims=True).reshape(shape).astype(wide)  # NumPy widens small integers
    return (part if op is ReduceOp.MEAN else part.astype(native)), array.shape[axis], result


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
