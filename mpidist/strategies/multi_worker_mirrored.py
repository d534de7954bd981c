"""Synchronous training on all ranks of a job, on any number of nodes."""

from __future__ import annotations

import os
from typing import NoReturn, final

from mpidist.cluster_resolver import ClusterResolver, MPIClusterResolver, TFConfigClusterResolver
from mpidist.cross_device_ops import CollectiveAllReduce, CrossDeviceOps, HierarchicalCopyAllReduce
from mpidist.errors import TopologyError
from mpidist.options import CommunicationOptions
from mpidist.replicas import Replicas
from mpidist.strategy import Strategy
from mpidist.strategy_extended import StrategyExtended
from mpidist.transport import Device, Intracomm, SyncGroup, choose_device, load_mpi, mark_shared, name_ranks
from mpidist.variables import OncePerNode
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
            `MPIClusterResolver`.
        communication_options: The defaults of all calls.
        cross_device_ops: The algorithm that combines values; by default `CollectiveAllReduce()` on one node, and
            `HierarchicalCopyAllReduce()` on several.
        replicas: Number of replicas, at least the number of ranks, which lie over the ranks in blocks. Distributed
            values are then `PerReplica` values with a component for each replica of the rank, and sums are the same
            bits on any number of ranks.
        comm: An intra-communicator of mpi4py; by default `MPI.COMM_WORLD`.
        per_node_variables: Keep one copy of each mirrored variable for all ranks of a node, in shared memory, instead
            of one copy per rank. Then assigning is collective, in every context.

    Raises:
        TopologyError: If the resolver or TF_CONFIG contradicts MPI, or TF_CONFIG is set on some ranks only. On every
            rank.
        UnavailableError: If there is no MPI, or what the options ask for is missing, NCCL for example.
        ValueError: If there are fewer replicas than ranks.
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
    ) -> None:
        group = SyncGroup.from_mpi(comm)
        device, error, carried = Device("cpu"), None, None
        try:
            _require_kinds(cluster_resolver, communication_options)
            require_bool("per_node_variables", per_node_variables)
            device = choose_device(group.topology)
            carried = None if replicas is None else Replicas.in_blocks(replicas, group.topology)
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = problem
        default = CollectiveAllReduce() if group.topology.num_nodes == 1 else HierarchicalCopyAllReduce()
        ops = cross_device_ops if cross_device_ops is not None else default
        timeout_seconds = getattr(communication_options, "timeout_seconds", None)  # options may be of a wrong type
        placement = OncePerNode(group, timeout_seconds) if per_node_variables else None
        name = type(self).__name__
        devices = [device] * (1 if carried is None else carried.num_here)
        extended = StrategyExtended.assemble(
            name, group, ops, devices, communication_options, placement, error, carried
        )
        super().__init__(extended, _checked_resolver(cluster_resolver, group))


def _require_kinds(cluster_resolver: object, communication_options: object) -> None:
    if communication_options is not None and not isinstance(communication_options, CommunicationOptions):
        kind = type(communication_options).__name__
        raise TypeError(f"communication_options must be CommunicationOptions, got {kind}")
    if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
        raise TypeError(f"cluster_resolver must be a ClusterResolver, got {type(cluster_resolver).__name__}")


def _checked_resolver(given: ClusterResolver | None, group: SyncGroup) -> ClusterResolver:
    """Compare a resolver with MPI. Collective: a contradiction on one rank is an error on all ranks."""
    topology = group.topology
    resolver, problem = given, None
    try:
        # TF_CONFIG describes a whole job, so it does not apply to a strategy over some of the ranks.
        if given is None and os.environ.get("TF_CONFIG") and topology.size == load_mpi().COMM_WORLD.Get_size():
            resolver = TFConfigClusterResolver()
        if resolver is not None:
            resolver.check(topology.size, topology.rank, topology.hostnames)
    except Exception as error:  # of any kind: the other ranks must learn of it
        problem = str(error) if type(error) is TopologyError else f"{type(error).__name__}: {error}"
    everyone = group.agreement.all_gather_object((problem, resolver is None))
    for rank, (text, _) in enumerate(everyone):
        if text is not None:
            _refuse(group, f"rank {rank}: {text}")
    without = [rank for rank, (_, has_none) in enumerate(everyone) if has_none]
    if 0 < len(without) < topology.size:
        _refuse(group, f"TF_CONFIG is set, or a resolver given, but not on {name_ranks(without)}; do so on all ranks")
    return MPIClusterResolver.of(topology) if resolver is None else resolver


def _refuse(group: SyncGroup, text: str) -> NoReturn:
    group.close()
    refusal = TopologyError(text)
    mark_shared(refusal, group.agreement.ranks)
    raise refusal
