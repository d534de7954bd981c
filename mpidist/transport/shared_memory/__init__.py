"""Reductions of the ranks of a node through the memory that they share."""

from mpidist.transport.shared_memory.communicator import SharedMemoryCommunicator
from mpidist.transport.shared_memory.fused_arrays import FusedArrays
from mpidist.transport.shared_memory.fused_reducer import FusedReducer, InterNode
from mpidist.transport.shared_memory.in_place import InPlace
from mpidist.transport.shared_memory.inter_node import ShardExchange
from mpidist.transport.shared_memory.one_shot import OneShot
from mpidist.transport.shared_memory.rows import all_reduce_rows, fits_into_slots
from mpidist.transport.shared_memory.schedule import Schedule
from mpidist.transport.shared_memory.two_shot import TwoShot

__all__ = [
    "InPlace",
    "InterNode",
    "ShardExchange",
    "OneShot",
    "Schedule",
    "SharedMemoryCommunicator",
    "FusedArrays",
    "FusedReducer",
    "TwoShot",
    "all_reduce_rows",
    "fits_into_slots",
]
