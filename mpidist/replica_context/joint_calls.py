"""Calls that all replicas of one rank make together, where the number of replicas was chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np

from mpidist import context_stack, nest
from mpidist.collectives import PendingResult, axis_of
from mpidist.context_stack import CurrentStrategy
from mpidist.cross_device_ops import CrossDeviceOps
from mpidist.errors import InvalidArgumentError
from mpidist.replica_context.pending_writes import PendingWrites
from mpidist.replica_context.turns import Turns
from mpidist.replicas import Replicas
from mpidist.transport import arrays, shard_bounds
from mpidist.values import Contributions, DistributedValues, PerReplica, contributions, local_components

__all__ = ["JointCalls", "SharedResult", "read_only"]

WriteTogether = Callable[[Sequence[Any], "Exception | None"], None]


@final
class _Reduction(NamedTuple):
    """What a replica passes to an all-reduce."""

    op: Any
    value: Any
    options: Any
    out: Any


@final
class JointCalls:
    """The collective calls of the replicas of one rank during one `Strategy.run`.

    Each method is called by every replica of the rank with its own arguments; the rank then makes one call for all.

    Args:
        strategy: The strategy.
        cross_device_ops: The algorithm, bound to the strategy's ranks.
        replicas: Which replicas the rank carries.
        turns: Lets the replicas meet. Also an attribute.
        pending: What the replicas wrote since they last met. Also an attribute.
    """

    def __init__(
        self,
        strategy: CurrentStrategy,
        cross_device_ops: CrossDeviceOps,
        replicas: Replicas,
        turns: Turns,
        pending: PendingWrites,
    ) -> None:
        self._strategy, self._ops, self._replicas = strategy, cross_device_ops, replicas
        self.turns = turns
        self.pending = pending

    def all_reduce(self, op: Any, value: Any, options: Any, out: Any) -> Any:
        """See `ReplicaContext.all_reduce`. The result is one array for all replicas of the rank, and read-only."""
        result = self.turns.meet("all_reduce", self._all_reduce, _Reduction(op, contributions(value), options, out))
        return self._deliver(result, out)

    def start_all_reduce(self, op: Any, value: Any, options: Any, out: Any) -> SharedResult:
        """See `ReplicaContext.start_all_reduce`."""
        own = _Reduction(op, contributions(value), options, out)
        pending = self.turns.meet("start_all_reduce", self._start_all_reduce, own)
        return SharedResult(pending, partial(self._deliver, out=out))

    def reduce_scatter(self, op: Any, value: Any, axis: int, options: Any) -> Any:
        """See `ReplicaContext.reduce_scatter`."""
        call = f"reduce_scatter along axis {axis}"
        own = _Reduction(op, contributions(value), options, None)
        return self._here(self.turns.meet(call, partial(self._reduce_scatter, axis), own))

    def all_gather(self, value: Any, axis: int, options: Any) -> Any:
        """See `ReplicaContext.all_gather`."""
        call = f"all_gather along axis {axis}"
        return self._deliver(
            self.turns.meet(call, partial(self._all_gather, axis, options), contributions(value)), None
        )

    def merge_call(self, merge_fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        """See `ReplicaContext.merge_call`."""
        name = getattr(merge_fn, "__qualname__", type(merge_fn).__name__)
        return self.turns.meet(f"merge_call of {name}", partial(self._merge, merge_fn, name), (args, kwargs))

    def write_together(self, call: str, write: WriteTogether, argument: Any, error: Exception | None) -> None:
        """Write an array that the replicas of this rank share, once for all of them. Collective.

        Args:
            call: The name of the call, for errors.
            write: Writes, given the argument of each replica, and what is wrong on this rank. Collective.
            argument: What this replica writes.
            error: What is wrong with this argument.
        """
        self.turns.meet(call, partial(self._write_together, write), (argument, error))

    def _write_together(
        self, write: WriteTogether, given: Sequence[tuple[Any, Exception | None]], error: Exception | None
    ) -> Sequence[None]:
        write([argument for argument, _ in given], error or next((wrong for _, wrong in given if wrong), None))
        return [None] * len(given)

    def _all_reduce(self, given: Sequence[_Reduction], error: Exception | None) -> Sequence[Any]:
        made, problem = self._common(given)
        result = self._ops.all_reduce(made.op, made.value, made.options, out=made.out, error=error or problem)
        return [result] * len(given)

    def _start_all_reduce(self, given: Sequence[_Reduction], error: Exception | None) -> Sequence[Any]:
        made, problem = self._common(given)
        pending = self._ops.start_all_reduce(made.op, made.value, made.options, out=made.out, error=error or problem)
        return [pending] * len(given)

    def _reduce_scatter(self, axis: int, given: Sequence[_Reduction], error: Exception | None) -> Sequence[Any]:
        made, problem = self._common(given)
        call = f"reduce_scatter along axis {axis}"
        result = self._ops.all_reduce(made.op, made.value, made.options, call=call, error=error or problem)
        leaves, _ = nest.flatten(result)
        moved = [(leaf, axis_of(axis, leaf.shape, "scatter")) for leaf in leaves]
        parts = []
        for replica_id in self._replicas.ids_here:
            cut = [_part(leaf, at, replica_id, self._replicas.total) for leaf, at in moved]
            parts.append(nest.rebuild(result, cut))
        return parts

    def _all_gather(self, axis: int, options: Any, given: Sequence[Any], error: Exception | None) -> Sequence[Any]:
        result = self._strategy.extended.all_gather("all_gather", Contributions(given), axis, options, error)
        return [result] * len(given)

    def _merge(
        self, merge_fn: Callable[..., Any], name: str, given: Sequence[Any], error: Exception | None
    ) -> Sequence[Any]:
        args: Any = ()
        kwargs: Any = {}
        try:
            args = [_merged(components) for components in zip(*(list(one) for one, _ in given), strict=True)]
            named = [dict(one or {}) for _, one in given]
            kwargs = {key: _merged([one[key] for one in named]) for key in named[0]}
            if any(one.keys() != named[0].keys() or len(one) != len(named[0]) for one in named):
                raise InvalidArgumentError("replicas pass unlike keyword arguments")
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = error or problem
        self._strategy.extended.agree("merge_call", {"function": name}, error)
        entry = context_stack.Entry(self._strategy, is_merge_call=True)
        result = context_stack.call(entry, merge_fn, self._strategy, *args, **kwargs)
        num_here = self._replicas.num_here
        return [local_components(result, at, num_here) for at in range(num_here)]

    def _common(self, given: Sequence[_Reduction]) -> tuple[_Reduction, Exception | None]:
        """Join the arguments of the replicas to those of the rank, with what is wrong with them."""
        first, error = given[0], None
        for replica_id, other in zip(self._replicas.ids_here[1:], given[1:], strict=False):
            for name, mine, theirs in (("reduce_op", other.op, first.op), ("options", other.options, first.options)):
                if mine != theirs:
                    who = f"replica {replica_id} passes {name} {mine!r}"
                    error = InvalidArgumentError(f"{who}, and replica {self._replicas.ids_here[0]} {theirs!r}")
            if (other.out is None) != (first.out is None):
                error = InvalidArgumentError("some replicas of the rank pass out=, and others do not")
        return first._replace(value=Contributions([one.value for one in given])), error

    def _deliver(self, result: Any, out: Any) -> Any:
        """Give this replica a result that all replicas of the rank share: in `out`, or read-only. In its own turn."""
        if out is None:
            return read_only(self._here(result))
        if out is not result:
            for source, target in zip(nest.flatten(result)[0], nest.flatten(out)[0], strict=True):
                if target is not source:
                    target[...] = self._here(source)
        return out

    def _here(self, result: Any) -> Any:
        """Bring arrays to this replica's device."""
        return nest.map_structure(arrays.on_current_device, result) if self.turns.has_several_gpus else result


