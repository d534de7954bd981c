"""One rank's part in a cluster of workers and servers: how the ranks agree on it, connect, and end."""

from __future__ import annotations

import builtins
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, final

from mpidist import errors
from mpidist.cluster_resolver.cluster_spec import ClusterSpec
from mpidist.cluster_resolver.resolver import JOBS, ClusterResolver, cluster_of, require_task
from mpidist.cluster_resolver.simple import SimpleClusterResolver
from mpidist.errors import InvalidArgumentError, TopologyError, UnavailableError
from mpidist.options import CommunicationOptions
from mpidist.parameter_server.client import LocalChannel, ParameterClient
from mpidist.parameter_server.membership import Membership
from mpidist.parameter_server.messages.ends import Channel
from mpidist.parameter_server.messages.lane import lanes_to
from mpidist.parameter_server.placement import PLACEMENTS
from mpidist.parameter_server.server import ParameterServer
from mpidist.transport.failures import open_groups
from mpidist.transport.group.peers import Peers
from mpidist.transport.group.service_group import ServiceGroup, meet_ranks
from mpidist.transport.mpi.library import Intracomm
from mpidist.transport.shared_errors import mark_shared
from mpidist.transport.text import first_line, name_ranks, text_of
from mpidist.transport.topology import Topology
from mpidist.whole_number import whole_number

__all__ = ["Role", "Roles", "Wanted"]

_WHEN_LOST: Final = ("abort", "ignore")


@final
class Roles(NamedTuple):
    """The ranks of each role."""

    workers: tuple[int, ...]  # of which the first one is the chief
    servers: tuple[int, ...]  # none if one rank is worker and server in one
    evaluators: tuple[int, ...] = ()


Task = tuple[dict[str, int], str, int]  # the number of tasks of each job; the type and the number of this rank's
# What a rank tells the others before roles are known: a problem, its task, what it asks for, and its host.
Report = tuple[tuple[str, str] | None, Task | None, dict[str, Any] | None, str]


@final
class Wanted(NamedTuple):
    """Arguments of a rank for the strategy."""

    staleness: int | None
    on_worker_lost: str
    placement: str
    partitioner: Callable[..., Any] | None
    num_ps: int | None
    ps_ranks: Sequence[int] | None
    options: CommunicationOptions | None = None
    replicas: int | None = None

    def check(self) -> None:
        """Raise the error of an invalid argument."""
        if self.staleness is not None:
            whole_number("staleness", self.staleness, 0, "None for any")
        for name, given, known in (
            ("on_worker_lost", self.on_worker_lost, _WHEN_LOST),
            ("placement", self.placement, PLACEMENTS),
        ):
            if given not in known:
                raise ValueError(f"{name} must be {' or '.join(map(repr, known))}, got {given!r}")
        if self.replicas is not None:
            whole_number("replicas", self.replicas, 1, "None")
        if self.partitioner is not None and not callable(self.partitioner):
            raise TypeError(f"variable_partitioner must be callable, got {self.partitioner!r}")
        if self.options is not None and not isinstance(self.options, CommunicationOptions):
            kind = type(self.options).__name__
            raise TypeError(f"communication_options must be CommunicationOptions, got {kind}")
        if self.options is not None and self.options.plan_key != CommunicationOptions().plan_key:
            raise ValueError(
                f"of communication_options a ParameterServerStrategy takes timeout_seconds alone, got {self.options}: "
                "its workers reduce nothing over ranks; leave the others out"
            )
        self._check_servers()

    def _check_servers(self) -> None:
        num_ps, ps_ranks = self.num_ps, self.ps_ranks
        if num_ps is not None and ps_ranks is not None:
            raise ValueError(f"got num_ps={num_ps} and ps_ranks={ps_ranks!r}; leave one of the two out")
        if num_ps is not None:
            whole_number("num_ps, the number of servers,", num_ps, 1)
        if ps_ranks is not None:
            if isinstance(ps_ranks, str) or not isinstance(ps_ranks, (Sequence, range)):
                raise TypeError(f"ps_ranks must be a list of ranks, got {ps_ranks!r}")
            for rank in ps_ranks:
                whole_number("a rank of ps_ranks", rank)
            if not ps_ranks or len(set(ps_ranks)) < len(ps_ranks):
                raise ValueError(f"ps_ranks must name at least one ps, and each rank once; got {list(ps_ranks)}")

    def fields(self) -> dict[str, Any]:
        """Return what must be equal on all ranks, as all of them can read it: no number of a class of the user's."""
        fields = self._asdict()
        options = fields.pop("options")
        fields |= {name: int(fields[name]) for name in ("num_ps", "staleness", "replicas") if fields[name] is not None}
        fields["partitioner"] = None if self.partitioner is None else type(self.partitioner).__name__
        fields["ps_ranks"] = None if self.ps_ranks is None else [int(rank) for rank in self.ps_ranks]
        seconds = None if options is None else options.timeout_seconds
        return fields | {"timeout_seconds": None if seconds is None else float(seconds)}


