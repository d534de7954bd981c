"""The mean over replicas of which each has a weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from mpidist.collectives.arguments.destinations import (
    NO_CONTRIBUTIONS,
    flatten_contributions,
    per_replica_value,
    rebuild_results,
    replica_components,
)
from mpidist.collectives.arguments.operands import Spec, native_dtype
from mpidist.collectives.arguments.signature import name_call
from mpidist.collectives.plans.arithmetic import wire_and_result_dtypes
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.cross_device_ops.late_outs import LateOuts
from mpidist.errors import InvalidArgumentError
from mpidist.options import CommunicationOptions, Compression, ReduceOp
from mpidist.replicas import Replicas
from mpidist.transport import arrays
from mpidist.transport.array_libraries.libraries import library_of
from mpidist.transport.host_memory.result_memory import ResultMemory
from mpidist.transport.host_memory.sum_memory import SumMemory
from mpidist.transport.reduction import accumulator_dtype
from mpidist.transport.shared_errors import mark_shared
from mpidist.transport.text import value_text
from mpidist.values import Contributions, contribution

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
    call, replicas = f"{name} with weights", ops.replicas
    ops.group.enter(call)  # before the memory of products is written
    flat, specs, sums, weights, outs, is_fp16 = NO_CONTRIBUTIONS, [], [], [], None, False
    try:
        op = ReduceOp.of(reduce_op)
        if op is not ReduceOp.MEAN:
            raise ValueError(f"weight is for means, and the operation is {op}: multiply the summands yourself")
        if has_axis:
            raise ValueError("weight and axis exclude each other: a mean along an axis weighs by the axis' length")
        flat = flatten_contributions(op, value, ops.group, replicas)
        weights = [_number_of(component) for component in _weights_of(weight, replicas)]
        is_fp16 = ops.options.merge(options).compression is Compression.FP16
    except Exception as problem:  # of any kind: the other ranks must learn of it
        error = error or name_call(problem, call)
    combining = ReduceOp.MEAN if is_fp16 else ReduceOp.SUM  # float16 holds more means than sums
    if is_fp16 and error is None:
        weights = _scaled(ops, call, weights, options)
    try:
        of_replicas = [[*map(_native, leaves)] for leaves in (flat.leaves, *flat.others)]
        specs = [Spec(its.shape, _dtypes_of_mean(its.dtype)[0], arrays.is_device(its)) for its in of_replicas[0]]
        products = _weighted(of_replicas, weights, ops.group.result_memory.products)
        sums = [per_replica_value(of_leaf, replicas) for of_leaf in zip(*products, strict=True)]
        if out is not None:
            outs = LateOuts(out, flat.structure, specs, ops, bool(flat.mirrored))
    except Exception as problem:
        error = error or name_call(problem, call)
    given = [] if error is not None else (sums[:-1], sums[-1])
    name = call if outs is None else outs.name(call)
    is_in_place = replicas.are_bare and not any(spec.device for spec in specs)  # else the sums are new arrays
    into = given if is_in_place and given else None
    totals, total_weight = ops.all_reduce(combining, given, options, out=into, call=name, error=error)
    _require_divisor(ops, call, total_weight, {np.dtype(np.float64), *(total.dtype for total in totals)})
    means = _divided(totals, total_weight, specs, ops.group.result_memory if is_in_place and outs is None else None)
    if outs is not None:
        outs.write(call, means)
        return out
    likes = map(contribution, flat.leaves)
    results = [library_of(like).from_native(mean, like) for mean, like in zip(means, likes, strict=True)]
    return rebuild_results(value, results, flat.mirrored)


def _weights_of(weight: Any, replicas: Replicas) -> Any:
    return weight.nests if isinstance(weight, Contributions) else replica_components("weight", weight, replicas)


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


def _weighted(of_replicas: list[list[Any]], weights: list[np.ndarray[Any, Any]], memory: SumMemory) -> list[list[Any]]:
    """Return the arrays of each replica times its weight, in dtypes that sums of them fit into, and last its weight.

    They are overwritten by the next call, which returns the same arrays, so that their reduction is a repeated one.
    """
    leaves = [array for its, weight in zip(of_replicas, weights, strict=True) for array in (*its, weight)]
    dtypes = [_dtypes_of_mean(array.dtype)[1] for array in leaves]
    are_on_gpu, shapes = [*map(arrays.is_device, leaves)], [array.shape for array in leaves]
    taken = iter(map(arrays.empty, shapes, dtypes, are_on_gpu) if any(are_on_gpu) else memory.take(shapes, dtypes))
    products = []
    with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
        for its, weight in zip(of_replicas, weights, strict=True):
            factor = cache(partial(_factor, weight))
            products.append([_product(array, factor, into) for array, into in zip(its, taken, strict=False)])
            products[-1].append(next(taken))
            products[-1][-1][...] = weight
    return products


def _product(array: Any, factor: Callable[[np.dtype[Any]], Any], into: Any) -> Any:
    """Multiply an array by a factor. A value that weighs nothing counts as 0, also where it is not a number."""
    by = factor(into.dtype)
    if by:
        np.multiply(array, by, out=into, dtype=into.dtype, casting="unsafe")
    else:
        into.fill(0)
    return into


def _factor(weight: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> Any:
    """Return a weight as a number of a dtype, in which it has to be normal."""
    factor = dtype.type(weight)
    if weight and not np.finfo(dtype).tiny <= factor.real <= np.finfo(dtype).max:
        raise ValueError(
            f"weight {weight} does not fit into {dtype.name}, in which values are added: scale all weights"
        )
    return factor


@cache
def _dtypes_of_mean(dtype: np.dtype[Any]) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Return the dtype of the mean of numbers, and that in which they are added."""
    _, mean = wire_and_result_dtypes(ReduceOp.MEAN, native_dtype(dtype))
    return mean, accumulator_dtype(mean)


def _native(leaf: Any) -> Any:
    own = contribution(leaf)
    return own if type(own) is np.ndarray else library_of(own).to_native(own)


def _require_divisor(ops: BoundOps, call: str, weight: Any, dtypes: set[np.dtype[Any]]) -> None:
    """Refuse, on all ranks, a sum of weights that sums of these dtypes cannot be divided by."""
    most = min(float(np.finfo(dtype).max) for dtype in dtypes)
    if 0 < weight <= most:
        return
    what = "are 0, so there is no mean"
    if weight:
        what = f"add up to {weight:.3g}, and may to at most {most:.3g}: scale all weights"
    no_mean = InvalidArgumentError(f"{call}: the weights of all replicas {what}")
    mark_shared(no_mean, ops.group.agreement.ranks)
    raise no_mean


def _divided(totals: list[Any], weight: Any, specs: list[Spec], memory: ResultMemory | None) -> list[Any]:
    """Divide sums: in place, or into new arrays of `memory`. Return them in the dtypes of the means."""
    means = []
    with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
        for total, spec in zip(totals, specs, strict=True):
            into = total if memory is None or total.dtype != spec.dtype else memory.empty(*spec)
            np.divide(total, total.dtype.type(weight), out=into)
            means.append(into.astype(spec.dtype, copy=False))
    return means
