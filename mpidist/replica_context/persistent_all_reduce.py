"""All-reduces of given arrays: checked once, and made again and again."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from mpidist import nest
from mpidist.collectives.arguments.destinations import rebuild_results
from mpidist.collectives.open_call import PendingResult
from mpidist.collectives.repeated_calls import KnownCall, key_of_repeated
from mpidist.context_stack import CurrentStrategy, parts_of
from mpidist.cross_device_ops.bound_ops import BoundOps

__all__ = ["PersistentAllReduce"]


@final
class PersistentAllReduce:
    """An all-reduce of given arrays, which `Strategy.all_reduce_init` has checked.

    Call it, or `start` it and then `wait`, as often as needed, inside `run` and outside. All ranks make the same calls
    in the same order. Each is an `all_reduce` or a `start_all_reduce` of the numbers that the arrays hold then, and
    raises what these raise. If the number of replicas was chosen, it is made outside of `run`. One array is reduced in
    the shape, dtype and memory that it had at first: do not resize it, nor make it read-only.
    """

    def __init__(self, strategy: CurrentStrategy, reduce_op: Any, value: Any, options: Any, out: Any) -> None:
        parts = parts_of(strategy)
        parts.require_computing("all_reduce_init")
        ops: BoundOps = parts.cross_device_ops
        ops.compare_all_reduce("all_reduce_init", reduce_op, value, options, out)
        is_bare = ops.replicas.tree is None
        self._require_context = parts.require_not_mixed if is_bare else parts.require_cross_replica
        kept = _kept(value)
        into = kept if out is value else None if out is None else _kept(out)
        self._ops, self._arguments, self._into, self._out = ops, (reduce_op, kept, options), into, out
        self._group, self._repeated, self._timeout = ops.group, ops.reductions.repeated, ops.timeout_of(options)
        self._key = None
        if is_bare and set(map(type, nest.flatten(kept)[0])) == {np.ndarray}:  # tensors may change their memory
            self._key = key_of_repeated("all_reduce", reduce_op, kept, options, into, None)
        self._known: KnownCall | None = None
        self._known_for: Any = None
        self._started: PendingResult | None = None

    def __call__(self) -> Any:
        """Reduce, and return what `all_reduce` returns. Collective."""
        self._require_context("all_reduce")
        known = self._known
        if known is None or self._known_for != (self._group.levels, self._group.shared.num_windows):
            known = self._find()
        if known is None or self._key is None:
            result = self._ops.all_reduce(*self._arguments, out=self._into)
        else:
            result = self._repeated.make(self._timeout, known, *self._key[1:3])
            if type(result) is list and self._out is None:
                result = rebuild_results(self._arguments[1], result, {})
        return result if self._out is None else self._out

    def start(self) -> PersistentAllReduce:
        """Start to reduce, and return this object before the reduction completes. Collective.

        The arrays must not be changed until `wait` has returned, which each `start` needs, also after an error.

        Raises:
            RuntimeError: If the last `start` was not waited for.
        """
        self._require_context("start_all_reduce")
        if self._started is not None:
            raise RuntimeError(
                "start() of a persistent all-reduce that is under way: call wait() before the next start()"
            )
        self._started = self._ops.start_all_reduce(*self._arguments, out=self._into)
        return self

    def is_done(self) -> bool:
        """Whether the result of the last `start` is there. See `PendingResult.is_done`."""
        return self._started is not None and self._started.is_done()

    def wait(self) -> Any:
        """Wait for the result of the last `start`, and return what `all_reduce` returns. Collective."""
        started, self._started = self._started, None
        if started is None:
            raise RuntimeError(
                "wait() of a persistent all-reduce that was not started: call start() before each wait()"
            )
        result = started.wait()
        return result if self._out is None else self._out

    def _find(self) -> KnownCall | None:
        """Find an earlier call like this one; that of an array holds for later calls. Local."""
        known = None if self._key is None else self._repeated.find(*self._key[:3])
        if type(self._arguments[1]) is np.ndarray:
            self._known, self._known_for = known, (self._group.levels, self._group.shared.num_windows)
        return known


def _kept(value: Any) -> Any:
    """Copy the containers of a nest, which the program may change; view an array, whose shape it may change."""
    return nest.map_structure(lambda leaf: leaf.view() if leaf is value and type(leaf) is np.ndarray else leaf, value)
