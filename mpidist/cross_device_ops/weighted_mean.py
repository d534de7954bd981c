"""The mean over replicas of which each has a weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple, final

import numpy as np

from mpidist.collectives.arguments.destinations import (
    NO_CONTRIBUTIONS,
    flatten_contributions,
    per_replica_value,
    rebuild_results,
)
from mpidist.collectives.arguments.operands import Operands, Spec, replica_components
from mpidist.collectives.arguments.out_arrays import LateOuts
from mpidist.collectives.arguments.signature import Form, form_of, name_call
from mpidist.collectives.plans.arithmetic import wire_and_result_dtypes
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.errors import InvalidArgumentError
from mpidist.options import CommunicationOptions, Compression, ReduceOp
from mpidist.replicas import Replicas
from mpidist.transport import arrays
from mpidist.transport.array_libraries.libraries import library_of
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.host_memory.result_memory import ResultMemory, SumMemory
from mpidist.transport.reduction import accumulator_dtype
from mpidist.transport.shared_errors import mark_shared
from mpidist.transport.text import value_text
from mpidist.values import Contributions, PerReplica, contribution

__all__ = ["weighted_mean"]


def weighted_mean(
    ops: BoundOps,
    name: str,
    reduce_op: ReduceOp | str,
    value: Any,
    weight: Any,
    options: CommunicationOptions | None,
    *,
    out: Any = None,
    has_axis: bool = False,
    error: Exception | None = None,
) -> Any:
    """Divide the sum of values times weights by the sum of weights, over replicas. Collective: one all-reduce.

    Another one before agrees on the scale of the weights if float16, whose range is small, may carry the products.

    A value whose weight is 0 does not count, whatever it is: also the mean of no rows, which is not a number. Errors,
    also of axes with weights (`has_axis`), are raised on every rank.
    """
    call, replicas, group = f"{name} with weights", ops.replicas, ops.group
    group.enter(call)  # before the memory of products is written
    flat, outs, is_fp16 = NO_CONTRIBUTIONS, None, False
    operands, forms, weights = list[Operands](), list[Form](), list[Any]()  # of each replica of this rank
    given = list[Any]()
    try:
        op = ReduceOp.of(reduce_op)
        if op is not ReduceOp.MEAN:
            raise ValueError(f"weight is for means, and the operation is {op}: multiply the summands yourself")
        if has_axis:
            raise ValueError("weight and axis exclude each other: a mean along an axis weighs by the axis' length")
        flat = flatten_contributions(op, value, group, replicas)
        operands = [*map(Operands, (flat.leaves, *flat.others))]
        weights = _weights_of(weight, replicas)
        is_fp16 = ops.options.merge(options).compression is Compression.FP16
    except Exception as problem:  # of any kind: the other ranks must learn of it
        error = error or name_call(problem, call)
    combining = ReduceOp.MEAN if is_fp16 else ReduceOp.SUM  # float16 holds more means than sums
    if is_fp16 and error is None:
        weights = _scaled(ops, call, weights, options)
    try:
        forms = [form_of(_form, group, own) for own in operands]
        products = _weighted(operands, forms, weights, group.result_memory.products)
        given = products[0] if replicas.are_bare else [*map(PerReplica, zip(*products, strict=True))]
        if out is not None:
            outs = LateOuts(group, out, flat.structure, forms[0].out_specs, replicas, bool(flat.mirrored))
    except Exception as problem:
        error = error or name_call(problem, call)
    name = call if outs is None else outs.name(call)
    into = given if replicas.are_bare and error is None and not forms[0].plan.is_on_gpu else None  # else new arrays
    *totals, total_weight = ops.all_reduce(combining, given, options, out=into, call=name, error=error)
    form = forms[0]
    if not 0 < total_weight <= form.plan.most:
        raise _no_mean(ops, call, total_weight, form.plan.most)
    memory = group.result_memory if into is not None and outs is None else None
    means = _divided(totals, total_weight, form.out_specs, memory)
    if outs is not None:
        outs.write(call, means)
        return out
    return rebuild_results(value, operands[0].restore(means), flat.mirrored)


@final
class _Products(NamedTuple):
    """The arrays of a replica times its weight, and last its weight.

    Attributes:
        dtypes: Those that sums of them fit into.
        most: The largest sum of weights by which such sums can be divided.
    """

    shapes: list[tuple[int, ...]]
    dtypes: list[np.dtype[Any]]
    most: float
    is_on_gpu: bool


def _form(group: SyncGroup, specs: Sequence[Spec]) -> Form:
    means = [spec._replace(dtype=wire_and_result_dtypes(ReduceOp.MEAN, spec.dtype)[1]) for spec in specs]
    dtypes = [*(accumulator_dtype(mean.dtype) for mean in means), np.dtype(np.float64)]
    most, is_on_gpu = min(float(np.finfo(dtype).max) for dtype in dtypes), any(spec.device for spec in specs)
    return Form("", {}, specs, means, plan=_Products([*(spec.shape for spec in specs), ()], dtypes, most, is_on_gpu))


def _weights_of(weight: Any, replicas: Replicas) -> list[Any]:
    is_of_each = isinstance(weight, Contributions)
    return [*map(_number_of, weight.nests if is_of_each else replica_components("weight", weight, replicas))]


def _number_of(weight: Any) -> np.ndarray[Any, Any]:
    """Return a weight, a number of any library, as a 0-d array of double precision."""
    given = contribution(weight)
    try:
        number = arrays.on_host(library_of(given).to_native(given))
    except TypeError as problem:
        raise TypeError(f"weight must be a number for each replica: {problem}") from problem
    if number.shape != () or accumulator_dtype(number.dtype).kind not in "iuf":
        raise TypeError(f"weight must be a number for each replica, got {value_text(weight)}")
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"weight must be a finite number >= 0, got {number}")
    return number.astype(np.float64)


def _scaled(ops: BoundOps, call: str, weights: list[Any], options: CommunicationOptions | None) -> list[Any]:
    """Divide the weights of all ranks by a power of 2, so that the largest is 0.5 to 1. Collective."""
    _, exponent = math.frexp(ops.all_reduce(ReduceOp.MAX, per_replica_value(weights, ops.replicas), options, call=call))
    return [np.asarray(np.ldexp(own, -exponent)) for own in weights]


def _weighted(
    operands: list[Operands], forms: list[Form], weights: list[np.ndarray[Any, Any]], memory: SumMemory
) -> list[list[Any]]:
    """Return the products of each replica, which has an array of each form, and last its weight.

    They are overwritten by the next call, which returns the same arrays, so that their reduction is a repeated one.
    """
    shapes = [shape for form in forms for shape in form.plan.shapes]
    dtypes = [dtype for form in forms for dtype in form.plan.dtypes]
    if any(form.plan.is_on_gpu for form in forms):
        are_on_gpu = [spec.device for form in forms for spec in (*form.specs, Spec((), np.dtype(np.float64), False))]
        taken = [*map(arrays.empty, shapes, dtypes, are_on_gpu)]
    else:
        taken = memory.take(shapes, dtypes)
    products = []
    with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
        for own, weight in zip(operands, weights, strict=True):
            factor = cache(partial(_factor, weight))
            products.append(taken[: len(own.arrays) + 1])
            del taken[: len(own.arrays) + 1]
            for array, into in zip(own.arrays, products[-1], strict=False):
                if by := factor(into.dtype):
                    np.multiply(array, by, out=into, dtype=into.dtype, casting="unsafe")
                else:  # a value that weighs nothing counts as 0, also where it is not a number
                    into.fill(0)
            products[-1][-1][...] = weight
    return products


def _factor(weight: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> Any:
    """Return a weight as a number of a dtype, in which it has to be normal."""
    factor = dtype.type(weight)
    if weight and not np.finfo(dtype).tiny <= factor.real <= np.finfo(dtype).max:
        raise ValueError(
            f"weight {weight} does not fit into {dtype.name}, in which values are added: scale all weights"
        )
    return factor


def _no_mean(ops: BoundOps, call: str, weight: Any, most: float) -> Exception:
    """Make the error, of all ranks, of a sum of weights by which sums cannot be divided."""
    what = "are 0, so there is no mean"
    if weight:
        what = f"add up to {weight:.3g}, and may to at most {most:.3g}: scale all weights"
    no_mean = InvalidArgumentError(f"{call}: the weights of all replicas {what}")
    mark_shared(no_mean, ops.group.agreement.ranks)
    return no_mean


def _divided(totals: list[Any], weight: Any, specs: Sequence[Spec], memory: ResultMemory | None) -> list[Any]:
    """Divide sums: in place, or into new arrays of `memory`. Return them in the dtypes of the means."""
    means = []
    with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
        for total, spec in zip(totals, specs, strict=True):
            into = total if memory is None or total.dtype != spec.dtype else memory.empty(*spec)
            np.divide(total, total.dtype.type(weight), out=into)
            means.append(into.astype(spec.dtype, copy=False))
    return means
