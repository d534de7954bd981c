"""The tasks of a cluster and the ranks of MPI: whether they fit, and which ranks train."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn, final

from mpidist.cluster_resolver.mpi import MPIClusterResolver
from mpidist.cluster_resolver.resolver import ClusterResolver
from mpidist.cluster_resolver.tf_config import TFConfigClusterResolver
from mpidist.errors import TopologyError
from mpidist.transport.group.service_group import Service
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.mpi.library import Intracomm, load_mpi
from mpidist.transport.shared_errors import mark_shared
from mpidist.transport.text import name_ranks
from mpidist.transport.topology import Topology

__all__ = ["Tasks", "join_tasks"]

_NO_WORKERS = ("ps", "evaluator")  # jobs that are no part of synchronous training


@final
class Tasks(NamedTuple):
    """What a rank of a strategy that trains in step is.

    Attributes:
        resolver: The tasks of the cluster.
        group: The ranks that train with this one; this rank alone, if it does not train.
        service: What a rank of the job ps has beside the group; else `None`.
    """

    resolver: ClusterResolver
    group: SyncGroup
    service: Service | None = None


@final
class _Report(NamedTuple):
    """What a rank reports before the ranks compare the cluster with MPI."""

    has_resolver: bool = False
    task_type: str | None = None


@final
class _Parameters(Service):
    """The part of a rank of the job ps, which takes no part in training.

    Args:
        task_id: The number of the task.
        rank: The rank, of all that make the strategy.
        hostname: The rank's host.
    """

    def __init__(self, task_id: int | None, rank: int, hostname: str) -> None:
        self.topology, self.is_chief, self.rank = Topology(0, (0,), (hostname,)), False, rank
        self.why_idle = f"ps {task_id} of the cluster, which has no replica: chief and workers train"

    def reset(self) -> None:
        """See `Service`. There is nothing to reset."""

    def close(self, error: BaseException | None) -> Exception | None:
        """See `Service`. No other rank waits for this one."""
        return None

    def meet_peers(self, call: str, error: Exception | None = None) -> None:
        """Refuse: no other rank makes the call."""
        raise RuntimeError(f"{call} on {self.why_idle}")


def join_tasks(given: ClusterResolver | None, comm: Intracomm | None, group: SyncGroup) -> Tasks:
    """Compare a resolver with MPI, and let ranks of other jobs than chief and worker leave the group. Collective.

    Args:
        given: The resolver that this rank was given.
        comm: The ranks.
        group: The group of the ranks, which is closed if some ranks leave it.

    Raises:
        TopologyError: If the resolver contradicts MPI, or is missing on a rank. On all ranks.
    """
    topology, resolver, problem, report = group.topology, None, None, _Report()
    try:
        resolver = TFConfigClusterResolver.of_job(comm) if given is None else given
        if resolver is not None:
            report = _Report(True, resolver.task_type)
    except Exception as wrong:  # of any kind: the other ranks must learn of it
        problem = _text_of(wrong)
    reports: list[_Report] = _gather(group, report, problem)
    if not any(one.has_resolver for one in reports):
        return Tasks(MPIClusterResolver.of(topology), group)
    without = [rank for rank, one in enumerate(reports) if not one.has_resolver]
    if without or resolver is None:
        _refuse(group, f"TF_CONFIG is set, or a resolver given, but not on {name_ranks(without)}; do so on all ranks")
    workers = [rank for rank, one in enumerate(reports) if one.task_type not in _NO_WORKERS]
    if topology.rank in workers:
        try:
            hostnames = [topology.hostnames[rank] for rank in workers]
            resolver.check(len(workers), workers.index(topology.rank), hostnames)
        except Exception as wrong:  # of any kind: the other ranks must learn of it
            problem = _text_of(wrong)
    _gather(group, None, problem)
    if len(workers) == topology.size:
        return Tasks(resolver, group)
    own, service = _part_of(group, comm, topology.rank in workers), None
    if report.task_type == "ps":
        service = _Parameters(resolver.task_id, topology.rank, topology.hostnames[topology.rank])
    return Tasks(resolver, own, service)


def _part_of(group: SyncGroup, comm: Intracomm | None, trains: bool) -> SyncGroup:
    """Close a group, and make one of the ranks that train, and one of each other rank alone. Collective."""
    parent: Any = load_mpi().COMM_WORLD if comm is None else comm  # to mpi4py's stubs, its part is a mere Comm
    part = parent.Split(trains, group.topology.rank)
    group.close()
    try:
        return SyncGroup.from_mpi(part) if trains else SyncGroup.solo()
    finally:
        part.Free()


def _gather(group: SyncGroup, item: Any, problem: str | None) -> list[Any]:
    """Gather an item of each rank. Collective; a problem of one rank is raised on all of them."""
    everyone = group.agreement.all_gather_object((problem, item))
    for rank, (text, _) in enumerate(everyone):
        if text is not None:
            _refuse(group, f"rank {rank}: {text}")
    return [item for _, item in everyone]


def _text_of(error: Exception) -> str:
    return str(error) if type(error) is TopologyError else f"{type(error).__name__}: {error}"


def _refuse(group: SyncGroup, text: str) -> NoReturn:
    group.close()
    refusal = TopologyError(text)
    mark_shared(refusal, group.agreement.ranks)
    raise refusal
