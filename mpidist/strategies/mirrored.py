"""Synchronous training on the ranks of one node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from mpidist.cross_device_ops import CollectiveAllReduce, CrossDeviceOps
from mpidist.errors import TopologyError
from mpidist.strategy import Strategy
from mpidist.strategy_extended import StrategyExtended
from mpidist.transport import Device, Intracomm, SyncGroup, choose_device, name_ranks
from mpidist.variables import OncePerNode, OnEachRank

__all__ = ["MirroredStrategy"]


@final
class MirroredStrategy(Strategy):
    """Synchronous training on the ranks of one node, each with its own device and a copy of every variable.

    Making one is collective over `comm`.

    Args:
        devices: The device of every rank, in rank order, or one device string for this rank. By default each rank
            takes the GPU of its local rank, or the CPU where there is none.
        cross_device_ops: The algorithm that combines values; by default `CollectiveAllReduce()`.
        comm: An intra-communicator of mpi4py whose ranks share a node; by default `MPI.COMM_WORLD`.
        per_node_variables: Keep one copy of each mirrored variable for all ranks, in shared memory, instead of one copy
            per rank. Then assigning is collective, in every context.

    Raises:
        TopologyError: If the ranks are on several nodes.
        TypeError: If `devices` is neither a string nor a sequence, or `cross_device_ops` is no `CrossDeviceOps`.
        UnavailableError: If there is no MPI, or no such device.
        ValueError: If the number of devices is not the number of ranks, or a device string is not understood.
    """

    def __init__(
        self,
        devices: Sequence[str] | str | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        comm: Intracomm | None = None,
        per_node_variables: bool = False,
    ) -> None:
        group = SyncGroup.from_mpi(comm)
        device, error = Device("cpu"), None
        try:
            _require_one_node(group)
            device = _device_of(group, devices)
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = problem
        ops = cross_device_ops if cross_device_ops is not None else CollectiveAllReduce()
        placement = OncePerNode(group, None) if per_node_variables else OnEachRank()
        super().__init__(StrategyExtended.assemble(type(self).__name__, group, ops, device, None, placement, error))


def _require_one_node(group: SyncGroup) -> None:
    topology = group.topology
    if topology.num_nodes > 1:
        nodes = "; ".join(name_ranks(ranks) for ranks in topology.nodes)
        raise TopologyError(
            f"MirroredStrategy is for the ranks of one node, and these are on {topology.num_nodes} nodes ({nodes}); "
            "use MultiWorkerMirroredStrategy"
        )


def _device_of(group: SyncGroup, devices: Sequence[str] | str | None) -> Device:
    topology = group.topology
    if devices is None:
        return choose_device(topology)
    if not isinstance(devices, Sequence):
        raise TypeError(f"devices must be a device string or a sequence of them, got {devices!r}")
    if isinstance(devices, str):
        return Device.parse(devices)
    if len(devices) != topology.size:
        raise ValueError(
            f"MirroredStrategy got {len(devices)} devices for {topology.size} ranks; one rank is one replica on one "
            f"device, so start as many ranks as devices: `mpiexec -n {len(devices)} python ...`"
        )
    parsed = [Device.parse(text) for text in devices]  # all of them, so that every rank finds a bad one
    return parsed[topology.rank]
