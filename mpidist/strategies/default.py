"""The strategy that is current where no strategy was entered: of this process alone."""

from __future__ import annotations

from typing import final

from mpidist.cross_device_ops import CollectiveAllReduce
from mpidist.replica_context import ReplicaContext
from mpidist.strategy import Strategy
from mpidist.strategy_extended import StrategyExtended
from mpidist.transport import Device, SyncGroup

__all__ = ["DefaultStrategy", "make_default"]


@final
class DefaultStrategy(Strategy):
    """One replica on this process's CPU, also under an MPI launcher with many processes."""

    def __init__(self) -> None:
        super().__init__(
            StrategyExtended.assemble(type(self).__name__, SyncGroup.solo(), CollectiveAllReduce(), [Device("cpu")])
        )


def make_default() -> tuple[Strategy, ReplicaContext]:
    """Make the default strategy and its replica context."""
    strategy = DefaultStrategy()
    return strategy, ReplicaContext(strategy, 0, strategy.extended.cross_device_ops)
