"""A group of ranks, put together: topology, communicators, agreement, end."""

from mpidist.transport.group import compression as compression
from mpidist.transport.group.compression import all_reduce_between_nodes as all_reduce_between_nodes
from mpidist.transport.group.compression import reduce_scatter_between_nodes as reduce_scatter_between_nodes
from mpidist.transport.group.device_levels import DeviceLevels as DeviceLevels
from mpidist.transport.group.levels import Levels as Levels
from mpidist.transport.group.levels import NcclReach as NcclReach
from mpidist.transport.group.started_calls import Pending as Pending
from mpidist.transport.group.started_calls import Steps as Steps
from mpidist.transport.group.sync_group import SyncGroup as SyncGroup

__all__ = [
    "DeviceLevels",
    "Levels",
    "NcclReach",
    "Pending",
    "Steps",
    "SyncGroup",
    "all_reduce_between_nodes",
    "compression",
    "reduce_scatter_between_nodes",
]