@final
class Role(Peers):
    """Role of this rank: worker or server. `meet` makes it.

    Attributes:
        worker_ranks: The workers, as `group` numbers them.
        coordinator: The coordinator of this rank, if there is one.
        before_closing: Called before this rank's part ends; with the text of an exception that the others do not have.
            Returns an error that `close` is to raise.
    """

    def __init__(self, roles: Roles, rank: int, group: ServiceGroup | None, hostnames: Sequence[str]) -> None:
        self.roles, self.group = roles, group
        self.topology = Topology(0, (0,), (socket.gethostname(),))
        self.is_chief = rank == roles.workers[0]
        self.initialises = self.is_chief or group is None  # an evaluator has variables of its own
        self.servers: ParameterClient | None = ParameterClient(None, [LocalChannel()]) if group is None else None
        self.server: ParameterServer | None = None
        self.resolver = _resolver_of(roles, rank, hostnames)
        self.rank, self.worker_ranks = rank, roles.workers
        if rank in roles.servers:
            self.why_idle = "a parameter server: it is for workers; a server calls serve()"
        self.staleness: int | None = None
        self.coordinator: object = None
        self.before_closing: Callable[[str | None], Exception | None] = lambda reason: None

    @property
    def server_devices(self) -> list[str]:
        """The device of each server."""
        return [f"/rank:{rank}/cpu:0" for rank in self.roles.servers or (self.rank,)]

    @classmethod
    def meet(cls, comm: Intracomm | None, resolver: ClusterResolver | None, wanted: Wanted | None) -> Role:
        """Find the roles of all ranks, and connect them. Collective. `wanted`: `None` for the workers' arguments."""
        comm, reports = meet_ranks(comm, _report_of(resolver, wanted))
        roles, fields = _agree(comm, reports)
        members = sorted((*roles.workers, *roles.servers))
        group = ServiceGroup.from_mpi(comm, members) if len(members) > 1 else None
        role = cls(roles, comm.rank, group, [report[3] for report in reports])
        if group is None:
            open_groups.alone.add(role)
        else:
            role._connect(group, members, fields)
        return role

    def _connect(self, group: ServiceGroup, members: list[int], fields: dict[str, Any]) -> None:
        rank, goes_on = members[group.topology.rank], fields["on_worker_lost"] == "ignore"
        workers, servers = (tuple(map(members.index, ranks)) for ranks in self.roles[:2])
        self.worker_ranks = workers
        self.staleness = fields["staleness"]
        peers = self.roles.servers if rank in self.roles.servers else self.roles.workers
        places, topology = [members.index(peer) for peer in peers], group.topology
        nodes, hosts = [topology.node_of_rank[at] for at in places], [topology.hostnames[at] for at in places]
        self.topology = Topology.from_labels(peers.index(rank), nodes, hosts)
        group.awaited.ends_if_any_leaves = not goes_on
        group.awaited.dispensable = workers if goes_on else ()
        group.may_miss_ranks, group.is_needed = goes_on, rank in self.roles.servers
        group.end = self.close
        if fields["timeout_seconds"] is not None:
            group.timeout_seconds = fields["timeout_seconds"]
        names = [f"parameter server {server} (rank {at})" for server, at in enumerate(servers)]
        lanes = lanes_to(group, workers, servers)
        if rank in self.roles.servers:
            membership = Membership(group, workers, self.staleness)
            self.server = ParameterServer(group, membership, names[peers.index(rank)], lanes)
        else:
            channels = [Channel(group, at, name, lanes.get(at)) for at, name in zip(servers, names, strict=True)]
            self.servers = ParameterClient(group, channels, self.staleness)

    def serve(self) -> None:
        """See `ParameterServerStrategy.serve`."""
        if self.server is None:
            raise RuntimeError("serve() on a worker: it is for parameter servers; write `if strategy.is_ps:` before it")
        self.server.serve()
        self.close(None)  # which the workers wait for, whatever this program does before it closes the strategy

    def meet_peers(self, call: str, error: Exception | None = None) -> None:
        """See `Peers`. On workers."""
        if self.servers is None:
            raise RuntimeError(f"{call} on {self.why_idle}")
        self.servers.flush()
        if call == "barrier()":
            error = error or self.servers.missing_steps(call)
        self.servers.meet(call, {}, error)

    def reset(self) -> None:
        """See `Strategy.reset`: a deadline leaves nothing to repair, and lost state of a server stays lost."""
        broken = None if self.group is None else self.group.watchdog.broken
        if broken is None and self.servers is not None:
            broken = self.servers.broken
        if broken is not None:
            raise UnavailableError(
                f"reset() cannot restore lost state of parameter servers and their workers ({first_line(broken)}); "
                "close the strategy, end the job, and start it again, from a checkpoint"
            )

    def close(self, error: BaseException | None) -> Exception | None:
        """End this rank's part: see `Peers`. A server that has not served serves now."""
        group, problem, missing = self.group, None, None
        if self.servers is not None:
            self.servers.require_no_function("close()")
        is_open = group is not None and group.is_open
        if group is not None and is_open:
            group.enter("close()")
        try:
            if group is None or is_open:
                problem = self.before_closing(text_of(error) if group is not None and group.is_own(error) else None)
        except BaseException as failure:  # no rank may wait for what this one does not do
            error = failure if error is None else error
            raise
        finally:
            if self.servers is not None:
                missing = self.servers.close(error)
        if group is None:
            open_groups.alone.discard(self)
        elif self.server is not None and group.is_open:
            self._end_server(group, self.server, error)
        return missing if problem is None or error is not None else problem

    def _end_server(self, group: ServiceGroup, server: ParameterServer, error: BaseException | None) -> None:
        """End the part of a server that is still open."""
        if group.watchdog.broken is not None:  # `serve` has raised it
            group.abandon()
            return
        if group.is_own(error) or server.was_broken_off:
            group.watchdog.tell_leaving(text_of(error) if group.is_own(error) else "its serve() was broken off")
            group.abandon()
            return
        try:
            server.serve()
        except BaseException:
            group.abandon()
            raise
        if server.workers.left:
            group.abandon(has_ended=True)
        else:
            group.free()


