"""A strategy: the ranks that train together, and their collective calls."""

from __future__ import annotations

import os
import sys
from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NoReturn, TypeVar, final

from mpidist import checksums, context_stack, nest
from mpidist.cluster_resolver.resolver import ClusterResolver
from mpidist.collective_calls.collective_calls import CollectiveCalls
from mpidist.context_stack import parts_of
from mpidist.datasets.distributed_dataset import DistributedDataset
from mpidist.datasets.input_options import InputContext, InputOptions
from mpidist.package_names import explain_absent_members
from mpidist.strategy_extended import StrategyExtended
from mpidist.strategy_parts import StrategyParts
from mpidist.transport.failures.exit_code import ends_normally
from mpidist.transport.group.traced import traced
from mpidist.transport.text import count_text, value_text
from mpidist.transport.topology import Topology
from mpidist.values import (
    DistributedValues,
    PerReplica,
    components_of,
    has_distributed,
    local_component,
)

__all__ = ["Strategy", "ValueContext"]

_T = TypeVar("_T", bound="Strategy")


@final
class ValueContext:
    """The argument of the function of `experimental_distribute_values_from_function`.

    Args:
        replica_id_in_sync_group: The replica that the function makes a value for.
        num_replicas_in_sync: Number of replicas.
    """

    def __init__(self, replica_id_in_sync_group: int = 0, num_replicas_in_sync: int = 1) -> None:
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync


@explain_absent_members
class Strategy(CollectiveCalls, ABC):
    """How the ranks of a job train together. One rank is one replica.

    Each concrete strategy is a subclass that only chooses parts. Methods that reduce are collective: every rank
    calls them, in the same order.

    Args:
        parts: What the strategy consists of.
        cluster_resolver: The tasks of the cluster, for strategies that have one.
    """

    _remake: Callable[..., Any]  # makes the same strategy over other ranks, for those that can `shrink`

    def __init__(self, parts: StrategyParts, cluster_resolver: ClusterResolver | None = None) -> None:
        if type(self) is Strategy:
            raise TypeError("Strategy is abstract: make a MirroredStrategy, a MultiWorkerMirroredStrategy, ...")
        super().__init__(parts)
        self._extended = StrategyExtended(parts)
        self._cluster_resolver = cluster_resolver
        parts.attach_to(self)
        self._checked_variables = checksums.CheckedVariables.of_strategy(parts)

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
        """How often this job was started again, by `mpidist run --max-restarts` and by Slurm."""
        return self._parts.group.settings.restarts

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that are combined at each step: of ranks, unless the number of replicas was chosen."""
        return self._parts.replicas.total

    @property
    def num_overflowed(self) -> int:
        """How many finite numbers became infinite when this rank compressed them to float16, since the last `reset`.

        Each rank counts what it rounds itself. The results are infinite on all ranks.
        """
        return self._parts.group.overflowed

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0, which writes checkpoints, summaries and progress."""
        service = self._parts.service
        return self._parts.topology.rank == 0 if service is None else service.is_chief

    def scope(self) -> AbstractContextManager[Strategy]:
        """Make this strategy current in a `with` body: variables created there belong to this strategy.

        Entering is local; creating variables inside is collective.

        Raises:
            RuntimeError: Inside another strategy's scope, or inside `run`.
        """
        self._parts.require_cross_replica("scope")
        return _Scope(self)

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
            TypeError: If `fn` cannot be called.
            RuntimeError: Inside `run`, or inside another strategy's scope.
        """
        if not callable(fn):
            raise TypeError(
                f"run: needed a function, got {value_text(fn)}; pass the function itself, and its args=(...)"
            )
        if not isinstance(args, (list, tuple)):
            meant = "args=(x,)" if isinstance(kwargs, (Mapping, type(None))) else "args=(x, y)"
            raise ValueError(f"run: args must be a list or tuple, got {type(args).__name__}; write {meant}")
        if not isinstance(kwargs, (Mapping, type(None))):
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
        """Make a distributed value from what a function returns for each replica. Local.

        Args:
            value_fn: Called for each replica of this rank with a `ValueContext`; returns nests of one form.

        Returns:
            What the function returned, with every leaf made a `PerReplica`.
        """
        self._parts.require_cross_replica("experimental_distribute_values_from_function")
        replicas = self._parts.replicas
        made = [value_fn(ValueContext(replica_id, replicas.total)) for replica_id in replicas.ids_here]
        leaves = [nest.flatten(value)[0] for value in made]
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

    def trace(self, folder: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Record what calls in a block wait for: `python -m mpidist trace merge` reads it. Collective at both ends.

        Raises:
            UnavailableError: If a rank cannot write to the folder. On every rank.
            RuntimeError: If the strategy is traced already, or has parameter servers: set `MPIDIST_TRACE` there.
            DeadlineExceededError: If not all ranks come to either end within the strategy's `timeout_seconds`.
        """
        parts = self._parts
        parts.require_cross_replica("trace")
        return traced(parts.group, folder, parts.options.timeout_seconds, parts.service is None)

    def reset(self) -> None:
        """Make the strategy usable again after a deadline or a lost rank. Collective; all ranks must be alive.

        Raises:
            DeadlineExceededError: If not all ranks call it, within `MPIDIST_TIMEOUT_SECONDS`.
            PeerFailedError: If the process of a rank is gone. Then the job has to be started again.
            UnavailableError: If a parameter server is lost. Then as well.
        """
        if self._parts.service is not None:
            self._parts.service.reset()
        self._parts.group.reset()
        self._parts.group.devices.work_on(self._parts.replicas.devices[0])

    def shrink(self: _T) -> _T:
        """Make the same strategy over the ranks that live, after a call raised `PeerFailedError`. Collective over them.

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
            raise RuntimeError(
                "shrink() in `with strategy.scope():`: call it behind the scope, as it closes the strategy"
            )
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

    def __copy__(self) -> NoReturn:
        raise RuntimeError("a strategy cannot be copied or pickled: it is tied to its communicators; make another one")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        self.__copy__()

    def __repr__(self) -> str:
        replicas = self._parts.replicas
        chosen = "" if replicas.tree is None else f"{count_text(replicas.total, 'replica')}, "
        return f"<{type(self).__name__}: {chosen}{self.topology}>"


@final
class _Scope(AbstractContextManager[Strategy]):
    """`with strategy.scope():`. One scope may be entered several times, also while it is open."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._entries: list[context_stack.Entry] = []

    def __enter__(self) -> Strategy:
        parts_of(self._strategy).require_cross_replica("scope")  # `scope()` may have been called elsewhere
        entry = context_stack.Entry(self._strategy)
        context_stack.push(entry)
        self._entries.append(entry)
        return self._strategy

    def __exit__(self, *exc: object) -> None:
        context_stack.pop(self._entries[-1])
        self._entries.pop()
