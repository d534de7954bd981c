"""Calls of a rank that is one replica, as the number of replicas was not chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

from mpidist import context_stack
from mpidist.collectives.open_call import PendingResult
from mpidist.collectives.reduce_scatter import reduce_scatter
from mpidist.context_stack import CurrentStrategy, parts_of
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.cross_device_ops.weighted_mean import weighted_mean
from mpidist.replica_context.replica_context import ReplicaContext
from mpidist.values import local_components

__all__ = ["SoloCalls"]


@final
class SoloCalls:
    """The calls of a rank that is one replica. It has the methods of `JointCalls`, and joins nothing."""

    make_variable: Final = None  # a variable is made as outside of `run`

    def __init__(self, strategy: CurrentStrategy) -> None:
        self._strategy, self._replica_id = strategy, parts_of(strategy).replicas.ids_here[0]
        self._ops: BoundOps = parts_of(strategy).cross_device_ops

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        entry = context_stack.Entry(self._strategy, ReplicaContext(self._strategy, self._replica_id, self))
        own_args = local_components(list(args)) if args else ()
        return context_stack.call(entry, fn, *own_args, **(local_components(dict(kwargs)) if kwargs else {}))

    def all_reduce(self, op: Any, value: Any, options: Any, weight: Any, out: Any) -> Any:
        if weight is not None:
            return weighted_mean(self._ops, "all_reduce", op, value, weight, options, out=out)
        return self._ops.all_reduce(op, value, options, out=out)

    def start_all_reduce(self, op: Any, value: Any, options: Any, out: Any) -> PendingResult:
        return self._ops.start_all_reduce(op, value, options, out=out)

    def reduce_scatter(self, op: Any, value: Any, axis: int, options: Any, out: Any) -> Any:
        return reduce_scatter(self._ops.group, op, value, axis, self._ops.options, options, out)

    def all_gather(self, value: Any, axis: int, options: Any, out: Any) -> Any:
        return parts_of(self._strategy).all_gather("all_gather", value, axis, options, out=out)

    def merge_call(self, merge_fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        name = getattr(merge_fn, "__qualname__", type(merge_fn).__name__)
        merge_args: list[Any] = []
        merge_kwargs: dict[str, Any] = {}
        error = None
        try:
            merge_args, merge_kwargs = list(args), dict(kwargs or {})
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = problem
        parts_of(self._strategy).agree("merge_call", {"function": name}, error)
        entry = context_stack.Entry(self._strategy, is_merge_call=True)
        return local_components(context_stack.call(entry, merge_fn, self._strategy, *merge_args, **merge_kwargs))

    def write_together(self, call: str, write: Callable[..., None], argument: Any, error: Exception | None) -> None:
        write([argument], error)
