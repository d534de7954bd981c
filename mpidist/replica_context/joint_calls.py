"""Calls that all replicas of one rank make together, where the number of replicas was chosen (`replicas=`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, final

import numpy as np

from mpidist import context_stack, nest
from mpidist.collectives.arguments.operands import Operands, axis_of, specs_along
from mpidist.collectives.arguments.out_arrays import LateOuts
from mpidist.collectives.arguments.signature import name_call
from mpidist.collectives.open_call import PendingResult
from mpidist.collectives.plans.arithmetic import wire_and_result_dtypes
from mpidist.context_stack import CurrentStrategy, parts_of
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.cross_device_ops.weighted_mean import weighted_mean
from mpidist.errors import InvalidArgumentError
from mpidist.options import ReduceOp
from mpidist.replica_context.pending_writes import PendingWrites
from mpidist.replica_context.replica_context import ReplicaContext, SharedResult
from mpidist.replica_context.turns import Turns
from mpidist.replicas import Replicas
from mpidist.transport import arrays
from mpidist.transport.array_libraries.libraries import copied, library_of
from mpidist.transport.communicator import shard_bounds
from mpidist.transport.devices import on_device
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.values import Contributions, DistributedValues, contributions, join_components, local_components

__all__ = ["JointCalls", "JointWork"]

WriteTogether = Callable[[Sequence[Any], "Exception | None"], None]


@final
class _Arguments(NamedTuple):
    """Arguments of one replica for a collective call; `None` for those that the call does not take."""

    op: Any
    value: Any
    options: Any
    out: Any
    weight: Any = None


@final
class JointCalls:
    """The collective calls of the replicas of one rank, where the number of replicas was chosen.

    Every replica of the rank calls a public method, which is that of `ReplicaContext`, with its own arguments. Once all
    of them have, the private method of the same name makes the call once, for the rank: it gets the arguments of all
    replicas, and an error if they differ. `pending`: the writes of the replicas since they last met.
    """

    def __init__(self, strategy: CurrentStrategy) -> None:
        self._strategy = strategy
        self._ops: BoundOps = parts_of(strategy).cross_device_ops
        self._group: SyncGroup = parts_of(strategy).group
        self._replicas: Replicas = parts_of(strategy).replicas
        # Where each rank has one replica, there is nothing to join, or to write once.
        self._bare_ops = None if self._replicas.share_ranks else self._ops.of_bare_values()
        ids, devices = self._replicas.ids_here, self._replicas.devices
        self.pending = PendingWrites(ids)
        self._turns = Turns(ids, devices, self.pending)
        self._in_use = Lock()

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        """See `Strategy.run`. As collective as the function is."""
        self._group.agreement.run += 1  # ranks compare it: a call that a replica left out shows in the next one
        if self._bare_ops is not None:
            return join_components([self._body(0, fn, args, kwargs)()])
        if not self._in_use.acquire(blocking=False):  # by a run whose `merge_call` runs this one, or another thread
            return JointCalls(self._strategy)._run(fn, args, kwargs)
        try:
            return self._run(fn, args, kwargs)
        finally:
            self._in_use.release()

    def _run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        bodies = [self._body(at, fn, args, kwargs) for at in range(self._replicas.num_here)]
        return join_components(self._turns.run(bodies))

    def _body(
        self, at: int, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Callable[[], Any]:
        """Return the function that a replica runs."""
        replicas = self._replicas
        own_args = local_components(list(args), at, replicas.num_here) if args else ()
        own_kwargs = local_components(dict(kwargs), at, replicas.num_here) if kwargs else {}
        context = ReplicaContext(self._strategy, replicas.ids_here[at], self, replicas.devices[at])
        return partial(context_stack.call, context_stack.Entry(self._strategy, context), fn, *own_args, **own_kwargs)

    def all_reduce(self, op: Any, value: Any, options: Any, weight: Any, out: Any) -> Any:
        """See `ReplicaContext.all_reduce`. The result is one array for all replicas of the rank, and read-only."""
        if type(value) is not np.ndarray:
            value = contributions(value)
        if self._bare_ops is not None and weight is None:
            result = self._bare_ops.all_reduce(op, value, options, out=out)
            return result if out is not None else _read_only(result)
        return self._turns.meet("all_reduce", self._all_reduce, _Arguments(op, value, options, out, weight))

    def start_all_reduce(self, op: Any, value: Any, options: Any, out: Any) -> SharedResult:
        arguments = _Arguments(op, contributions(value), options, out)
        meet = self._turns.meet
        result: SharedResult = meet("start_all_reduce", self._start_all_reduce, arguments, is_settled=False)
        return result

    def reduce_scatter(self, op: Any, value: Any, axis: int, options: Any, out: Any) -> Any:
        arguments = _Arguments(op, contributions(value), options, out)
        return self._turns.meet(f"reduce_scatter along axis {axis}", partial(self._reduce_scatter, axis), arguments)

    def all_gather(self, value: Any, axis: int, options: Any, out: Any) -> Any:
        arguments = _Arguments(None, contributions(value), options, out)
        return self._turns.meet(f"all_gather along axis {axis}", partial(self._all_gather, axis), arguments)

    def merge_call(self, merge_fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        name = getattr(merge_fn, "__qualname__", type(merge_fn).__name__)
        return self._turns.meet(f"merge_call of {name}", partial(self._merge, merge_fn, name), (args, kwargs))

    def write_together(self, call: str, write: WriteTogether, argument: Any, error: Exception | None) -> None:
        """Write an array that the replicas of this rank share, once for all of them. Collective.

        `write` is collective, too, and takes the argument of each replica, and the error of one.
        """
        self._turns.meet(call, partial(self._write_together, write), (argument, error))

    def make_variable(self, kind: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make one variable for all replicas. Its initial value is that of replica 0. Collective."""
        given = {**kwargs, "initial_value": args[0]} if args else dict(kwargs)
        if callable(given.get("initial_value")):
            given["initial_value"] = given["initial_value"]()  # in the context of the replica
        return self._turns.meet("Variable", partial(self._make_variable, kind), (args[1:], given))

    def _make_variable(
        self, kind: Callable[..., Any], of_replicas: Sequence[Any], error: Exception | None
    ) -> Sequence[Any]:
        ids, (args, kwargs) = self._replicas.ids_here, of_replicas[0]
        first, *others = [_traits_text(named) for _, named in of_replicas]
        for replica_id, other in zip(ids[1:], others, strict=False):
            if other != first:
                text = f"replica {replica_id} passes {other}, and replica {ids[0]} {first}"
                error = error or InvalidArgumentError(text)
        if error is not None:
            parts_of(self._strategy).agree("Variable", {}, error)
        entry = context_stack.Entry(self._strategy)
        return [context_stack.call(entry, kind, *args, **kwargs)] * len(of_replicas)

    def _write_together(
        self, write: WriteTogether, of_replicas: Sequence[tuple[Any, Exception | None]], error: Exception | None
    ) -> Sequence[None]:
        error = error or next((own_error for _, own_error in of_replicas if own_error), None)
        write([argument for argument, _ in of_replicas], error)
        return [None] * len(of_replicas)

    def _all_reduce(self, of_replicas: Sequence[_Arguments], error: Exception | None) -> Sequence[Any]:
        (op, value, options, out, weight), error = self._join(of_replicas, error)
        if weight is None:
            result = self._ops.all_reduce(op, value, options, out=out, error=error)
        else:
            result = weighted_mean(self._ops, "all_reduce", op, value, weight, options, out=out, error=error)
        return self._share(result, out)

    def _start_all_reduce(self, of_replicas: Sequence[_Arguments], error: Exception | None) -> Sequence[Any]:
        (op, value, options, out, _), error = self._join(of_replicas, error)
        pending = self._ops.start_all_reduce(op, value, options, out=out, error=error)
        results: list[Any] = []
        share = partial(self._share_started, out)
        return [SharedResult(pending, share, results, at) for at in range(len(of_replicas))]

    def _share_started(self, outs: Contributions | None, at: int, pending: PendingResult) -> list[Any]:
        """Wait for a started all-reduce, in the turn of a replica of this rank, and return the result for each."""
        self._turns.use_device(0)
        results = self._share(pending.wait(), outs)
        self._turns.use_device(at)
        return results

    def _reduce_scatter(self, axis: int, of_replicas: Sequence[_Arguments], error: Exception | None) -> Sequence[Any]:
        """All-reduce, and return each replica's part of the result."""
        joined, error = self._join(of_replicas, error)
        call, axes, ends, outs = f"reduce_scatter along axis {axis}", list[int](), list[list[int]](), list[LateOuts]()
        total, ids = self._replicas.total, self._replicas.ids_here
        try:
            values, structure = nest.flatten(contributions(of_replicas[0].value))
            given = Operands(values).specs
            axes = [axis_of(axis, spec.shape) for spec in given]
            ends = [shard_bounds(spec.shape[at], total) for spec, at in zip(given, axes, strict=True)]
            if joined.out is not None:
                op = ReduceOp.of(joined.op)
                specs = [spec._replace(dtype=wire_and_result_dtypes(op, spec.dtype)[1]) for spec in given]
                for out, own in zip(joined.out.nests, ids, strict=True):
                    its = specs_along(axes, specs, [of_ids[own + 1] - of_ids[own] for of_ids in ends])
                    outs.append(LateOuts(self._group, out, structure, its, self._replicas))
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = error or name_call(problem, call)
        name = outs[0].name(call) if outs else call
        result = self._ops.all_reduce(joined.op, joined.value, joined.options, call=name, error=error)
        reduced, results = Operands(nest.flatten(result)[0]), []
        for at, own in enumerate(ids):
            parts = [
                array.swapaxes(0, front)[of_ids[own] : of_ids[own + 1]].swapaxes(0, front)
                for array, front, of_ids in zip(reduced.arrays, axes, ends, strict=True)
            ]
            if outs:
                outs[at].write(call, parts)
                results.append(joined.out.nests[at])
            else:
                copies = reduced.restore([part.copy() for part in parts])
                results.append(self._own(nest.rebuild(result, copies), at))
        return results

    def _all_gather(self, axis: int, of_replicas: Sequence[_Arguments], error: Exception | None) -> Sequence[Any]:
        (_, value, options, out, _), error = self._join(of_replicas, error)
        gathered = parts_of(self._strategy).all_gather("all_gather", value, axis, options, error, out)
        return self._share(gathered, out)

    def _merge(
        self, merge_fn: Callable[..., Any], name: str, of_replicas: Sequence[Any], error: Exception | None
    ) -> Sequence[Any]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        try:
            args, kwargs = self._join_merge_arguments(of_replicas)
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = error or problem
        parts_of(self._strategy).agree("merge_call", {"function": name}, error)
        self.pending.commit()  # which the function may read
        entry = context_stack.Entry(self._strategy, is_merge_call=True)
        result = context_stack.call(entry, merge_fn, self._strategy, *args, **kwargs)
        num_here = self._replicas.num_here
        result = nest.map_structure(arrays.read_only_view, result)
        return [self._own(local_components(result, at, num_here), at) for at in range(num_here)]

    def _join_merge_arguments(self, of_replicas: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Join the arguments that each replica passes to the function of `merge_call` to those of the rank."""
        args_of = [list(args) for args, _ in of_replicas]
        kwargs_of = [dict(kwargs or {}) for _, kwargs in of_replicas]
        for replica_id, args, kwargs in zip(self._replicas.ids_here, args_of, kwargs_of, strict=False):
            if len(args) != len(args_of[0]) or kwargs.keys() != kwargs_of[0].keys():
                raise InvalidArgumentError(
                    f"replica {replica_id} passes {len(args)} arguments and the names {sorted(kwargs)}, and replica "
                    f"{self._replicas.ids_here[0]} {len(args_of[0])} and {sorted(kwargs_of[0])}"
                )
        joined_args = [join_components(components, keeps_alike=True) for components in zip(*args_of, strict=True)]
        joined_kwargs = {
            key: join_components([kwargs[key] for kwargs in kwargs_of], keeps_alike=True) for key in kwargs_of[0]
        }
        return joined_args, joined_kwargs

    def _join(self, of_replicas: Sequence[_Arguments], error: Exception | None) -> tuple[_Arguments, Exception | None]:
        """Join the arguments of the replicas to those of the rank. Returns with them `error`, or one if they differ."""
        ids, mismatch = self._replicas.ids_here, None
        if len(set(map(_identities, of_replicas))) > 1:
            first, *_ = described = [_describe_common(arguments) for arguments in of_replicas]
            for replica_id, other in zip(ids, described, strict=False):
                for what in (name for name in first if other[name] != first[name]):
                    text = f"replica {replica_id} passes {what} {other[what]}, and replica {ids[0]} {first[what]}"
                    mismatch = InvalidArgumentError(text)
        has_outs = of_replicas[0].out is not None and mismatch is None
        outs = Contributions([arguments.out for arguments in of_replicas]) if has_outs else None
        values = Contributions([arguments.value for arguments in of_replicas])
        weights = None
        if of_replicas[0].weight is not None:
            weights = Contributions([arguments.weight for arguments in of_replicas])
        return of_replicas[0]._replace(value=values, out=outs, weight=weights), error or mismatch

    def _share(self, result: Any, outs: Contributions | None) -> list[Any]:
        """Return the result for each replica of the rank: in the outs of each, or one that all share.

        All outs are written here, before any replica goes on: afterwards each replica may change its own.
        """
        if outs is None:
            return self._share_new(_read_only(result))
        first, *others = ([library_of(one).to_target(one) for one in nest.flatten(out)[0]] for out in outs.nests)
        if self._broadcast_to_gpus(first, others):
            return list(outs.nests)
        for at, other in enumerate(others, 1):
            with on_device(self._replicas.devices, at):
                for source, target in zip(first, other, strict=True):
                    if target is not source:
                        arrays.write(target, arrays.on_current_device(source))
                arrays.wait_for_writes(other)
        return list(outs.nests)

    def _share_new(self, result: Any) -> list[Any]:
        """Return a new result for each replica: one that all share, or a copy where replicas could write it."""
        if self._replicas.gpus_here:
            copies = self._copies_on_gpus(nest.flatten(result)[0])
            if copies is not None:
                return [result, *(nest.rebuild(result, own) for own in copies)]
        return [self._own(result, at) for at in range(self._replicas.num_here)]

    def _copies_on_gpus(self, leaves: Sequence[Any]) -> list[list[Any]] | None:
        """Copy the first replica's results in device memory for each other replica of this rank, on its own GPU. Local.

        Returns [other replicas][leaves], where leaves in host memory are those of the first replica. `None` if NCCL
        cannot copy the results: NCCL is not available, two replicas share a GPU, or a result is no array of CuPy.
        """
        indices = [index for index, leaf in enumerate(leaves) if arrays.stays_writable(leaf)]
        if not all(arrays.is_cupy(leaves[index]) for index in indices):
            return None
        copies = [list(leaves) for _ in range(1, self._replicas.num_here)]
        for at, own in enumerate(copies, 1):
            with on_device(self._replicas.devices, at):
                for index in indices:
                    own[index] = arrays.empty(leaves[index].shape, leaves[index].dtype, device=True)
        sources, *targets = ([own[index] for index in indices] for own in (leaves, *copies))
        return copies if self._broadcast_to_gpus(sources, targets) else None

    def _broadcast_to_gpus(self, sources: Sequence[Any], targets: Sequence[Sequence[Any]]) -> bool:
        """Copy results on the first GPU to those of the other replicas of this rank: [other replicas][arrays]. Local.

        Returns whether the results were copied: not if NCCL cannot copy them, as in `_copies_on_gpus`.
        """
        gpus_here = self._replicas.gpus_here
        if not gpus_here or not sources:
            return False
        for gpu, own in zip(gpus_here, (sources, *targets), strict=True):
            for source, array in zip(sources, own, strict=True):
                is_there = arrays.is_cupy(array) and int(array.device.id) == gpu
                if not is_there or not array.flags.c_contiguous or array.dtype != source.dtype:
                    return False
        gpus = self._group.devices.gpus_of_process(gpus_here)
        if gpus is not None:
            gpus.broadcast(sources, targets)
        return gpus is not None

    def _own(self, result: Any, at: int) -> Any:
        """Return the result for a replica, with copies of arrays that all replicas would share and could write."""
        if at == 0 or type(result) is np.ndarray:
            return result
        leaves, _ = nest.flatten(result)
        are_writable = [not isinstance(leaf, DistributedValues) and arrays.stays_writable(leaf) for leaf in leaves]
        if not any(are_writable):
            return result
        with on_device(self._replicas.devices, at):
            copies = [copied(leaf) if writable else leaf for leaf, writable in zip(leaves, are_writable, strict=True)]
        return nest.rebuild(result, copies)


@final
class JointWork(AbstractContextManager[None]):
    """A block that each replica of this rank makes in its turn; at its end they meet: `Strategy.raise_together`.

    `together` makes the block of the rank, which raises what the first of the replicas raised.
    """

    def __init__(self, calls: JointCalls, together: Callable[[], AbstractContextManager[None]]) -> None:
        self._calls, self._together = calls, together

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, Exception):
            self._calls.write_together("raise_together", self._raise, None, error)

    def _raise(self, _: Sequence[None], error: Exception | None) -> None:
        with self._together():
            if error is not None:
                raise error


def _read_only(result: Any) -> Any:
    """Mark the arrays of NumPy in a result as read-only, and return it."""
    for leaf in (result,) if type(result) is np.ndarray else nest.flatten(result)[0]:
        if isinstance(leaf, np.ndarray):
            leaf.setflags(False)  # type: ignore[call-arg]  # by keyword it takes three times as long
    return result


def _traits_text(kwargs: Mapping[str, Any]) -> str:
    """Describe a new variable's arguments that all replicas of a rank must pass alike: all but its initial value."""
    traits = sorted((name, value) for name, value in kwargs.items() if name != "initial_value")
    return ", ".join(f"{name}={value}" for name, value in traits) or "no traits"


def _identities(arguments: _Arguments) -> tuple[int, int, bool, bool]:
    """Return identities that are equal in most programs, where `_describe_common` need not be compared."""
    return id(arguments.op), id(arguments.options), arguments.out is None, arguments.weight is None


def _describe_common(arguments: _Arguments) -> dict[str, str]:
    """Describe the arguments that all replicas of a rank must pass alike, by name."""
    op = arguments.op
    with suppress(ValueError, TypeError):  # what is no operation is refused by the call
        op = ReduceOp.of(op)
    has = {
        name: "none" if its is None else "some" for name, its in (("out", arguments.out), ("weight", arguments.weight))
    }
    return {"reduce_op": str(op), "options": str(arguments.options), **has}
