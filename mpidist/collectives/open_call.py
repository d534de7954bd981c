"""Turns the arguments of users into reducing calls, and makes the handles of started calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, final

import numpy as np

from mpidist import nest
from mpidist.collectives.arguments.destinations import (
    NO_CONTRIBUTIONS,
    MirroredLeaves,
    flatten_contributions,
    rebuild_results,
)
from mpidist.collectives.arguments.out_arrays import flatten_out
from mpidist.collectives.arguments.signature import name_call
from mpidist.collectives.plans.call import ReductionCall
from mpidist.collectives.reductions import Reductions
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.transport.group.started_calls import Pending
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.values import Contributions

__all__ = ["PendingResult", "open_all_reduce"]

Merge = Callable[[Any], CommunicationOptions]  # overrides the algorithm's options by those of a call


def open_all_reduce(
    reductions: Reductions,
    merge: Merge,
    name: str,
    reduce_op: Any,
    value: Any,
    options: Any,
    out: Any,
    error: Exception | None,
    ranks: Sequence[tuple[int, ...]] | None = None,
) -> tuple[ReductionCall, MirroredLeaves]:
    """Make the call of `BoundOps.all_reduce`, or of its error; return it and the mirrored leaves. Local."""
    leaves, structure, mirrored, others = NO_CONTRIBUTIONS
    outs, other_outs, destinations = None, [], None
    op = ReduceOp.SUM
    group, replicas = reductions.group, reductions.replicas
    merged, key = merge(None), None
    try:
        op = reduce_op if type(reduce_op) is ReduceOp else ReduceOp.of(reduce_op)
        if options is not None:
            merged = merge(options)
        is_plain = replicas.are_bare and ranks is None
        if is_plain and type(value) is np.ndarray:  # the most common argument
            leaves = [value]
        else:
            if is_plain and error is None:
                key, call = reductions.device_calls.find(name, op, value, options, out)
                if call is not None:
                    call.timeout_seconds = merged.timeout_seconds
                    return call, mirrored
            leaves, structure, mirrored, others = flatten_contributions(op, value, group, replicas)
        destinations = None if ranks is None else _of_leaves(ranks, value, mirrored)
        if out is not None and out is value and replicas.are_bare and not mirrored:
            outs = list(leaves)
        elif out is not None:
            nests = out.nests if isinstance(out, Contributions) else [out]
            outs, *other_outs = [flatten_out(structure, bool(mirrored), one) for one in nests]
    except Exception as problem:  # of any kind: the other ranks must learn of it
        error = error or name_call(problem, name)
    call = ReductionCall(
        name, op, merged, leaves, structure, tuple(mirrored), destinations, outs=outs, error=error, others=others
    )
    call.other_outs, call.device_key = other_outs, key
    return call, mirrored


def _of_leaves(ranks: Sequence[tuple[int, ...]], value: Any, mirrored: MirroredLeaves) -> tuple[tuple[int, ...], ...]:
    """Return the destinations of each leaf that is sent, from those of the value, or of each value of a list."""
    values = [value] if len(ranks) == 1 else value
    of_leaves = [own for own, one in zip(ranks, values, strict=True) for _ in nest.flatten(one)[0]]
    return tuple(own for at, own in enumerate(of_leaves) if at not in mirrored)


@final
class PendingResult:
    """A reduction that `ReplicaContext.start_all_reduce` started.

    Started reductions progress in the order of their start, whenever this rank starts or waits for a reduction, calls
    `is_done`, or makes another collective call, which first finishes all started reductions. With several nodes or
    GPUs a thread advances them between those calls, where MPI allows a second thread (`MPI.THREAD_MULTIPLE`, mpi4py's
    default).

    A reduction of arrays on a GPU comes after the work that the current stream held when the reduction was started. All
    its work is launched at once, on other streams, when all ranks have started the reduction; where data goes through
    the host, the thread moves the data.
    """

    def __init__(self, group: SyncGroup, call: Pending, value: Any, out: Any, mirrored: MirroredLeaves) -> None:
        self._group, self._call = group, call
        self._form = None
        if out is None:
            with suppress(Exception):  # the value may be no nest: the call is refused then, and `wait` raises why
                like = value.nests[0] if isinstance(value, Contributions) else value
                self._form = nest.map_structure(lambda _: None, like)  # a copy: the caller may change a list in it
        self._out, self._mirrored = out, mirrored

    def is_done(self) -> bool:
        """Whether the result is there. Also advances started reductions.

        Does not block, with one exception: where ranks send messages and MPI allows no second thread, `is_done` may
        wait for ranks that started the same reductions. It never waits for arrays on a GPU.
        """
        if not self._call.is_done:
            self._group.require_mpi("is_done()")
            self._group.calls.advance(may_block=True)
            if not self._call.is_done and self._group.agreement.has_notes():  # another rank may never come
                self._group.calls.finish(self._call)
        return self._call.is_done

    def wait(self) -> Any:
        """Wait for the result, and return what `all_reduce` returns. Collective. May be called again.

        Also waits for the GPU: arguments and results can be used in any stream afterwards.

        Raises:
            Exception: What `all_reduce` raises.
        """
        if not self._call.is_done:
            self._group.require_mpi("wait()")
            self._group.calls.finish(self._call)
        results = self._call.result
        return self._out if self._out is not None else rebuild_results(self._form, results, self._mirrored)
