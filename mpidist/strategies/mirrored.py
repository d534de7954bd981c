"""Synchronous training on the ranks of one node."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import final

from mpidist.cross_device_ops.collective_all_reduce import CollectiveAllReduce
from mpidist.cross_device_ops.cross_device_ops import CrossDeviceOps
from mpidist.options import CommunicationOptions
from mpidist.replicas import devices_on_one_node
from mpidist.strategy import Strategy
from mpidist.strategy_parts import StrategyParts
from mpidist.transport.devices import Device
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.mpi.library import Intracomm
from mpidist.variables.placement import OncePerNode
from mpidist.whole_number import require_bool

__all__ = ["MirroredStrategy"]


@final
class MirroredStrategy(Strategy):
    """Synchronous training on the ranks of one node, each with its own device and a copy of every variable.

    Making one is collective over `comm`. One rank is one replica, unless there are more devices than ranks, or
    `replicas` is given: then a rank carries several replicas, and distributed values are `PerReplica` values of as many
    components.

    Args:
        devices: The device of every replica, in order, or one device string for this rank. By default each rank takes
            the GPU of its local rank, or the CPU where there is none. If all devices are named as GPUs, variables and
            symmetric arrays lie in device memory; a GPU that was taken by default holds what was given there.
        cross_device_ops: The algorithm that combines values; by default `CollectiveAllReduce()`.
        communication_options: The defaults of all calls.
        replicas: Number of replicas, at least the number of ranks, which lie over the ranks in blocks. Sums are then
            the same bits on any number of ranks.
        comm: An intra-communicator of mpi4py whose ranks share a node; by default `MPI.COMM_WORLD`.
        per_node_variables: Keep one copy of each mirrored variable for all ranks, in shared memory, instead of one copy
            per rank. Then assigning is collective, in every context.

    Raises:
        TopologyError: If the ranks are on several nodes.
        TypeError: If `devices` is neither a string nor a sequence, or `cross_device_ops`, the options or
            `per_node_variables` are of another type.
        UnavailableError: If there is no MPI, or no such device.
        ValueError: If there are fewer devices or replicas than ranks, if the numbers of devices and replicas differ, or
            if a device string is not understood.
    """

    def __init__(
        self,
        devices: Sequence[str] | str | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        replicas: int | None = None,
        comm: Intracomm | None = None,
        per_node_variables: bool = False,
    ) -> None:
        group = SyncGroup.from_mpi(comm)
        chosen, error, carried = [Device("cpu")], None, None
        name = type(self).__name__
        try:
            require_bool("per_node_variables", per_node_variables)
            chosen, carried = devices_on_one_node(name, group.topology, devices, replicas)
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = problem
        ops = cross_device_ops if cross_device_ops is not None else CollectiveAllReduce()
        options, placement = communication_options, partial(OncePerNode, group) if per_node_variables else None
        super().__init__(StrategyParts.assemble(name, group, ops, chosen, options, placement, error, carried))
