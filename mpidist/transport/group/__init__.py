"""A group of ranks: its topology, communicators, agreement and end, in one object."""

from mpidist.transport.group.compression import narrow, widen
from mpidist.transport.group.device_levels import DeviceLevels
from mpidist.transport.group.levels import Levels, NcclReach
from mpidist.transport.group.messages import Message, Messages
from mpidist.transport.group.raise_together import ErrorReport, raise_reported, raise_together
from mpidist.transport.group.row_reduction import all_reduce_rows
from mpidist.transport.group.service_group import Service, ServiceGroup, meet_ranks
from mpidist.transport.group.started_calls import Pending, Steps, Workplace
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.group.thread_guard import forbid_calls_here
from mpidist.transport.group.traced import traced

__all__ = [
    "DeviceLevels",
    "ErrorReport",
    "Levels",
    "Message",
    "Messages",
    "NcclReach",
    "Pending",
    "Service",
    "ServiceGroup",
    "Steps",
    "SyncGroup",
    "Workplace",
    "all_reduce_rows",
    "forbid_calls_here",
    "meet_ranks",
    "narrow",
    "raise_reported",
    "raise_together",
    "traced",
    "widen",
]
