"""Reductions along axes of arrays and over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist import nest
from mpidist.collectives.arguments.destinations import per_replica_value
from mpidist.collectives.arguments.operands import (
    Operands,
    Spec,
    axes_of,
    axes_text,
    axes_tuple,
    leaves_of_replicas,
)
from mpidist.collectives.arguments.out_arrays import LateOuts
from mpidist.collectives.arguments.signature import Form, form_of, name_call
from mpidist.collectives.plans.arithmetic import wire_and_result_dtypes
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.transport import arrays
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.reduction import accumulator_dtype
from mpidist.values import PerReplica, require_contributions

__all__ = ["reduce_along_axis"]

_MAY_REPEAT: Final = {ReduceOp.MIN, ReduceOp.MAX}


@final
class _Plan(NamedTuple):
    """What follows from the form of one array, from the reduction and the axes, which are counted from the front.

    Attributes:
        num_reduced: Number of elements that are reduced to one, the product of the lengths of the axes.
        shape: That of the reduced array.
        sum_dtype: The dtype in which elements are reduced.
        sent_dtype: The dtype in which ranks reduce the reduced arrays.
        spec: The final result, of a mean.
    """

    axes: tuple[int, ...]
    num_reduced: int
    shape: tuple[int, ...]
    sum_dtype: np.dtype[Any]
    sent_dtype: np.dtype[Any]
    spec: Spec

    @classmethod
    def of(cls, op: ReduceOp, given: tuple[int, ...], spec: Spec) -> _Plan:
        axes = axes_of(given, spec.shape)
        wire, result = wire_and_result_dtypes(op, spec.dtype)
        wide = accumulator_dtype(wire)
        if op is ReduceOp.MEAN and wide == np.int32:
            wide = np.dtype(np.int64)  # int32 holds sums over ranks, but not over a long axis as well
        count = math.prod([spec.shape[at] for at in axes])
        shape = tuple(length for at, length in enumerate(spec.shape) if at not in axes)
        sent = wide if op is ReduceOp.MEAN else spec.dtype
        return cls(axes, count, shape, wide, sent, Spec(shape, result, spec.device))


def _form(group: SyncGroup, specs: Sequence[Spec], op: ReduceOp, axes: tuple[int, ...]) -> Form:
    """Return the form of a replica's arrays. Its plan: those of the arrays; int64 [arrays], `num_reduced` of each."""
    plans = [_Plan.of(op, axes, spec) for spec in specs]
    counts = np.array([plan.num_reduced for plan in plans], np.int64)
    return Form("", {}, specs, [plan.spec for plan in plans], plan=(plans, counts))


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
    operands: list[Operands] = []  # of each replica of this rank
    forms: list[Form] = []
    error: Exception | None = None
    op, replicas, outs = ReduceOp.SUM, ops.replicas, None
    call = "reduce along an axis"
    given: Any = []
    try:
        axes = axes_tuple(axis)
        call = f"reduce along {axes_text(axes)}"  # ranks compare the name, and so the axes
        op = ReduceOp.of(reduce_op)
        require_contributions(op, nest.flatten(value)[0], ops.group, replicas.total)
        of_replicas, value, structure = leaves_of_replicas(str(op), value, replicas, op in _MAY_REPEAT)
        operands = [*map(Operands, of_replicas)]
        forms = [form_of(_form, ops.group, own, op, axes) for own in operands]
        with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
            partials = [_reduce_locally(op, own.arrays, its.plan[0]) for own, its in zip(operands, forms, strict=True)]
        reduced = partials[0] if replicas.are_bare else [*map(PerReplica, zip(*partials, strict=True))]
        given = nest.rebuild(value, reduced)
        if out is not None and op is ReduceOp.MEAN:
            outs = LateOuts(ops.group, out, structure, forms[0].out_specs, replicas)
    except Exception as problem:  # of any kind: the other ranks must learn of it
        error = name_call(problem, call)
    if op is not ReduceOp.MEAN:
        results, _ = nest.flatten(ops.all_reduce(op, given, options, out=out, call=call, error=error))
    else:
        counts = [form.plan[1] for form in forms]
        own = (given, per_replica_value(counts, replicas)) if counts else ()
        name = call if outs is None else outs.name(call)
        totals, counts = ops.all_reduce(ReduceOp.SUM, own, options, call=name, error=error)
        each = zip(nest.flatten(totals)[0], counts.tolist(), forms[0].out_specs, strict=True)
        results = [_divide(total, count, spec.dtype) for total, count, spec in each]
    if outs is not None:
        outs.write(call, results)
    if out is not None:
        return out
    return nest.rebuild(value, operands[0].restore(results))


def _reduce_locally(op: ReduceOp, values: Sequence[Any], plans: Sequence[_Plan]) -> list[Any]:
    """Reduce arrays along the axes; for a mean, sum them."""
    partials = []
    for array, (axes, count, shape, wide, sent, _) in zip(values, plans, strict=True):
        if count == 0:
            reduced = arrays.empty(shape, wide, arrays.is_device(array))
            reduced[...] = _identity(op, wide, sent)
        else:
            method = getattr(array.astype(wide), "sum" if op is ReduceOp.MEAN else op.name.lower())
            axis = axes[0] if len(axes) == 1 else axes  # NumPy is quicker with an int than with a tuple of one
            reduced = method(axis=axis, keepdims=True).reshape(shape).astype(wide)  # NumPy widens small integers
        partials.append(reduced if sent == wide else reduced.astype(sent))
    return partials


def _divide(total: Any, count: int, dtype: np.dtype[Any]) -> Any:
    mean = arrays.empty(total.shape, dtype, arrays.is_device(total))
    with np.errstate(all="ignore"):  # the mean of nothing is NaN
        mean[...] = total / count
    return mean


def _identity(op: ReduceOp, dtype: np.dtype[Any], sent: np.dtype[Any]) -> Any:
    """Return the identity element of a reduction: the contribution of an empty array, sent in another dtype."""
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return dtype.type(op is ReduceOp.PROD)
    if dtype.kind == "b":
        return dtype.type(op is ReduceOp.MIN)
    if dtype.kind == "f":
        most = dtype.type(np.inf)
        if math.isnan(sent.type(most)):  # some kinds of float8 have no infinity
            most = np.nanmax(np.arange(256, dtype=np.uint8).view(sent).astype(dtype))
        return most if op is ReduceOp.MIN else -most
    limits = np.iinfo(dtype)
    return dtype.type(limits.max if op is ReduceOp.MIN else limits.min)
