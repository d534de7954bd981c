"""Asynchronous training: workers that read and change variables on parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, final

import numpy as np

from mpidist import nest
from mpidist.cluster_resolver.cluster_spec import ClusterSpec
from mpidist.cluster_resolver.resolver import ClusterResolver
from mpidist.cluster_resolver.simple import SimpleClusterResolver
from mpidist.cluster_resolver.tf_config import TFConfigClusterResolver
from mpidist.collectives.arguments.checked_outs import KnownOuts
from mpidist.collectives.arguments.operands import Spec
from mpidist.coordinator.cluster_coordinator import ClusterCoordinator
from mpidist.cross_device_ops.collective_all_reduce import CollectiveAllReduce
from mpidist.options import CommunicationOptions
from mpidist.package_names import explain_absent_members
from mpidist.parameter_server.client import Location, ParameterClient, Push, RowsChange
from mpidist.parameter_server.cluster import Role, Wanted
from mpidist.parameter_server.messages.protocol import Change
from mpidist.parameter_server.placement import OnServers
from mpidist.parameter_server.rules import Rule
from mpidist.parameter_server.variable import (
    ServerVariable,
    ShardedVariable,
    change_together,
    read_together,
    sharing_replica,
)
from mpidist.replicas import Replicas
from mpidist.strategy import Strategy
from mpidist.strategy_parts import StrategyParts
from mpidist.transport.devices import choose_device
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.mpi.library import Intracomm
from mpidist.values import IndexedSlices

__all__ = ["ParameterServerStrategy", "Server"]

_CHANGES: Final = {"assign": Change.ASSIGN, "assign_add": Change.ADD, "assign_sub": Change.SUB}


@final
class ParameterServerStrategy(Strategy):
    """Asynchronous training: variables live on parameter servers, and every worker reads and changes them by itself.

    Making one is collective over `comm`. Then servers serve, and workers work::

        strategy = mpidist.experimental.ParameterServerStrategy(num_ps=1)
        if strategy.is_ps:
            strategy.serve()  # returns when all workers are done
        else:
            train(strategy)
        strategy.close()

    A worker waits for no other worker, unless `staleness` is given. So reductions combine the replicas of this worker,
    of which there is one, unless `replicas` is given. A change of a variable is applied once and whole; a read is a
    snapshot of the variable, with all that this worker has changed before. One rank alone is worker and server in one.

    Args:
        cluster_resolver: The tasks of the cluster: "chief", "worker", "ps" and "evaluator". By default a
            `TFConfigClusterResolver`, if TF_CONFIG is set and the strategy is over all ranks of the job.
        variable_partitioner: Sets the number of shards of a variable, `experimental.partitioners`; by default one.
        num_ps: Number of servers, the last ranks; by default one.
        ps_ranks: Ranks of the servers.
        staleness: How many steps a worker may be ahead of the slowest one when it reads a variable; a step ends with
            `step_done()`. 0 keeps workers in step; `None` lets them run freely. A worker that pushes and never calls
            `step_done()` is warned, and `barrier()` and `close()` raise a `RuntimeError`.
        on_worker_lost: Policy after a worker's program fails, or its process is killed: `"abort"` ends the job;
            `"ignore"` continues without the worker, and the job's exit status is not 0. Most launchers end a job of
            which a process is killed; Open MPI's does not with `mpirun --with-ft ulfm`.
        placement: `"round_robin"` puts variables on servers in turn, `"bytes"` on the server with the fewest bytes.
        communication_options: `timeout_seconds` limits a worker's waits for the reply to a request, and for other
            workers; by default `MPIDIST_TIMEOUT_SECONDS`. The other fields must have their defaults.
        replicas: Number of replicas of each worker. `run` then calls its function for each of them, and distributed
            values are `PerReplica` values of a worker's replicas. In `run`, what they assign is aggregated as the
            variable says, and what they push is summed, before it goes to the servers.
        comm: An intra-communicator of mpi4py; by default `MPI.COMM_WORLD`.

    Raises:
        ValueError: If the cluster has no worker or no server, or a job of another kind, or options are given that have
            no effect. On every rank.
        TopologyError: If the cluster contradicts MPI. On every rank.
        InvalidArgumentError: If workers pass different arguments. On every rank.
        TypeError: If an argument is of a wrong type. On every rank.
        RuntimeError: If a rank would have to serve another strategy, which this worker uses and has not closed.
        UnavailableError: If there is no MPI.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Any] | None = None,
        *,
        num_ps: int | None = None,
        ps_ranks: Sequence[int] | None = None,
        staleness: int | None = None,
        on_worker_lost: str = "abort",
        placement: str = "round_robin",
        communication_options: CommunicationOptions | None = None,
        replicas: int | None = None,
        comm: Intracomm | None = None,
    ) -> None:
        resolver = cluster_resolver
        if resolver is None and num_ps is None and ps_ranks is None:
            resolver = TFConfigClusterResolver.of_job(comm)
        wanted = Wanted(
            staleness,
            on_worker_lost,
            placement,
            variable_partitioner,
            num_ps,
            ps_ranks,
            communication_options,
            replicas,
        )
        role = Role.meet(comm, resolver, wanted)
        self._role, self._known_outs = role, lru_cache(256)(KnownOuts)
        try:
            device = choose_device(role.topology)
            partitioner, devices_of_servers = variable_partitioner, role.server_devices
            places = OnServers(role.servers, role.initialises, partitioner, placement, devices_of_servers)
            ops, name, group = CollectiveAllReduce(), type(self).__name__, SyncGroup.solo()
            carried = None if replicas is None else Replicas.in_blocks(replicas, group.topology)
            devices = [device] * (1 if carried is None else carried.num_here)
            parts = StrategyParts.assemble(
                name, group, ops, devices, None, lambda _: places, replicas=carried, peers=role
            )
        except BaseException as error:
            role.close(error)
            raise
        super().__init__(parts, role.resolver if resolver is None else resolver)

    @property
    def is_ps(self) -> bool:
        """Whether this rank is a parameter server, and no worker."""
        return self._role.server is not None

    @property
    def num_ps(self) -> int:
        """The number of parameter servers."""
        return max(1, len(self._role.roles.servers))

    def serve(self) -> None:
        """Serve requests until all workers have closed the strategy, or ended. This ends the server's part.

        On servers.

        Raises:
            RuntimeError: If this rank is no server.
            PeerFailedError: If a worker has failed.
        """
        self._role.serve()

    def flush(self) -> None:
        """Wait until the servers have applied all changes of this worker. On workers."""
        self._servers("flush()").flush()

    def step_done(self) -> None:
        """Mark the end of a step of this worker, for `staleness`. On workers; in `run` by all replicas, as one step."""
        servers, replica = self._servers("step_done()"), sharing_replica(self)
        if replica is None:
            servers.step_done()
        else:
            change_together(replica, "step_done()", lambda: None, lambda _: servers.step_done())

    def read(self, variables: Any, out: Any = None) -> Any:
        """Read a nest of variables, with one request to each server. On workers.

        Args:
            variables: A nest of variables of this strategy.
            out: A nest of the same form, of arrays in host memory that take the values: of the variables' shapes and
                dtypes. New arrays of some megabytes take longer to make than to fill. If the call fails, an array may
                hold a part of the new value.

        Returns:
            A nest of arrays: new ones, or those of `out`. Each is a snapshot of its variable.

        Raises:
            TypeError: If a leaf is no variable on a server.
            InvalidArgumentError: If an array of `out` cannot take the value of its variable.
        """
        self._servers("read()")
        leaves, form = nest.flatten(variables)
        shards = [shard for leaf in leaves for shard in _shards_of(self, "read()", leaf)]
        if out is None:
            outs = values = [np.empty(leaf.shape, leaf.dtype) for leaf in leaves]
        else:
            specs, nothing = [Spec(leaf.shape, leaf.dtype, False) for leaf in leaves], [None] * len(leaves)
            outs, checked = self._known_outs(tuple(specs)).open(out, form, nothing, nothing, self._parts.group.shared)
            values = outs if checked.are_targets else [*map(_received_in, outs)]
        parts = [
            [value] if type(leaf) is ServerVariable else leaf.parts_of(value)
            for leaf, value in zip(leaves, values, strict=True)
        ]
        read_together(shards, [part for of_leaf in parts for part in of_leaf])
        if values is not outs:
            for one, value in zip(outs, values, strict=True):
                one[...] = value
        return nest.rebuild(variables, values) if out is None else out

    def push(self, variables: Any, values: Any, update: str | Rule = "assign_add") -> None:
        """Change a nest of variables on the servers, with one request to each server. On workers.

        Args:
            variables: A nest of variables of this strategy.
            values: A nest of the same form: arrays, numbers or `IndexedSlices`, which are a request of their own.
            update: `"assign"`, `"assign_add"`, `"assign_sub"`, or a rule of `experimental.server_rules`.

        Raises:
            ValueError: If the nests differ in form, or a value does not fit its variable.
            TypeError: If a leaf is no variable on a server, or `update` is none of these, or a rule whose steps are
                fractions, and a variable of whole numbers.
        """
        servers, make = self._servers("push()"), partial(self._gather, variables, values, update)
        replica = sharing_replica(self)
        if replica is None:
            servers.push(make())
            return
        change_together(replica, "push()", make, lambda pushes: servers.push(Push.sum_of(pushes)))

    def _gather(self, variables: Any, values: Any, update: str | Rule) -> Push:
        if not isinstance(update, Rule) and update not in _CHANGES:
            raise TypeError(
                f"push(): update must be one of {', '.join(_CHANGES)} or a rule, as server_rules.SGD(0.1), or for a "
                f"registered function server_rules.Registered('its name'); got {update!r}"
            )
        leaves, form = nest.flatten(variables)
        given, its_form = nest.flatten(values)
        if form != its_form:
            raise ValueError(f"push(): variables are {nest.form_text(form)}, and values {nest.form_text(its_form)}")
        locations: list[Location] = []
        arrays: list[Any] = []
        rows: list[RowsChange] = []
        rule = update if isinstance(update, Rule) else None
        for leaf, value in zip(leaves, given, strict=True):
            shards = [shard.location for shard in _shards_of(self, "push()", leaf)]
            if rule is not None:
                rule.require_dtype(leaf.name, leaf.dtype)
            if isinstance(value, IndexedSlices):
                changes = {change.location.key: change for change in leaf.row_changes(value)}
                rows += [changes.get(shard.key) or RowsChange.none(shard) for shard in shards]
                continue
            locations += shards
            arrays += leaf.split(value) if isinstance(leaf, ShardedVariable) else [leaf.cast(value)]
        if isinstance(update, Rule):
            return Push(locations, arrays, rows, update, f"{update.name}{list(update.numbers)}")
        return Push(locations, arrays, rows, _CHANGES[update], update)

    def _servers(self, call: str) -> ParameterClient:
        self._parts.group.require_open(call)
        if self._role.servers is None:
            raise RuntimeError(f"{call} on {self._role.why_idle}")
        return self._role.servers


