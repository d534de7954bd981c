"""Makes reducing calls of what users pass. Never raises: what is wrong becomes an error that all ranks raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import numpy as np

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
from mpidist.values import Contributions

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
    leaves, structure, mirrored, others = NO_CONTRIBUTIONS
    outs, other_outs = None, []
    op = ReduceOp.SUM
    merged = merge(None)
    try:
        op = reduce_op if type(reduce_op) is ReduceOp else ReduceOp.of(reduce_op)
        if options is not None:
            merged = merge(options)
        if type(value) is np.ndarray and replicas.tree is None:  # the most common call, made faster
            leaves = [value]
        else:
            leaves, structure, mirrored, others = flatten_contributions(op, value, group, replicas)
        if out is not None:
            nests = out.nests if isinstance(out, Contributions) else [out]
            outs, *other_outs = [flatten_out(structure, bool(mirrored), one) for one in nests]
    except Exception as problem:  # of any kind: the other ranks must learn of it
        error = error or problem
    call = ReductionCall(name, op, merged, leaves, structure, tuple(mirrored), None, outs, error, others)
    call.other_outs = other_outs
    return call, mirrored


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
