"""Synchronous training on the ranks of one node, whose variables live once, in the node's host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from mpidist.cross_device_ops.collective_all_reduce import CollectiveAllReduce
from mpidist.options import CommunicationOptions
from mpidist.replicas import devices_on_one_node
from mpidist.strategy import Strategy
from mpidist.strategy_parts import StrategyParts
from mpidist.transport.devices import Device
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.mpi.library import Intracomm
from mpidist.variables.placement import OncePerNode, OnEachRank, VariablePlacement

__all__ = ["CentralStorageStrategy"]


@final
class CentralStorageStrategy(Strategy):
    """Synchronous training on the ranks of one node, with one copy of each mirrored variable for all replicas.

    Making one is collective over `comm`, and so is assigning, in every context. All replicas read one memory, without a
    copy. What they assign is combined first, and written once: with aggregation NONE several replicas cannot assign. A
    replica that is alone has plain variables.

    Args:
        compute_devices: The device of every replica, in order, at least one for each rank; or one device string for
            this rank. By default there is one replica on each rank, which takes the GPU of its local rank, or the CPU
            where there is none. With more devices than ranks, ranks carry several replicas, as in `MirroredStrategy`.
        parameter_device: The device that holds the variables: `"CPU:0"`, the default, is the host memory of the node.
            Also the device of the only replica, if there is one alone, which is then the default if it was named.
        communication_options: The defaults of all calls.
        comm: An intra-communicator of mpi4py whose ranks share a node; by default `MPI.COMM_WORLD`.

    Raises:
        TopologyError: If the ranks are on several nodes.
        TypeError: If `compute_devices` is neither a string nor a sequence, or the options are of another type.
        UnavailableError: If there is no MPI, or no such device.
        ValueError: If there are fewer devices than ranks, if a device string is not understood, or if
            `parameter_device` is a GPU, which not all replicas can read.
    """

    def __init__(
        self,
        compute_devices: Sequence[str] | str | None = None,
        parameter_device: str | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        comm: Intracomm | None = None,
    ) -> None:
        group = SyncGroup.from_mpi(comm)
        chosen, error, carried = [Device("cpu")], None, None
        name = type(self).__name__
        try:
            chosen, carried = devices_on_one_node(name, group.topology, compute_devices)
            _require_readable(parameter_device, chosen, group.topology.size)
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = problem

        def make_placement(options: CommunicationOptions) -> VariablePlacement:
            if group.topology.size > 1 or len(chosen) > 1:
                return OncePerNode(group, options, "/rank:0/cpu:0")
            return OnEachRank(None if parameter_device is None else Device.parse(parameter_device))

        ops, options = CollectiveAllReduce(), communication_options
        super().__init__(StrategyParts.assemble(name, group, ops, chosen, options, make_placement, error, carried))


def _require_readable(parameter_device: str | None, chosen: Sequence[Device], num_ranks: int) -> None:
    """Refuse a device whose memory not all replicas can read."""
    if parameter_device is None:
        return
    device = Device.parse(parameter_device)
    if not device.is_gpu or (num_ranks == 1 and list(chosen) == [device]):
        return
    raise ValueError(
        f"CentralStorageStrategy got parameter_device={parameter_device!r}, whose memory not all replicas can read; "
        'leave it out, or choose "CPU:0", the host memory of the node. A GPU holds variables only if there is one '
        "replica, which computes on that GPU"
    )
