"""Synchronous training on all ranks of a job, on any number of nodes."""

from __future__ import annotations

from functools import partial
from typing import final

from mpidist.cluster_resolver.resolver import ClusterResolver
from mpidist.cluster_tasks import join_tasks
from mpidist.cross_device_ops.collective_all_reduce import CollectiveAllReduce
from mpidist.cross_device_ops.cross_device_ops import CrossDeviceOps
from mpidist.cross_device_ops.hierarchical_copy_all_reduce import HierarchicalCopyAllReduce
from mpidist.options import CommunicationOptions
from mpidist.replicas import Replicas
from mpidist.strategy import Strategy
from mpidist.strategy_parts import StrategyParts
from mpidist.transport.devices import Device, choose_device
from mpidist.transport.group.peers import Peers
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.mpi.library import Intracomm
from mpidist.variables.placement import OncePerNode
from mpidist.whole_number import require_bool

__all__ = ["MultiWorkerMirroredStrategy"]


@final
class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on all ranks, each with its own device and a copy of every variable.

    Making one is collective over `comm`. One rank is one replica, unless `replicas` is given. Each rank takes the GPU
    of its local rank, or the CPU where there is none; a variable lies in the memory where its initial value lies.

    Args:
        cluster_resolver: The tasks of the cluster, which are compared with the ranks of MPI. By default a
            `TFConfigClusterResolver`, if TF_CONFIG is set and the strategy is over all ranks of the job; else an
            `MPIClusterResolver`. Ranks that are its tasks of the job ps make the strategy with the others, and have no
            replica; an evaluator computes alone.
        communication_options: The defaults of all calls.
        cross_device_ops: The algorithm that combines values; by default `CollectiveAllReduce()` on one node, and
            `HierarchicalCopyAllReduce()` on several.
        replicas: Number of replicas, at least the number of ranks, which lie over the ranks in blocks. Distributed
            values are then `PerReplica` values with a component for each replica of the rank, and sums are the same
            bits on any number of ranks.
        comm: An intra-communicator of mpi4py; by default `MPI.COMM_WORLD`.
        per_node_variables: Keep one copy of each mirrored variable for all ranks of a node, in shared memory, instead
            of one copy per rank. Then assigning is collective, in every context.
        on_rank_lost: Policy after the loss of a rank: `"end"` ends the job; with `"shrink"`, `shrink` makes the same
            strategy over the surviving ranks. That needs Open MPI, started with `mpirun --with-ft ulfm`.

    Raises:
        TopologyError: If the resolver or TF_CONFIG contradicts MPI, or TF_CONFIG is set on some ranks only. On every
            rank.
        UnavailableError: If there is no MPI; if a library that the options require is missing, such as NCCL; or if MPI
            cannot continue without a lost rank.
        ValueError: If there are fewer replicas than ranks, or `on_rank_lost` is something else.
        TypeError: If the resolver, the options, `cross_device_ops` or `per_node_variables` are of another type.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        cross_device_ops: CrossDeviceOps | None = None,
        replicas: int | None = None,
        comm: Intracomm | None = None,
        per_node_variables: bool = False,
        on_rank_lost: str = "end",
    ) -> None:
        name, options = type(self).__name__, communication_options

        def assemble(group: SyncGroup, peers: Peers | None = None) -> StrategyParts:
            device, error, carried = Device("cpu"), None, None
            try:
                _require_resolver(cluster_resolver)
                require_bool("per_node_variables", per_node_variables)
                group.choose_on_rank_lost(on_rank_lost)
                device = choose_device(group.topology)
                carried = None if replicas is None else Replicas.in_blocks(replicas, group.topology)
            except Exception as problem:  # of any kind: the other ranks must learn of it
                error = problem
            default = CollectiveAllReduce() if group.topology.num_nodes == 1 else HierarchicalCopyAllReduce()
            ops = cross_device_ops if cross_device_ops is not None else default
            placement = partial(OncePerNode, group) if per_node_variables else None
            devices = [device] * (1 if carried is None else carried.num_here)
            return StrategyParts.assemble(name, group, ops, devices, options, placement, error, carried, peers)

        everyone = SyncGroup.from_mpi(comm)
        parts = assemble(everyone)
        resolver, group, peers = join_tasks(cluster_resolver, comm, everyone)
        if group is not everyone:
            parts = assemble(group, peers)
        super().__init__(parts, resolver)
        self._remake = partial(
            type(self),
            None,
            options,
            cross_device_ops=cross_device_ops,
            replicas=replicas,
            per_node_variables=per_node_variables,
            on_rank_lost=on_rank_lost,
        )


def _require_resolver(given: object) -> None:
    if given is not None and not isinstance(given, ClusterResolver):
        raise TypeError(f"cluster_resolver must be a ClusterResolver, got {type(given).__name__}")
