"""Makes reducing calls of what users pass. Never raises: what is wrong becomes an error that all ranks raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from mpidist.collectives.arguments import (
    NO_CONTRIBUTIONS,
    MirroredLeaves,
    ValueWithDestinations,
    flatten_contributions,
    flatten_out,
)
from mpidist.collectives.call import ReductionCall
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.replicas import Replicas
from mpidist.transport import SyncGroup

__all__ = ["open_all_reduce", "open_batch_reduce"]

Merge = Callable[[Any], CommunicationOptions]  # overrides the defaults by the options of a call


def open_all_reduce(
    group: SyncGroup,
    replicas: Replicas,
    merge: Merge,
    name: str,
    reduce_op: Any,
    value: Any,
    options: Any,
    out: Any,
    error: Exception | None,
) -> tuple[ReductionCall, MirroredLeaves]:
    """Make an all-reduce of the arguments of `CrossDeviceOps.all_reduce`. Local.

    Returns:
        The call, and the mirrored leaves, which are not sent.
    """
    flat = NO_CONTRIBUTIONS
    outs = None
    op = ReduceOp.SUM
    merged = merge(None)
    try:
        op = reduce_op if type(reduce_op) is ReduceOp else ReduceOp.of(reduce_op)
        if options is not None:
            merged = merge(options)
        flat = flatten_contributions(op, value, group, replicas)
        if out is not None:
            outs = flatten_out(flat.structure, bool(flat.mirrored), out)
    except Exception as problem:  # of any kind: the other ranks must learn of it
        error = error or problem
    kept = tuple(flat.mirrored)
    call = ReductionCall(name, op, merged, flat.leaves, flat.structure, kept, None, outs, error, flat.others)
    return call, flat.mirrored


def open_batch_reduce(
    group: SyncGroup,
    replicas: Replicas,
    merge: Merge,
    name: str,
    reduce_op: Any,
    pairs: Iterable[Any],
    options: Any,
) -> tuple[ReductionCall, list[ValueWithDestinations]]:
    """Make a call of the arguments of `CrossDeviceOps.batch_reduce`. Local.

    Returns:
        The call, and the values, which build the results.
    """
    op, merged, error = ReduceOp.SUM, merge(None), None
    opened: list[ValueWithDestinations] = []
    try:
        op = ReduceOp.of(reduce_op)
        merged = merge(options)
        opened = [ValueWithDestinations.open(op, pair, group, replicas) for pair in pairs]
    except Exception as problem:  # of any kind: the other ranks must learn of it
        error = problem
    leaves = [leaf for pair in opened for leaf in pair.flat.leaves]
    others = [list(chain(*parts)) for parts in zip(*(pair.flat.others for pair in opened), strict=True)]
    ranks = tuple(pair.ranks for pair in opened for _ in pair.flat.leaves)
    forms = tuple(pair.flat.structure for pair in opened)
    kept = tuple(tuple(pair.flat.mirrored) for pair in opened)
    return ReductionCall(name, op, merged, leaves, forms, kept, ranks, None, error, others), opened
