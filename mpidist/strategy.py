"""A strategy: the ranks that train together, and their collective calls."""

from __future__ import annotations

import os
import sys
from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from mpidist import checksums, context_stack, nest
from mpidist.cluster_resolver.resolver import ClusterResolver
from mpidist.collectives.object_calls import broadcast_object, gather_object
from mpidist.cross_device_ops.axis_reduction import reduce_along_axis
from mpidist.cross_device_ops.weighted_mean import weighted_mean
from mpidist.datasets.distributed_dataset import DistributedDataset
from mpidist.datasets.input_options import InputContext, InputOptions
from mpidist.options import CommunicationOptions, ReduceOp, options_or_hints
from mpidist.package_names import explain_absent_members
from mpidist.replica_context.persistent_all_reduce import PersistentAllReduce
from mpidist.strategy_extended import StrategyExtended
from mpidist.strategy_parts import StrategyParts
from mpidist.transport import arrays
from mpidist.transport.array_libraries.libraries import library_of, writable_like
from mpidist.transport.failures.exit_code import ends_normally
from mpidist.transport.group.traced import traced
from mpidist.transport.text import count_text, value_text
from mpidist.transport.topology import Topology
from mpidist.values import (
    Contributions,
    DistributedValues,
    PerReplica,
    ValueContext,
    components_of,
    contributions,
    has_distributed,
    local_component,
)

__all__ = ["Strategy"]

_T = TypeVar("_T", bound="Strategy")


