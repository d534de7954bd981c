"""The strategy that is current where no strategy was entered: of this process alone."""

from __future__ import annotations

from typing import final

from mpidist.cross_device_ops.collective_all_reduce import CollectiveAllReduce
from mpidist.replica_context.replica_context import ReplicaContext
from mpidist.replica_context.solo_calls import SoloCalls
from mpidist.strategy import Strategy
from mpidist.strategy_parts import StrategyParts
from mpidist.transport.devices import Device
from mpidist.transport.group.sync_group import SyncGroup

__all__ = ["DefaultStrategy", "make_default"]


@final
class DefaultStrategy(Strategy):
    """One replica on this process's CPU, also under an MPI launcher with many processes."""

    def __init__(self) -> None:
        super().__init__(
            StrategyParts.assemble(type(self).__name__, SyncGroup.solo(), CollectiveAllReduce(), [Device("cpu")])
        )


def make_default() -> tuple[Strategy, ReplicaContext]:
    """Make the default strategy and its replica context."""
    strategy = DefaultStrategy()
    return strategy, ReplicaContext(strategy, 0, SoloCalls(strategy))