def _report_of(resolver: ClusterResolver | None, wanted: Wanted | None) -> Report:
    host = socket.gethostname()
    try:
        task = None
        if wanted is not None:
            wanted.check()
            if resolver is not None and (wanted.num_ps is not None or wanted.ps_ranks is not None):
                raise ValueError("got a cluster_resolver, and num_ps or ps_ranks; leave one of the two out")
        if resolver is not None:
            task = _task_of(resolver)
        return None, task, None if wanted is None else wanted.fields(), host
    except Exception as error:  # of any kind: the other ranks must learn of it
        return (type(error).__name__, str(error)), None, None, host


def _agree(comm: Intracomm, reports: Sequence[Report]) -> tuple[Roles, dict[str, Any]]:
    """Find the roles and the common arguments from the reports of all ranks. Raises the same on all ranks."""
    try:
        for rank, (problem, _, _, _) in enumerate(reports):
            if problem is not None:
                kind = getattr(errors, problem[0], getattr(builtins, problem[0], RuntimeError))
                raise kind(f"rank {rank}: {problem[1]}")
        asked = {rank: fields for rank, (_, _, fields, _) in enumerate(reports) if fields is not None}
        if not asked:
            raise TopologyError("all ranks make a Server(...).join(), and none a strategy: no rank is a worker")
        first = next(iter(asked.values()))
        for name, value in first.items():
            others = [rank for rank, fields in asked.items() if fields[name] != value]
            if others:
                text = f"{asked[others[0]][name]} on {name_ranks(others)}"
                raise InvalidArgumentError(f"{name} must be the same on all ranks, got {value} and {text}")
        roles = _roles_of_tasks([report[1] for report in reports])
        return roles or _roles_by_rank(len(reports), first["num_ps"], first["ps_ranks"]), first
    except Exception as error:  # on all ranks
        mark_shared(error, range(comm.size))
        raise


