"""Ranks of a node, and the memory that all of them reach."""

from mpidist.transport.shared_memory.barrier import NodeBarrier as NodeBarrier
from mpidist.transport.shared_memory.communicator import SharedMemoryCommunicator as SharedMemoryCommunicator
from mpidist.transport.shared_memory.fused_reducer import Across as Across
from mpidist.transport.shared_memory.fused_reducer import FusedReducer as FusedReducer
from mpidist.transport.shared_memory.in_place import InPlace as InPlace
from mpidist.transport.shared_memory.inter_node import ShardExchange as ShardExchange
from mpidist.transport.shared_memory.schedule import Schedule as Schedule
from mpidist.transport.shared_memory.staging_slots import Slots as Slots
from mpidist.transport.shared_memory.symmetric import Place as Place
from mpidist.transport.shared_memory.symmetric import SharedArrays as SharedArrays
from mpidist.transport.shared_memory.symmetric import placement_digest as placement_digest
from mpidist.transport.shared_memory.two_shot import FusedArrays as FusedArrays
from mpidist.transport.shared_memory.two_shot import TwoShot as TwoShot
from mpidist.transport.shared_memory.window import SharedWindow as SharedWindow

__all__ = [
    "Across",
    "InPlace",
    "ShardExchange",
    "NodeBarrier",
    "Place",
    "Schedule",
    "SharedArrays",
    "SharedMemoryCommunicator",
    "SharedWindow",
    "Slots",
    "FusedArrays",
    "FusedReducer",
    "TwoShot",
    "placement_digest",
]
