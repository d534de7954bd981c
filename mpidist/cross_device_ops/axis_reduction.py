"""Reductions along axes of arrays and over ranks."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist import nest
from mpidist.collectives.arguments.destinations import per_replica_value, replica_components
from mpidist.collectives.arguments.operands import Spec, axes_of, axes_text, axes_tuple, native_dtype, require_values
from mpidist.collectives.arguments.signature import name_call
from mpidist.collectives.plans.arithmetic import wire_and_result_dtypes
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.cross_device_ops.late_outs import LateOuts
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.transport import arrays
from mpidist.transport.array_libraries.libraries import library_of
from mpidist.transport.reduction import accumulator_dtype
from mpidist.values import require_contributions

__all__ = ["reduce_along_axis"]

_MAY_REPEAT: Final = {ReduceOp.MIN, ReduceOp.MAX}


@final
class _Partial(NamedTuple):
    """An array of one replica, reduced along the axes.

    `num_reduced`: number of elements that were reduced to one, the product of the lengths of the axes: int64, 0-d.
    """

    array: Any
    num_reduced: np.ndarray[Any, Any]
    result_dtype: np.dtype[Any]

    @property
    def spec(self) -> Spec:
        """The final result, of a mean."""
        return Spec(self.array.shape, self.result_dtype, arrays.is_device(self.array))


def reduce_along_axis(
    ops: BoundOps,
    reduce_op: ReduceOp | str,
    value: Any,
    axis: int | tuple[int, ...],
    options: CommunicationOptions | None,
    out: Any = None,
) -> Any:
    """Reduce arrays along axes on every rank, then over ranks. Collective; errors are raised on every rank.

    A mean is the sum over all ranks divided by the count over all ranks: one all-reduce of the sums and counts. Lengths
    may differ between ranks along the axes.
    """
    leaves: list[Any] = []
    partials: list[list[_Partial]] = []  # [leaves][replicas of this rank]
    error: Exception | None = None
    op, replicas, outs = ReduceOp.SUM, ops.replicas, None
    call = "reduce along an axis"
    try:
        axes = axes_tuple(axis)
        call = f"reduce along {axes_text(axes)}"  # ranks compare the name, and so the axes
        op = ReduceOp.of(reduce_op)
        leaves, structure = nest.flatten(value)
        require_contributions(op, leaves, ops.group, replicas.total)
        components = [replica_components(str(op), leaf, replicas, op in _MAY_REPEAT) for leaf in leaves]
        leaves = [own[0] for own in components]
        require_values(leaves, value)
        with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
            partials = [[_reduce_locally(op, component, axes) for component in own] for own in components]
        if out is not None and op is ReduceOp.MEAN:
            outs = LateOuts(out, structure, [own[0].spec for own in partials], ops)
    except Exception as problem:  # of any kind: the other ranks must learn of it
        error = name_call(problem, call)
    given: Any = []
    if error is None:
        reduced = [per_replica_value([partial.array for partial in own], replicas) for own in partials]
        given = nest.rebuild(value, reduced)
    if op is not ReduceOp.MEAN:
        results, _ = nest.flatten(ops.all_reduce(op, given, options, out=out, call=call, error=error))
    else:
        counts = [per_replica_value([one.num_reduced for one in own], replicas) for own in partials]
        name = call if outs is None else outs.name(call)
        totals, counts = ops.all_reduce(ReduceOp.SUM, (given, counts), options, call=name, error=error)
        results = [
            _divide(total, int(count), own[0].result_dtype)
            for total, count, own in zip(nest.flatten(totals)[0], counts, partials, strict=True)
        ]
    if outs is not None:
        outs.write(call, results)
    if out is not None:
        return out
    restored = [library_of(leaf).from_native(array, leaf) for array, leaf in zip(results, leaves, strict=True)]
    return nest.rebuild(value, restored)


def _reduce_locally(op: ReduceOp, value: Any, axes: tuple[int, ...]) -> _Partial:
    """Reduce an array along the axes; for a mean, sum it."""
    array = library_of(value).to_native(value)
    axes = axes_of(axes, array.shape)
    count = math.prod([array.shape[at] for at in axes])
    native = native_dtype(array.dtype)
    wire, result = wire_and_result_dtypes(op, native)
    wide = accumulator_dtype(wire)
    if op is ReduceOp.MEAN and wide == np.int32:
        wide = np.dtype(np.int64)  # int32 holds sums over ranks, but not over a long axis as well
    shape = tuple(length for at, length in enumerate(array.shape) if at not in axes)
    if count == 0:
        reduced = arrays.empty(shape, wide, arrays.is_device(array))
        reduced[...] = _identity(op, wide)
    else:
        method = getattr(array.astype(wide), "sum" if op is ReduceOp.MEAN else op.name.lower())
        axis = axes[0] if len(axes) == 1 else axes  # NumPy is quicker with an int than with a tuple of one
        reduced = method(axis=axis, keepdims=True).reshape(shape).astype(wide)  # NumPy widens small integers
    return _Partial(reduced if op is ReduceOp.MEAN else reduced.astype(native), np.asarray(count, np.int64), result)


def _divide(total: Any, count: int, dtype: np.dtype[Any]) -> Any:
    mean = arrays.empty(total.shape, dtype, arrays.is_device(total))
    with np.errstate(all="ignore"):  # the mean of nothing is NaN
        mean[...] = total / count
    return mean


def _identity(op: ReduceOp, dtype: np.dtype[Any]) -> Any:
    """Return the identity element of a reduction: the contribution of an empty array."""
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return dtype.type(op is ReduceOp.PROD)
    if dtype.kind == "b":
        return dtype.type(op is ReduceOp.MIN)
    if dtype.kind == "f":
        return dtype.type(np.inf if op is ReduceOp.MIN else -np.inf)
    limits = np.iinfo(dtype)
    return dtype.type(limits.max if op is ReduceOp.MIN else limits.min)