@final
class SharedResult:
    """A started all-reduce, as one of the replicas of a rank holds it: see `PendingResult`.

    Args:
        pending: The all-reduce of the rank.
        deliver: Gives the replica the result.
    """

    def __init__(self, pending: PendingResult, deliver: Callable[[Any], Any]) -> None:
        self._pending, self._deliver = pending, deliver

    def is_done(self) -> bool:
        """Whether the result is there: `PendingResult.is_done`."""
        return self._pending.is_done()

    def wait(self) -> Any:
        """Wait for the result: `PendingResult.wait`."""
        return self._deliver(self._pending.wait())


def read_only(result: Any) -> Any:
    """Let no replica write the arrays of a result, which all replicas of the rank share."""
    for leaf in nest.flatten(result)[0]:
        if type(leaf) is np.ndarray:
            leaf.setflags(write=False)
    return result


def _part(array: Any, axis: int, replica_id: int, num_replicas: int) -> Any:
    """Copy a replica's part of an array along an axis."""
    bounds = shard_bounds(array.shape[axis], num_replicas)
    return array.swapaxes(0, axis)[bounds[replica_id] : bounds[replica_id + 1]].swapaxes(0, axis).copy()


def _merged(components: Sequence[Any]) -> Any:
    """Join one argument of all replicas to what `merge_call` passes on."""
    leaves = [nest.flatten(component) for component in components]
    if any(structure != leaves[0][1] for _, structure in leaves):
        return PerReplica(tuple(components))
    joined = [_merged_leaf(parts) for parts in zip(*(flat for flat, _ in leaves), strict=True)]
    return nest.rebuild(components[0], joined)


def _merged_leaf(parts: tuple[Any, ...]) -> Any:
    """Keep what is the same on all replicas and no array, such as a variable or a learning rate."""
    first = parts[0]
    is_array = hasattr(first, "shape") and not isinstance(first, DistributedValues)
    if not is_array and all(part is first or (type(part) is type(first) and part == first) for part in parts):
        return first
    return PerReplica(parts)
