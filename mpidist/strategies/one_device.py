"""Computing on one device, by one process."""

from __future__ import annotations

from typing import final

from mpidist.cross_device_ops.collective_all_reduce import CollectiveAllReduce
from mpidist.strategy import Strategy
from mpidist.strategy_parts import StrategyParts
from mpidist.transport.devices import Device, choose_device
from mpidist.transport.group.sync_group import SyncGroup

__all__ = ["OneDeviceStrategy"]


@final
class OneDeviceStrategy(Strategy):
    """Compute on one device, without communication and without MPI. Under a launcher each process computes alone.

    Args:
        device: `"/cpu:0"`, `"/gpu:1"` and the like. By default the first GPU, or the CPU where there is none. If a GPU
            is named, variables and symmetric arrays lie in its memory; else a variable lies where its initial value is.

    Raises:
        ValueError: If `device` is not understood.
        UnavailableError: If `device` is a GPU that this process does not see.
    """

    def __init__(self, device: str | None = None) -> None:
        group = SyncGroup.solo()
        chosen = choose_device(group.topology) if device is None else Device.parse(device)
        super().__init__(StrategyParts.assemble(type(self).__name__, group, CollectiveAllReduce(), [chosen]))