@final
@explain_absent_members
class Server:
    """Server object of one task of a cluster, as in TensorFlow scripts. `join` serves, on parameter servers.

    With a strategy, `join` also serves on workers other than the chief, as `serve` of the `ClusterCoordinator`.

    Args:
        cluster_or_strategy: A `ClusterSpec`, or its argument, or a `ParameterServerStrategy`.
        job_name: The job of this rank, with a cluster.
        task_index: The number of this rank within the job, with a cluster.
        protocol: Must be `None`: ranks send messages of MPI.
        config: Must be `None`: there is no session to configure.
        start: Must be `True`: the server begins with `join`.

    Raises:
        TypeError: If the first argument is of another kind.
        ValueError: If the job or the index is missing, or given although a strategy has them; or if one of the last
            three arguments is given.
    """

    def __init__(
        self,
        cluster_or_strategy: ClusterSpec | Mapping[str, Any] | ParameterServerStrategy,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
    ) -> None:
        for name, given, default, why in (
            ("protocol", protocol, None, "ranks send messages of MPI"),
            ("config", config, None, "there is no session to configure"),
            ("start", start, True, "the server begins with join()"),
        ):
            if given is not default:
                raise ValueError(f"Server: {name} must be {default}: {why}; leave it out")
        self._strategy: ParameterServerStrategy | None = None
        self._resolver: SimpleClusterResolver | None = None
        if isinstance(cluster_or_strategy, ParameterServerStrategy):
            if job_name is not None or task_index is not None:
                raise ValueError("Server(strategy) takes no job_name and no task_index: the strategy defines them")
            self._strategy = cluster_or_strategy
            return
        if job_name is None or task_index is None:
            raise ValueError(f"Server(cluster) needs job_name and task_index, got {job_name!r} and {task_index!r}")
        self._resolver = SimpleClusterResolver(ClusterSpec(cluster_or_strategy), "", job_name, task_index)

    def join(self) -> None:
        """Serve until all workers are done. Collective, if a cluster was given: the workers make their strategies.

        Raises:
            RuntimeError: If this task is the chief, or, without a strategy, no parameter server.
        """
        if self._strategy is not None:
            is_worker = not self._strategy.is_ps and not self._strategy.is_chief
            server = ClusterCoordinator(self._strategy) if is_worker else self._strategy
            server.serve()
        elif self._resolver is not None:
            if self._resolver.task_type != "ps":
                raise RuntimeError(f"join() is for tasks of the job ps, and this one is {self._resolver.task_type}")
            role = Role.meet(None, self._resolver, None)
            try:
                role.serve()
            except BaseException as error:
                role.close(error)
                raise
            role.close(None)


def _shards_of(strategy: Strategy, call: str, variable: Any) -> list[ServerVariable]:
    if type(variable) is ServerVariable and variable.strategy is strategy:  # faster than isinstance: there may be many
        return [variable]
    if isinstance(variable, ShardedVariable) and variable.strategy is strategy:
        return variable.variables
    raise TypeError(f"{call} takes variables of this strategy, made in its scope, got {variable!r}")


def _received_in(out: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array that a value is received in: `out`, or a new one for an `out` that bytes cannot be laid into."""
    is_plain = out.flags.c_contiguous and out.dtype.isnative
    return out if is_plain else np.empty(out.shape, out.dtype.newbyteorder("="))
