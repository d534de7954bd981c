"""The mean over replicas of which each has a weight."""

from __future__ import annotations

import math
from typing import Any

from mpidist.collectives import (
    NO_CONTRIBUTIONS,
    flatten_contributions,
    name_call,
    native_dtype,
    per_replica_value,
    rebuild_results,
    replica_components,
    wire_and_result_dtypes,
)
from mpidist.cross_device_ops.cross_device_ops import CrossDeviceOps
from mpidist.errors import InvalidArgumentError
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.replicas import Replicas
from mpidist.transport import accumulator_dtype, arrays, library_of, mark_shared, value_text
from mpidist.values import contribution

__all__ = ["weighted_mean"]


def weighted_mean(
    ops: CrossDeviceOps,
    replicas: Replicas,
    reduce_op: ReduceOp | str,
    value: Any,
    weight: Any,
    options: CommunicationOptions | None,
    has_axis: bool = False,
) -> Any:
    """Divide the sum of values times weights by the sum of weights, over replicas. Collective: one all-reduce.

    A value whose weight is 0 does not count, whatever it is: also the mean of no rows, which is not a number.

    Args:
        ops: The algorithm, bound to the ranks.
        replicas: Which replicas this rank carries.
        reduce_op: MEAN or its name in any case.
        value: An array, a distributed value of one, or a nest.
        weight: A number >= 0, or a `PerReplica` of them.
        options: Override the strategy's.
        has_axis: Whether the caller asked for axes, too, which is refused.

    Returns:
        A nest like `value`.

    Raises:
        InvalidArgumentError: If the ranks' arguments differ, a value cannot be averaged, or all weights are 0. On every
            rank.
        ValueError: If `reduce_op` is not MEAN, a weight is negative or not finite, or axes are given. On every rank.
        TypeError: If a weight is no number. On every rank.
    """
    call = "reduce with weights"
    flat, sums, weights, error = NO_CONTRIBUTIONS, [], [], None
    try:
        op = ReduceOp.of(reduce_op)
        if op is not ReduceOp.MEAN:
            raise ValueError(f"weight is for means, and the operation is {op}: multiply what is summed by yourself")
        if has_axis:
            raise ValueError("weight and axis exclude each other: a mean along an axis weighs by the axis' length")
        flat = flatten_contributions(op, value, ops.group, replicas)
        weights = [_number_of(component) for component in replica_components("weight", weight, replicas)]
        products = [
            [_weighted(contribution(leaf), own_weight) for leaf in leaves]
            for leaves, own_weight in zip([flat.leaves, *flat.others], weights, strict=True)
        ]
        sums = [per_replica_value(of_replicas, replicas) for of_replicas in zip(*products, strict=True)]
    except Exception as problem:  # of any kind: the other ranks must learn of it
        error = name_call(problem, call)
    given = [] if error is not None else (sums, per_replica_value(weights, replicas))
    totals, total_weight = ops.all_reduce(ReduceOp.SUM, given, options, call=call, error=error)
    if not total_weight > 0:
        no_mean = InvalidArgumentError(f"{call}: the weights of all replicas are 0, so there is no mean")
        mark_shared(no_mean, ops.group.agreement.ranks)
        raise no_mean
    means = [
        _divided(weighted_sum, float(total_weight), contribution(leaf))
        for weighted_sum, leaf in zip(totals, flat.leaves, strict=True)
    ]
    return rebuild_results(value, means, flat.mirrored)


def _number_of(weight: Any) -> float:
    """Return a weight, a number of any library, as one of double precision."""
    given = contribution(weight)
    try:
        number = arrays.on_host(library_of(given).to_native(given))
    except TypeError as problem:
        raise TypeError(f"weight must be a number for each replica: {problem}") from problem
    if number.shape != () or accumulator_dtype(number.dtype).kind not in "iuf":
        raise TypeError(f"weight must be a number for each replica, got {value_text(weight)}")
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"weight must be a finite number >= 0, got {number}")
    return float(number)


def _weighted(value: Any, weight: float) -> Any:
    """Return a value times its weight, in a dtype that sums of it fit into."""
    array = library_of(value).to_native(value)
    _, result = wire_and_result_dtypes(ReduceOp.MEAN, native_dtype(array.dtype))
    product = arrays.empty(array.shape, accumulator_dtype(result), arrays.is_device(array))
    product[...] = array if weight else 0
    product *= product.dtype.type(weight)
    return product


def _divided(total: Any, weight: float, value: Any) -> Any:
    """Return a sum divided by the sum of weights, as an array of the library of `value`."""
    library = library_of(value)
    _, dtype = wire_and_result_dtypes(ReduceOp.MEAN, native_dtype(library.to_native(value).dtype))
    mean = arrays.empty(total.shape, dtype, arrays.is_device(total))
    mean[...] = total / weight
    return library.from_native(mean, value)
