"""All ranks of a job, on any number of nodes, in step."""

from __future__ import annotations

from typing import final

from mpidist.cluster_resolver import ClusterResolver
from mpidist.cross_device_ops import CollectiveAllReduce, CrossDeviceOps, HierarchicalCopyAllReduce
from mpidist.errors import TopologyError
from mpidist.extended import StrategyExtended
from mpidist.options import CommunicationOptions
from mpidist.strategy import Strategy
from mpidist.transport.devices import choose_device
from mpidist.transport.mpi import Intracomm
from mpidist.transport.sync_group import SyncGroup

__all__ = ["MultiWorkerMirroredStrategy"]


@final
class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on all ranks, each with its own device and a copy of every variable.

    Making one is collective over `comm`.

    Args:
        cluster_resolver: What says where the ranks run. It is held against what MPI says; by default MPI alone
            is asked.
        communication_options: The defaults of all calls.
        cross_device_ops: How values are combined; by default `CollectiveAllReduce()` on one node, and
            `HierarchicalCopyAllReduce()` on several.
        comm: An intra-communicator of mpi4py; by default `MPI.COMM_WORLD`.
        per_node_variables: Keep one copy of each mirrored variable for all ranks of a node, in shared memory, instead
            of one for each. Then assigning is collective, in every context.

    Raises:
        TopologyError: If the resolver contradicts MPI. On every rank.
        UnavailableError: If there is no MPI, or the options cannot be followed here.
        TypeError: If the resolver, the options or `cross_device_ops` are something else.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        cross_device_ops: CrossDeviceOps | None = None,
        comm: Intracomm | None = None,
        per_node_variables: bool = False,
    ) -> None:
        group = SyncGroup.from_mpi(comm)
        error: Exception | None = None
        if communication_options is not None and not isinstance(communication_options, CommunicationOptions):
            kind, communication_options = type(communication_options).__name__, None
            error = TypeError(f"communication_options must be CommunicationOptions, got {kind}")
        if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
            kind, cluster_resolver = type(cluster_resolver).__name__, None
            error = TypeError(f"cluster_resolver must be a ClusterResolver, got {kind}")
        default = CollectiveAllReduce() if group.topology.num_nodes == 1 else HierarchicalCopyAllReduce()
        ops = cross_device_ops if cross_device_ops is not None else default
        extended = StrategyExtended.assemble(
            type(self).__name__,
            group,
            ops,
            choose_device(group.topology),
            communication_options,
            per_node_variables,
            error,
        )
        _check(cluster_resolver, group)
        super().__init__(extended, cluster_resolver)


def _check(cluster_resolver: ClusterResolver | None, group: SyncGroup) -> None:
    """Hold a resolver against MPI, on all ranks: one that is contradicted on one rank is refused on all."""
    problem = None
    try:
        if cluster_resolver is not None:
            cluster_resolver.check(group.topology.size, group.topology.rank)
    except Exception as error:  # whatever a resolver runs into, the other ranks must learn of it
        problem = f"{type(error).__name__}: {error}"
    problems = group.agreement.exchange(problem)
    for rank, text in enumerate(problems):
        if text is not None:
            group.close()
            refusal = TopologyError(f"rank {rank}: {text}")
            vars(refusal)["raised_on_all_ranks"] = True  # printing it once will do
            raise refusal