@explain_absent_members
class Strategy(ABC):
    """Policy by which the ranks of a job train together. One rank is one replica.

    Each concrete strategy is a subclass that only chooses parts. Methods that reduce are collective: every rank
    calls them, in the same order.

    Args:
        parts: Parts of the strategy.
        cluster_resolver: The tasks of the cluster, for strategies that have one.
    """

    _remake: Callable[..., Any]  # makes the same strategy over other ranks, for those that can `shrink`

    def __init__(self, parts: StrategyParts, cluster_resolver: ClusterResolver | None = None) -> None:
        if type(self) is Strategy:
            raise TypeError("Strategy is abstract: make a MirroredStrategy, a MultiWorkerMirroredStrategy, ...")
        self._parts = parts
        self._extended = StrategyExtended(parts)
        self._cluster_resolver = cluster_resolver
        parts.strategy = self
        period = parts.group.settings.check_values if parts.group.topology.size > 1 else 0
        self._checked_variables = checksums.CheckedVariables(parts, period) if period else None

    @property
    def extended(self) -> StrategyExtended:
        """The methods for authors of libraries."""
        return self._extended

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The tasks of the cluster, and which of them this rank is; `None` if the strategy has no cluster."""
        return self._cluster_resolver

    @property
    def topology(self) -> Topology:
        """Which ranks are on which nodes."""
        return self._parts.topology

    @property
    def rank(self) -> int:
        """This rank's number, from 0 to `size - 1`: with parameter servers, among the workers, or among the servers."""
        return self._parts.topology.rank

    @property
    def size(self) -> int:
        """Number of ranks: with parameter servers, of workers, or on a server, of servers."""
        return self._parts.topology.size

    @property
    def local_rank(self) -> int:
        """This rank's number among the ranks of its node, from 0 to `local_size - 1`."""
        return self._parts.topology.local_rank

    @property
    def local_size(self) -> int:
        """Number of ranks on this rank's node."""
        return self._parts.topology.local_size

    @property
    def node(self) -> int:
        """The number of this rank's node. Nodes are numbered from 0 on, in the order of their lowest ranks."""
        return self._parts.topology.node

    @property
    def restarts(self) -> int:
        """Number of restarts of this job, by `mpidist run --max-restarts` and by Slurm."""
        return self._parts.group.settings.restarts

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that are combined at each step: of ranks, unless the number of replicas was chosen."""
        return self._parts.replicas.total

    @property
    def num_overflowed(self) -> int:
        """Number of finite values that became infinite as this rank compressed them to float16, since the last `reset`.

        Each rank counts what it rounds itself. The results are infinite on all ranks.
        """
        return self._parts.group.overflowed

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0, which writes checkpoints, summaries and progress."""
        return self._parts.peers.is_chief

    def scope(self) -> AbstractContextManager[Strategy]:
        """Make this strategy current in a `with` body: variables created there belong to this strategy.

        Entering is local; creating variables inside is collective.

        Raises:
            RuntimeError: Inside another strategy's scope, or inside `run`.
        """
        self._parts.require_cross_replica("scope")
        return context_stack.Scope(self)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: None = None,
    ) -> Any:
        """Call a function once for each replica, in replica context.

        Not collective by itself; what the function calls may be. If the number of replicas was chosen, all ranks call
        `run` equally often, which their next collective call checks. Replicas of one rank take turns: each runs up to
        its next collective call, where it waits for the others. With `MPIDIST_CHECK_VALUES` all ranks call it equally
        often, too.

        Args:
            fn: The function.
            args: The function's arguments, a list or tuple. The replica's component takes the place of each distributed
                value.
            kwargs: The function's keyword arguments, likewise.
            options: Must be `None`: the options of tf.distribute are for TPUs.

        Returns:
            What the function returned on this rank. If the number of replicas was chosen, a nest of `PerReplica` values
            of what the function returned for each replica of the rank.

        Raises:
            InvalidArgumentError: If replicas of one rank make different calls. On every rank.
            ValueError: If `args` is not a list or tuple, or `kwargs` no dict, or `options` is given.
            TypeError: If `fn` cannot be called, or has `yield` or `async`, so that nothing runs its body.
            RuntimeError: Inside `run`, or inside another strategy's scope.
        """
        if not callable(fn):
            raise TypeError(
                f"run: needed a function, got {value_text(fn)}; pass the function itself, and its args=(...)"
            )
        if not isinstance(args, (list, tuple)):
            meant = "args=(x,)" if isinstance(kwargs, (type(None), Mapping)) else "args=(x, y)"
            raise ValueError(f"run: args must be a list or tuple, got {type(args).__name__}; write {meant}")
        if not isinstance(kwargs, (type(None), Mapping)):
            raise ValueError(f"run: kwargs must be a dict, got {type(kwargs).__name__}; write args=(x, y)")
        if options is not None:
            raise ValueError("run: options must be None; tf.distribute's RunOptions are for TPUs and mean nothing here")
        result = self._parts.run(fn, args, kwargs)
        if self._checked_variables is not None:
            self._checked_variables.count_run()
        return result

    def check_equal(self, nest: Any, what: str = "values") -> None:
        """Require that a nest, such as a model after its first step, is equal on all ranks, bit by bit. Collective.

            strategy.check_equal(model.state_dict(), what="the model")

        A NaN equals a NaN of the same bits; -0.0 and 0.0 differ. Of a variable the copies are compared. Cost: one small
        round, two messages more if leaves differ, and all bytes read once on each rank: 0.4 s a GiB.

        Args:
            nest: Variables, arrays of any library, numbers and texts, in nests, of the same form on every rank.
            what: What they are, for the error.

        Raises:
            InvalidArgumentError: If leaves differ: it names them and the ranks. If the nests have other forms, shapes
                or dtypes. On every rank.
            TypeError: If a leaf is of another kind. On every rank.
            RuntimeError: Inside `run`, and of workers of parameter servers.
        """
        self._require_lock_step("check_equal")
        checksums.check_equal(self._parts, nest, what)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components of a value, one for each replica of this rank, in a tuple. Local."""
        num_here = self._parts.replicas.num_here
        leaves, _ = nest.flatten(value)
        if not has_distributed(leaves):
            return (value,)
        parts = [
            components_of(leaf, num_here) if isinstance(leaf, DistributedValues) else (leaf,) * num_here
            for leaf in leaves
        ]
        return tuple(nest.rebuild(value, components) for components in zip(*parts, strict=True))

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Make a distributed value from the results of a function, one for each replica. Local.

        Args:
            value_fn: Called for each replica of this rank with a `ValueContext`; returns nests of one form.

        Returns:
            What the function returned, with every leaf made a `PerReplica`.
        """
        self._parts.require_cross_replica("experimental_distribute_values_from_function")
        replicas = self._parts.replicas
        made = [value_fn(ValueContext(replica_id, replicas.total)) for replica_id in replicas.ids_here]
        leaves, _ = Contributions(made).flatten(replicas.ids_here)
        joined = [PerReplica(tuple(map(local_component, parts))) for parts in zip(*leaves, strict=True)]
        return nest.rebuild(made[0], joined)

    def experimental_distribute_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Give every replica its part of each global batch.

        Not collective, but iterating is: each step is one small round, in which the ranks compare pass, step and batch.
        Of `Files` it is collective: ranks compare the names.

        Args:
            dataset: A re-iterable of global batches, the same on every rank. A batch is a nest of arrays of one length
                on axis 0; replica i gets the i-th contiguous part. Lengths of parts differ by at most one. Parts are
                views of the batch: copy a part before you change its numbers. Or `Files`, the same on every rank, whose
                batches are dealt out to replicas: a replica that has none left gets empty ones until all have none.
            options: The memory that parts are put into, how far to read ahead, and how to deal out `Files`.

        Returns:
            An iterable of this rank's parts; of nests of `PerReplica` values, if the number of replicas was chosen.

        Raises:
            TypeError: If `dataset` can be iterated only once, or is one batch.
            ValueError: If there are too few files for the `AutoShardPolicy`. On every rank.
            InvalidArgumentError: If ranks name other files. On every rank.
        """
        self._parts.require_cross_replica("experimental_distribute_dataset")
        return DistributedDataset.from_batches(self._parts, dataset, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[Any]], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Let every rank make its own data set of batches, and iterate in step.

        Collective, and so is iterating: each step is one small round. A rank whose own batches have ended gets empty
        batches until those of all ranks have.

        If the number of replicas was chosen, a step gives nests of `PerReplica` values. With `PER_REPLICA` each replica
        makes its own batches, which do not depend on the number of ranks. With `PER_WORKER` a step takes a batch for
        each replica of the rank from the rank's data set, and a warning says that results depend on the number of
        ranks.

        Args:
            dataset_fn: Called once on every rank with an `InputContext`; returns a re-iterable of this rank's batches.
                If the number of replicas was chosen, and with `PER_REPLICA`, called once for each replica.
            options: The memory that batches are put into, how far to read ahead, the `InputReplicationMode`, and an
                `AutoShardPolicy`: with `DATA` or `FILE` all ranks make the same data set, of which replicas get batches
                in turn, or whole files.

        Returns:
            An iterable of this rank's batches.

        Raises:
            TypeError: If `dataset_fn` returned no re-iterable of batches on some rank. On every rank.
            Exception: What `dataset_fn` raised on the lowest rank where it raised. On every rank.
        """
        self._parts.require_cross_replica("distribute_datasets_from_function")
        return DistributedDataset.from_function(self._parts, dataset_fn, options)

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: int | tuple[int, ...] | None = None,
        options: CommunicationOptions | None = None,
        *,
        weight: Any = None,
        out: Any = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce a value of every rank, and give every rank the result. Collective.

        Args:
            reduce_op: A `ReduceOp` or its name in any case.
            value: This rank's contribution, or a distributed value, or a nest of them.
            axis: An axis, or a tuple of axes, to reduce along on every rank, too. A mean is then the sum over all ranks
                divided by the count over all ranks, so that ranks with more rows weigh more. `()` means `None`.
            options: Override the strategy's.
            weight: For means without `axis`: how much this rank's value weighs, as a number >= 0; of several replicas a
                `PerReplica`. The mean is the sum of values times weights, divided by the sum of weights. A value of
                weight 0 does not count, whatever it is.
            out: A nest of arrays like the result, which the result is written to. May be `value` itself.
            experimental_hints: The old name of `options` (deprecated).

        Returns:
            `out`, if given; else a nest like `value`, of new arrays without these axes.

        Raises:
            InvalidArgumentError: If the ranks' arguments differ, or cannot be reduced, or all weights are 0. On every
                rank.
            ValueError: If `weight` is negative or not finite, or given for another operation or with `axis`. On every
                rank.
            RuntimeError: Inside `run`, where `ReplicaContext.all_reduce` takes the place of this method.
        """
        self._parts.require_computing("reduce")
        ops = self._parts.cross_device_ops
        if experimental_hints is not None:
            options = options_or_hints(options, experimental_hints)
        has_axis = axis is not None and not (isinstance(axis, tuple) and not axis)
        if weight is not None:
            return weighted_mean(ops, "reduce", reduce_op, value, weight, options, out=out, has_axis=has_axis)
        if axis is not None and has_axis:
            return reduce_along_axis(ops, reduce_op, value, axis, options, out)
        return ops.all_reduce(reduce_op, value, options, out=out, call="reduce")

    def all_reduce_init(
        self,
        nest: Any,
        reduce_op: ReduceOp | str = ReduceOp.SUM,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
    ) -> PersistentAllReduce:
        """Prepare an all-reduce that is repeated, as MPI's persistent calls. Collective.

        Calls with small NumPy arrays are then faster, unless `replicas=` is given.

        Args:
            nest: This rank's arrays. Each call reduces the numbers that they hold then.
            reduce_op: A `ReduceOp` or its name in any case.
            options: Override the strategy's.
            out: A nest of arrays like the result, which each call writes to. May be `nest` itself.

        Raises:
            InvalidArgumentError: If the ranks' arguments differ, or cannot be reduced. On every rank.
            RuntimeError: Inside `run`, where a `PersistentAllReduce` can be called.
        """
        return PersistentAllReduce(self, reduce_op, nest, options, out)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate every rank's value along an axis, in rank order, for every rank. Collective.

        Args:
            value: An array of at least one dimension, a distributed value of one, or a nest. Lengths along `axis` may
                differ between ranks.
            axis: The axis; negative counts from the end.

        Returns:
            A nest like `value`.

        Raises:
            InvalidArgumentError: If shapes differ along another axis, or a value has no such axis. On every rank.
            RuntimeError: Inside `run`, where `ReplicaContext.all_gather` takes the place of this method.
        """
        self._parts.require_computing("gather")
        return self._parts.all_gather("gather", value, axis, None)

    def broadcast(self, value: Any, root: int = 0, *, out: Any = None) -> Any:
        """Give every rank the value of one rank. Collective.

        Args:
            value: An array, a number, or a nest of them, of the same form, shapes and dtypes on every rank. The numbers
                of other ranks than the root are ignored.
            root: The rank whose value is sent.
            out: A nest of arrays like `value`, which the root's value is written to. May be `value` itself.

        Returns:
            `out`, if given; else a nest like `value`.

        Raises:
            InvalidArgumentError: If the ranks' arguments differ. On every rank.
            ValueError: If there is no rank `root`. On every rank.
            RuntimeError: Inside `run`, and of workers of parameter servers.
        """
        self._require_lock_step("broadcast")
        return self._parts.cross_device_ops.broadcast(value, "all", root=root, out=out)

    def broadcast_object(self, obj: Any, root: int = 0, *, pickle: bool = False) -> Any:
        """Give every rank an object of one rank. Collective: two broadcasts.

        Args:
            obj: On the root: `None`, a number, a text, an array, or a list, tuple or dict of them. On other ranks it is
                ignored.
            root: The rank whose object is sent.
            pickle: Send an object of any kind that can be pickled. Unpickling may run any code that the root chose.

        Returns:
            A copy of the root's object, on the root, too.

        Raises:
            InvalidArgumentError: If the ranks' arguments differ, or the root's object cannot be sent. On every rank.
            ValueError: If there is no rank `root`. On every rank.
            Exception: What unpickling raised on the lowest rank where it did. On every rank.
            RuntimeError: Inside `run`, and of workers of parameter servers.
        """
        self._require_lock_step("broadcast_object")
        return broadcast_object(self._parts.group, obj, root, pickle, self._parts.options)

    def gather_object(self, obj: Any, *, pickle: bool = False) -> list[Any]:
        """Give every rank the objects of all ranks. Collective: one all-gather.

        Args:
            obj: This rank's object, as in `broadcast_object`. Objects of ranks may be of different kinds and sizes.
            pickle: As in `broadcast_object`.

        Returns:
            Copies of the objects, in rank order.

        Raises:
            InvalidArgumentError: If the ranks' arguments differ, or the object of a rank cannot be sent. On every rank.
            Exception: What unpickling raised on the lowest rank where it did. On every rank.
            RuntimeError: Inside `run`, and of workers of parameter servers.
        """
        self._require_lock_step("gather_object")
        return gather_object(self._parts.group, obj, pickle, self._parts.options)

    def barrier(self) -> None:
        """Wait until all ranks call this method. Collective.

        With parameter servers: until all workers call it, and all their changes are made. On workers.

        Raises:
            InvalidArgumentError: If other ranks make another call meanwhile.
            DeadlineExceededError: If not all ranks come within the strategy's `timeout_seconds`.
            RuntimeError: Inside `run`.
        """
        self._parts.group.require_open("barrier()")
        if self._parts.peers.is_in_lock_step:
            self._parts.require_cross_replica("barrier()")
        self._parts.peers.meet_peers("barrier()")

    def symmetric_empty(self, shape: int | Sequence[int], dtype: Any, *, per_node: bool = False) -> Any:
        """Allocate an array that all ranks of a node can reach. Collective.

        A strategy whose devices the user named as GPUs gives an array in the rank's device memory, unless `per_node`.

        Args:
            shape: The shape, the same on every rank.
            dtype: The dtype, the same on every rank.
            per_node: Make one array for all ranks of a node, which reductions and broadcasts write (`out=`) and all
                ranks read, instead of one for each rank. Always in host memory, as ranks share no other.

        Returns:
            An array of uninitialised numbers, which lives until `close`.

        Raises:
            TypeError: If the shape of a rank does not consist of whole numbers. On every rank.
        """
        return self._parts.symmetric_empty([(shape, dtype, False)], per_node)[0]

    def symmetric_empty_like(self, value: Any, *, per_node: bool = False) -> Any:
        """Allocate arrays like those of a nest, as `symmetric_empty` does. Collective.

        An array for one in device memory lies there, too, unless `per_node`.

        Returns:
            A nest like `value`: of tensors for tensors of PyTorch, for example; of arrays of NumPy or CuPy for numbers,
            and for arrays that cannot be written, as those of JAX.
        """
        specs: list[tuple[Any, Any, bool]] = []
        leaves: list[Any] = []
        error = None
        try:
            leaves, _ = nest.flatten(contributions(value))
            natives = [library_of(leaf).to_native(leaf) for leaf in leaves]
            specs = [(one.shape, one.dtype.newbyteorder("="), arrays.is_device(one)) for one in natives]
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = problem
        allocated = self._parts.symmetric_empty(specs, per_node, error)
        return nest.rebuild(contributions(value), list(map(writable_like, leaves, allocated)))

    def raise_together(self, what: str = "") -> AbstractContextManager[None]:
        """Raise an exception of one rank on all ranks, at the end of a block of local work. Collective.

            with strategy.raise_together("reading the shards"):
                data = read(my_files)

        At the end of the block all ranks wait for each other. If a rank had an exception, all ranks raise that of the
        lowest such rank: of the same type and text, with that rank's traceback as the cause; or a `PeerFailedError`
        with the text where the exception cannot be pickled. The strategy stays usable. Cost: one small all-reduce.

        Args:
            what: What the block does, for errors; equal on all ranks. In `run` all replicas make the block.

        Raises:
            InvalidArgumentError: If other ranks make another call meanwhile.
            DeadlineExceededError: If not all ranks reach the end of the block within the strategy's `timeout_seconds`.
        """
        return self._parts.raise_together_in_turns("raise_together", what)

    def _require_lock_step(self, call: str) -> None:
        self._parts.require_cross_replica(call)
        if not self._parts.peers.is_in_lock_step:
            raise RuntimeError(
                f"{call} of a {type(self).__name__}: its workers are asynchronous; the only joint call is barrier(): "
                "share values in variables"
            )

    def trace(self, folder: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Trace the waits of the calls in a block, for `python -m mpidist trace merge`. Collective at both ends.

        Raises:
            UnavailableError: If a rank cannot write to the folder. On every rank.
            RuntimeError: If the strategy is traced already, or has parameter servers: set `MPIDIST_TRACE` there.
            DeadlineExceededError: If not all ranks come to either end within the strategy's `timeout_seconds`.
        """
        parts = self._parts
        parts.require_cross_replica("trace")
        return traced(parts.group, folder, parts.options.timeout_seconds, parts.peers.is_in_lock_step)

    def reset(self) -> None:
        """Make the strategy usable again after a deadline or a lost rank. Collective; all ranks must be alive.

        Raises:
            DeadlineExceededError: If not all ranks call it, within `MPIDIST_TIMEOUT_SECONDS`.
            PeerFailedError: If the process of a rank is gone. Start the job again.
            UnavailableError: If a parameter server is lost. Start the job again.
        """
        self._parts.peers.reset()
        self._parts.group.reset()
        self._parts.num_of_name.clear()  # ranks may differ in the variables of a failed call
        self._parts.group.devices.work_on(self._parts.replicas.devices[0])

    def shrink(self: _T) -> _T:
        """Rebuild the strategy on the surviving ranks, after a call raised `PeerFailedError`. Collective over them.

        Call it outside of `scope()` and `run()`. This strategy is closed; `numpy()` still reads its variables. Ranks
        may be one step apart: make variables again, which takes the values of the lowest rank, and broadcast the number
        of the step. Make data sets and managers of checkpoints again, too. The loss of another rank meanwhile ends the
        job. At its end the program does not finalize MPI.

        Raises:
            RuntimeError: If no call has failed, if the strategy was not made with `on_rank_lost="shrink"`, or in a
                scope or `run`.
        """
        self._parts.require_cross_replica("shrink()")
        if context_stack.innermost() is not None:
            raise RuntimeError("shrink() in `with strategy.scope():` would close the strategy: call it after the scope")
        comm = self._parts.group.shrink()
        self._parts.release()
        strategy: _T = self._remake(comm=comm)
        comm.Free()  # the strategy has a duplicate
        return strategy

    def close(self) -> None:
        """Free the strategy's communicators and memory. Collective; a second call does nothing.

        While an exception propagates, as in a `finally` clause, this call waits for no rank: the other ranks raise
        `PeerFailedError` with the exception's text at their next call.

        Raises:
            PeerFailedError: If another rank makes another call instead, or left because of an exception.
            DeadlineExceededError: If not all ranks close within the strategy's `timeout_seconds`.
        """
        self._parts.close(sys.exc_info()[1])

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not ends_normally(error):
            self._parts.close(error)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError("a strategy cannot be copied or pickled: it is tied to its communicators; make another one")

    def __repr__(self) -> str:
        replicas = self._parts.replicas
        chosen = "" if replicas.tree is None else f"{count_text(replicas.total, 'replica')}, "
        return f"<{type(self).__name__}: {chosen}{self.topology}>"
