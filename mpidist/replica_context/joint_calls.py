"""Calls that all replicas of one rank make together, where the number of replicas was chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, final

from mpidist import context_stack, nest
from mpidist.collectives import PendingResult, axis_of
from mpidist.context_stack import CurrentStrategy
from mpidist.cross_device_ops import CrossDeviceOps
from mpidist.errors import InvalidArgumentError
from mpidist.options import ReduceOp
from mpidist.replica_context.pending_writes import PendingWrites
from mpidist.replica_context.results_on_gpus import broadcast_to_gpus, copies_on_gpus
from mpidist.replica_context.turns import Turns
from mpidist.replicas import Replicas
from mpidist.transport import arrays, copied, on_device, shard_bounds
from mpidist.values import Contributions, DistributedValues, contributions, join_components, local_components

__all__ = ["JointCalls", "SharedResult"]

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
        return self.turns.meet("all_reduce", self._all_reduce, _Reduction(op, contributions(value), options, out))

    def start_all_reduce(self, op: Any, value: Any, options: Any, out: Any) -> SharedResult:
        """See `ReplicaContext.start_all_reduce`."""
        given = _Reduction(op, contributions(value), options, out)
        started: SharedResult = self.turns.meet("start_all_reduce", self._start_all_reduce, given)
        return started

    def reduce_scatter(self, op: Any, value: Any, axis: int, options: Any) -> Any:
        """See `ReplicaContext.reduce_scatter`."""
        given = _Reduction(op, contributions(value), options, None)
        return self.turns.meet(f"reduce_scatter along axis {axis}", partial(self._reduce_scatter, axis), given)

    def all_gather(self, value: Any, axis: int, options: Any) -> Any:
        """See `ReplicaContext.all_gather`."""
        given = _Reduction(None, contributions(value), options, None)
        return self.turns.meet(f"all_gather along axis {axis}", partial(self._all_gather, axis), given)

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
        return self._share(result, made.out)

    def _start_all_reduce(self, given: Sequence[_Reduction], error: Exception | None) -> Sequence[Any]:
        made, problem = self._common(given)
        pending = self._ops.start_all_reduce(made.op, made.value, made.options, out=made.out, error=error or problem)
        shared = _SharedPending(pending, partial(self._share, outs=made.out), self.turns)
        return [SharedResult(shared, at) for at in range(len(given))]

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
        return [self._own(part, at) for at, part in enumerate(parts)]

    def _all_gather(self, axis: int, given: Sequence[_Reduction], error: Exception | None) -> Sequence[Any]:
        made, problem = self._common(given)
        result = self._strategy.extended.all_gather("all_gather", made.value, axis, made.options, error or problem)
        return self._share(result, None)

    def _merge(
        self, merge_fn: Callable[..., Any], name: str, given: Sequence[Any], error: Exception | None
    ) -> Sequence[Any]:
        args: Any = ()
        kwargs: Any = {}
        try:
            positional, named = [list(one) for one, _ in given], [dict(one or {}) for _, one in given]
            for replica_id, one, other in zip(self._replicas.ids_here, positional, named, strict=False):
                if len(one) != len(positional[0]) or other.keys() != named[0].keys():
                    raise InvalidArgumentError(
                        f"replica {replica_id} passes {len(one)} arguments and the names {sorted(other)}, and replica "
                        f"{self._replicas.ids_here[0]} {len(positional[0])} and {sorted(named[0])}"
                    )
            args = [join_components(components, keeps_alike=True) for components in zip(*positional, strict=True)]
            kwargs = {key: join_components([one[key] for one in named], keeps_alike=True) for key in named[0]}
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = error or problem
        self._strategy.extended.agree("merge_call", {"function": name}, error)
        entry = context_stack.Entry(self._strategy, is_merge_call=True)
        result = context_stack.call(entry, merge_fn, self._strategy, *args, **kwargs)
        num_here = self._replicas.num_here
        whole = nest.map_structure(arrays.read_only_view, result)
        return [self._own(local_components(whole, at, num_here), at) for at in range(num_here)]

    def _common(self, given: Sequence[_Reduction]) -> tuple[_Reduction, Exception | None]:
        """Join the arguments of the replicas to those of the rank, with what is wrong with them."""
        ids, error = self._replicas.ids_here, None
        first, *_ = passed = [_passed(one) for one in given]
        for replica_id, other in zip(ids, passed, strict=False):
            for what in (name for name in first if other[name] != first[name]):
                text = f"replica {replica_id} passes {what} {other[what]}, and replica {ids[0]} {first[what]}"
                error = InvalidArgumentError(text)
        outs = None if given[0].out is None or error is not None else Contributions([one.out for one in given])
        return given[0]._replace(value=Contributions([one.value for one in given]), out=outs), error

    def _share(self, result: Any, outs: Contributions | None) -> list[Any]:
        """Return the result for each replica of the rank: in the outs of each, or one that all share.

        All outs are written here, before a replica goes on, and may change its own.
        """
        if outs is None:
            return self._own_copies(nest.map_structure(arrays.make_read_only, result))
        first, *others = (nest.flatten(out)[0] for out in outs.nests)
        if broadcast_to_gpus(self._strategy.extended.group.devices, self._replicas, first, others):
            return list(outs.nests)
        for at, other in enumerate(others, 1):
            with on_device(self._replicas.devices, at):
                for source, target in zip(first, other, strict=True):
                    if target is not source:
                        target[...] = arrays.on_current_device(source)
        return list(outs.nests)

    def _own_copies(self, result: Any) -> list[Any]:
        """Return a result for each replica of the rank: one that all share, or a copy where replicas could write it."""
        if self._replicas.gpus_here:
            leaves, _ = nest.flatten(result)
            copies = copies_on_gpus(self._strategy.extended.group.devices, self._replicas, leaves)
            if copies is not None:
                return [result, *(nest.rebuild(result, own) for own in copies)]
        return [self._own(result, at) for at in range(self._replicas.num_here)]

    def _own(self, result: Any, at: int) -> Any:
        """Copy for a replica what all replicas would share, and could write."""
        leaves, _ = nest.flatten(result)
        shared = [not isinstance(leaf, DistributedValues) and arrays.stays_writable(leaf) for leaf in leaves]
        if at == 0 or not any(shared):
            return result
        with on_device(self._replicas.devices, at):
            copies = [copied(leaf) if must else leaf for leaf, must in zip(leaves, shared, strict=True)]
        return nest.rebuild(result, copies)


@final
class _SharedPending:
    """A started all-reduce of all replicas of a rank."""

    def __init__(self, pending: PendingResult, share: Callable[[Any], list[Any]], turns: Turns) -> None:
        self.pending, self._share, self._turns = pending, share, turns
        self._outcomes: list[Any] | None = None

    def wait(self, at: int) -> Any:
        if self._outcomes is None:  # then no replica has waited, and none may use its outs
            self._turns.use_device(0)
            self._outcomes = self._share(self.pending.wait())
            self._turns.use_device(at)
        return self._outcomes[at]


@final
class SharedResult:
    """A started all-reduce, as one of the replicas of a rank holds it: see `PendingResult`.

    Args:
        shared: The all-reduce of the rank.
        at: Which replica of the rank, counted from 0.
    """

    def __init__(self, shared: _SharedPending, at: int) -> None:
        self._shared, self._at = shared, at

    def is_done(self) -> bool:
        """Whether the result is there: `PendingResult.is_done`."""
        return self._shared.pending.is_done()

    def wait(self) -> Any:
        """Wait for the result: `PendingResult.wait`."""
        return self._shared.wait(self._at)


def _passed(given: _Reduction) -> dict[str, str]:
    """Describe what all replicas of a rank must pass alike."""
    op = given.op
    with suppress(ValueError, TypeError):  # of what is no operation: the call refuses it
        op = ReduceOp.of(op)
    return {"reduce_op": str(op), "options": str(given.options), "out": "none" if given.out is None else "some"}


def _part(array: Any, axis: int, replica_id: int, num_replicas: int) -> Any:
    """Copy a replica's part of an array along an axis."""
    bounds = shard_bounds(array.shape[axis], num_replicas)
    return array.swapaxes(0, axis)[bounds[replica_id] : bounds[replica_id + 1]].swapaxes(0, axis).copy()
