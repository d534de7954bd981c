"""A group of ranks, put together: topology, communicators, agreement, end."""

from mpidist.transport.group.compression import narrow as narrow
from mpidist.transport.group.compression import widen as widen
from mpidist.transport.group.device_levels import DeviceLevels as DeviceLevels
from mpidist.transport.group.levels import Levels as Levels
from mpidist.transport.group.levels import NcclReach as NcclReach
from mpidist.transport.group.raise_together import ErrorReport as ErrorReport
from mpidist.transport.group.raise_together import raise_reported as raise_reported
from mpidist.transport.group.raise_together import raise_together as raise_together
from mpidist.transport.group.started_calls import Pending as Pending
from mpidist.transport.group.started_calls import Steps as Steps
from mpidist.transport.group.sync_group import SyncGroup as SyncGroup

__all__ = [
    "DeviceLevels",
    "ErrorReport",
    "Levels",
    "NcclReach",
    "Pending",
    "Steps",
    "SyncGroup",
    "narrow",
    "raise_reported",
    "raise_together",
    "widen",
]