def _resolver_of(roles: Roles, rank: int, hostnames: Sequence[str]) -> SimpleClusterResolver:
    """Describe the cluster of ranks that no resolver has described."""
    jobs = {"worker": roles.workers, "ps": roles.servers, "evaluator": roles.evaluators}
    spec = ClusterSpec({job: [f"{hostnames[at]}:{at}" for at in ranks] for job, ranks in jobs.items() if ranks})
    job = next(job for job, ranks in jobs.items() if rank in ranks)
    return SimpleClusterResolver(spec, "", job, jobs[job].index(rank))


def _task_of(resolver: ClusterResolver) -> Task | None:
    """Read from a resolver which task this rank is; `None` if it has no cluster. Local."""
    if not isinstance(resolver, ClusterResolver):
        raise TypeError(f"cluster_resolver must be a ClusterResolver, got {type(resolver).__name__}")
    spec = cluster_of(resolver)
    if not spec:
        return None
    task_type, task_id = resolver.task_type, resolver.task_id
    if task_type is None or task_id is None:
        raise ValueError(
            f"the cluster has jobs {spec.jobs}, so you must also specify `task_type` and `task_id`; got {task_type!r} "
            f"and {task_id!r}"
        )
    numbers = {job: spec.num_tasks(job) for job in spec.jobs}
    if not numbers.get("worker", 0) + numbers.get("chief", 0):
        raise ValueError(f"the cluster must have at least one worker, got jobs {numbers}")
    if not numbers.get("ps", 0):
        raise ValueError(f"the cluster needs to have `ps` jobs, at least one ps; got jobs {numbers}")
    require_task(spec, task_type, task_id)
    return numbers, task_type, int(task_id)


def _roles_of_tasks(tasks: Sequence[Task | None]) -> Roles | None:
    """Find the roles from the tasks of all ranks; `None` if no rank has one. The ranks may contradict each other."""
    named = {rank: task for rank, task in enumerate(tasks) if task is not None}
    if not named:
        return None
    if len(named) < len(tasks):
        without = name_ranks(rank for rank in range(len(tasks)) if rank not in named)
        raise TopologyError(f"a cluster is given by TF_CONFIG or a resolver, but not on {without}; do so on all ranks")
    jobs, ranks = named[0][0], dict[tuple[str, int], int]()
    for rank, (numbers, _, _) in named.items():
        if {**numbers, "evaluator": 0} != {**jobs, "evaluator": 0}:
            raise TopologyError(f"rank 0 has the cluster {jobs}, and rank {rank} {numbers}; it must be one cluster")
    for rank, (_, task_type, task_id) in named.items():
        other = ranks.setdefault((task_type, task_id), rank)
        if other != rank:
            raise TopologyError(f"ranks {other} and {rank} are both {task_type} {task_id}")
    needed = sum(number for job, number in jobs.items() if job != "evaluator")
    found = sum(task_type != "evaluator" for task_type, _ in ranks)
    if needed != found:
        raise TopologyError(
            f"the cluster has {needed} tasks, {jobs}, and MPI {found} ranks for them; start `mpiexec -n {needed}`"
        )
    of_job = {job: [ranks[key] for key in sorted(ranks) if key[0] == job] for job in JOBS}
    workers = (*of_job["chief"], *of_job["worker"])
    return Roles(workers, tuple(of_job["ps"]), tuple(of_job["evaluator"]))


def _roles_by_rank(size: int, num_ps: int | None, ps_ranks: Sequence[int] | None) -> Roles:
    """Make the last `num_ps` ranks servers, or `ps_ranks`. One rank alone is worker and server in one."""
    if size == 1:
        return Roles((0,), ())
    if ps_ranks is None:
        wanted = 1 if num_ps is None else num_ps
        if wanted >= size:
            raise ValueError(f"num_ps={wanted} of {size} ranks leaves no worker; start more ranks")
        servers = tuple(range(size - wanted, size))
    else:
        servers = tuple(ps_ranks)
        if not all(0 <= rank < size for rank in servers):
            raise ValueError(f"ps_ranks={list(servers)}, and ranks are 0 to {size - 1}")
        if len(servers) == size:
            raise ValueError(f"ps_ranks={list(servers)} of {size} ranks leaves no worker; name fewer ranks")
    return Roles(tuple(rank for rank in range(size) if rank not in servers), servers)
