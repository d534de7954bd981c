"""Shared memory of the ranks of a node: windows, a barrier, and reductions through them."""

from mpidist.transport.shared_memory.arena import SharedArena
from mpidist.transport.shared_memory.barrier import Barrier, NodeBarrier
from mpidist.transport.shared_memory.communicator import SharedMemoryCommunicator
from mpidist.transport.shared_memory.fused_reducer import FusedReducer, InterNode
from mpidist.transport.shared_memory.in_place import InPlace
from mpidist.transport.shared_memory.inter_node import ShardExchange
from mpidist.transport.shared_memory.one_shot import OneShot
from mpidist.transport.shared_memory.rows import all_reduce_rows, fits_into_slots
from mpidist.transport.shared_memory.schedule import Schedule
from mpidist.transport.shared_memory.staging_slots import Slots
from mpidist.transport.shared_memory.symmetric import Place, SharedArrays, places_digest
from mpidist.transport.shared_memory.two_shot import FusedArrays, TwoShot
from mpidist.transport.shared_memory.window import LINE_BYTES, SharedWindow

__all__ = [
    "LINE_BYTES",
    "Barrier",
    "InPlace",
    "InterNode",
    "ShardExchange",
    "NodeBarrier",
    "OneShot",
    "Place",
    "Schedule",
    "SharedArena",
    "SharedArrays",
    "SharedMemoryCommunicator",
    "SharedWindow",
    "Slots",
    "FusedArrays",
    "FusedReducer",
    "TwoShot",
    "all_reduce_rows",
    "fits_into_slots",
    "places_digest",
]
