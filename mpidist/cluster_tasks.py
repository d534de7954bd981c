"""The tasks of a cluster and the ranks of MPI: whether they fit, and which ranks train."""

from __future__ import annotations

from typing import Any, NoReturn, final

from mpidist.cluster_resolver.mpi import MPIClusterResolver
from mpidist.cluster_resolver.resolver import ClusterResolver
from mpidist.cluster_resolver.tf_config import TFConfigClusterResolver
from mpidist.errors import TopologyError
from mpidist.transport.group.peers import Peers
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.mpi.library import Intracomm, load_mpi
from mpidist.transport.shared_errors import mark_shared
from mpidist.transport.text import name_ranks
from mpidist.transport.topology import Topology

__all__ = ["join_tasks"]

_NO_WORKERS = ("ps", "evaluator")  # jobs that are no part of synchronous training


@final
class _Parameters(Peers):
    """Peers of a rank of the job ps, which takes no part in training."""

    def __init__(self, task_id: int | None, rank: int, hostname: str) -> None:
        self.topology, self.is_chief, self.rank = Topology(0, (0,), (hostname,)), False, rank
        self.why_idle = f"ps {task_id} of the cluster, which has no replica: chief and workers train"

    def meet_peers(self, call: str, error: Exception | None = None) -> None:
        """Refuse: no other rank makes the call."""
        raise RuntimeError(f"{call} on {self.why_idle}")


def join_tasks(
    given: ClusterResolver | None, comm: Intracomm | None, group: SyncGroup
) -> tuple[ClusterResolver, SyncGroup, Peers | None]:
    """Compare a resolver with MPI, and let ranks of other jobs than chief and worker leave the group. Collective.

    Returns the tasks of the cluster; the ranks that train with this one, or this rank alone, if it does not train, and
    then the first group is closed; and the peers of a rank of the job ps. On all ranks it is a
    `TopologyError` if a resolver, such as that `given` to this rank, contradicts MPI, or is missing on a rank.
    """
    topology, resolver, problem, task_type = group.topology, None, None, None
    try:
        resolver = TFConfigClusterResolver.of_job(comm) if given is None else given
        task_type = None if resolver is None else resolver.task_type
    except Exception as wrong:  # of any kind: the other ranks must learn of it
        problem = _text_of(wrong, given)
    reports = _gather(group, (resolver is not None, task_type), problem)
    if not any(has_resolver for has_resolver, _ in reports):
        return MPIClusterResolver.of(topology), group, None
    without = [rank for rank, (has_resolver, _) in enumerate(reports) if not has_resolver]
    if without or resolver is None:
        _refuse(group, f"TF_CONFIG is set, or a resolver given, but not on {name_ranks(without)}; do so on all ranks")
    workers = [rank for rank, (_, its_type) in enumerate(reports) if its_type not in _NO_WORKERS]
    if not workers and topology.size > 1:  # one process alone may be any task
        _refuse(group, f"none of the {topology.size} ranks is a chief or a worker of the cluster, which alone train")
    if topology.rank in workers:
        try:
            hostnames = [topology.hostnames[rank] for rank in workers]
            resolver.check(len(workers), workers.index(topology.rank), hostnames)
        except Exception as wrong:  # of any kind: the other ranks must learn of it
            problem = _text_of(wrong, given)
    _gather(group, None, problem)
    if len(workers) == topology.size:
        return resolver, group, None
    own, peers = _part_of(group, comm, topology.rank in workers), None
    if task_type == "ps":
        peers = _Parameters(resolver.task_id, topology.rank, topology.hostnames[topology.rank])
    return resolver, own, peers


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


def _text_of(error: Exception, given: ClusterResolver | None) -> str:
    who = "TF_CONFIG" if given is None else type(given).__name__
    return str(error) if type(error) is TopologyError else f"{who}: {type(error).__name__}: {error}"


def _refuse(group: SyncGroup, text: str) -> NoReturn:
    group.close()
    refusal = TopologyError(text)
    mark_shared(refusal, group.agreement.ranks)
    raise refusal
