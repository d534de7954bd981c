"""Which rank is a worker, which one a parameter server, and which one an evaluator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

from mpidist.cluster_resolver.cluster_spec import ClusterSpec
from mpidist.cluster_resolver.resolver import ClusterResolver
from mpidist.errors import TopologyError
from mpidist.transport.text import name_ranks
from mpidist.whole_number import whole_number

__all__ = ["Roles", "Task", "check_counts", "roles_by_rank", "roles_of_tasks", "task_of"]

_KNOWN = ("chief", "worker", "ps", "evaluator")


@final
class Roles(NamedTuple):
    """The ranks of each role.

    Attributes:
        workers: The workers; the first one is the chief.
        servers: The parameter servers, in order; none if one rank is worker and server in one.
        evaluators: The evaluators.
    """

    workers: tuple[int, ...]
    servers: tuple[int, ...]
    evaluators: tuple[int, ...] = ()


@final
class Task(NamedTuple):
    """What a resolver says: all tasks, and which of them this rank is.

    Attributes:
        jobs: The number of tasks of each job.
        task_type: The job of this rank.
        task_id: The number of this rank within the job.
    """

    jobs: tuple[tuple[str, int], ...]
    task_type: str
    task_id: int


def task_of(resolver: ClusterResolver) -> Task | None:
    """Read from a resolver which task this rank is. Local.

    Returns:
        The task; `None` if the resolver knows no cluster.

    Raises:
        TypeError: If it is no resolver.
        ValueError: If the cluster is none of parameter servers.
    """
    if not isinstance(resolver, ClusterResolver):
        raise TypeError(f"cluster_resolver must be a ClusterResolver, got {type(resolver).__name__}")
    spec = resolver.cluster_spec()
    if not spec:
        return None
    task_type, task_id = resolver.task_type, resolver.task_id
    if task_type is None or task_id is None:
        raise ValueError(
            f"the cluster has jobs {spec.jobs}, so you must also specify `task_type` and `task_id`; got {task_type!r} "
            f"and {task_id!r}"
        )
    _check_jobs(spec)
    if task_type not in _KNOWN:
        raise ValueError(f"Unrecognized task_type {task_type!r}; known are {', '.join(_KNOWN)}")
    has_task = task_type in spec.jobs and task_id in spec.task_indices(task_type)
    if not has_task and task_type != "evaluator":  # which may stand outside of the cluster
        raise ValueError(f"this rank is {task_type} {task_id}, and the cluster has no such task: {spec}")
    return Task(tuple((job, spec.num_tasks(job)) for job in spec.jobs), task_type, int(task_id))


def _check_jobs(spec: ClusterSpec) -> None:
    unknown = [job for job in spec.jobs if job not in _KNOWN]
    if unknown:
        raise ValueError(f"Disallowed task type found in the cluster: {unknown}; known are {', '.join(_KNOWN)}")
    numbers = {job: spec.num_tasks(job) for job in spec.jobs}
    for job in ("chief", "evaluator"):
        if numbers.get(job, 0) > 1:
            raise ValueError(f"there must be at most one {job} in the cluster, got {numbers[job]}")
    if not numbers.get("worker", 0) + numbers.get("chief", 0):
        raise ValueError(f"the cluster must have at least one worker, got jobs {numbers}")
    if not numbers.get("ps", 0):
        raise ValueError(f"the cluster needs to have `ps` jobs, at least one ps; got jobs {numbers}")


def roles_of_tasks(tasks: Sequence[Task | None]) -> Roles | None:
    """Find the roles from what all ranks' resolvers say.

    Returns:
        The roles; `None` if no resolver knows a cluster.

    Raises:
        TopologyError: If ranks contradict each other, or MPI.
    """
    named = {rank: task for rank, task in enumerate(tasks) if task is not None}
    if not named:
        return None
    if len(named) < len(tasks):
        without = name_ranks(rank for rank in range(len(tasks)) if rank not in named)
        raise TopologyError(f"a cluster is given by TF_CONFIG or a resolver, but not on {without}; do so on all ranks")
    jobs = {rank: dict(task.jobs) for rank, task in named.items()}
    for rank, numbers in jobs.items():
        if {**numbers, "evaluator": 0} != {**jobs[0], "evaluator": 0}:
            raise TopologyError(f"rank 0 has the cluster {jobs[0]}, and rank {rank} {numbers}; it must be one cluster")
    ranks: dict[tuple[str, int], int] = {}
    for rank, task in named.items():
        other = ranks.setdefault((task.task_type, task.task_id), rank)
        if other != rank:
            raise TopologyError(f"ranks {other} and {rank} both say they are {task.task_type} {task.task_id}")
    needed = sum(number for job, number in jobs[0].items() if job != "evaluator")
    found = sum(task_type != "evaluator" for task_type, _ in ranks)
    if needed != found:
        raise TopologyError(
            f"the cluster has {needed} tasks, {jobs[0]}, and MPI {found} ranks for them; start `mpiexec -n {needed}`"
        )
    of_job = {job: [ranks[key] for key in sorted(ranks) if key[0] == job] for job in _KNOWN}
    workers = (*of_job["chief"], *of_job["worker"])
    return Roles(workers, tuple(of_job["ps"]), tuple(of_job["evaluator"]))


def check_counts(num_ps: Any, ps_ranks: Any) -> None:
    """Check the arguments that choose servers by rank. Local.

    Raises:
        TypeError: If they are of a wrong kind.
        ValueError: If both are given, or one is wrong by itself.
    """
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


def roles_by_rank(size: int, num_ps: int | None, ps_ranks: Sequence[int] | None) -> Roles:
    """Let the last `num_ps` ranks be servers, or those of `ps_ranks`. One rank alone is worker and server in one.

    Raises:
        ValueError: If no worker is left, or there is no such rank.
    """
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
