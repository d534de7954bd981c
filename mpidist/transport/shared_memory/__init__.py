"""Ranks of a node, and the memory that all of them reach."""

from mpidist.transport.shared_memory.barrier import NodeBarrier as NodeBarrier
from mpidist.transport.shared_memory.communicator import SharedMemoryCommunicator as SharedMemoryCommunicator
from mpidist.transport.shared_memory.fused_reducer import Across as Across
from mpidist.transport.shared_memory.fused_reducer import StreamReducer as StreamReducer
from mpidist.transport.shared_memory.in_place import InPlace as InPlace
from mpidist.transport.shared_memory.inter_node import LaneExchange as LaneExchange
from mpidist.transport.shared_memory.schedule import Schedule as Schedule
from mpidist.transport.shared_memory.staging_slots import Slots as Slots
from mpidist.transport.shared_memory.symmetric import Place as Place
from mpidist.transport.shared_memory.symmetric import SharedArrays as SharedArrays
from mpidist.transport.shared_memory.symmetric import word_of as word_of
from mpidist.transport.shared_memory.two_shot import Stream as Stream
from mpidist.transport.shared_memory.two_shot import Transfer as Transfer
from mpidist.transport.shared_memory.window import SharedWindow as SharedWindow

__all__ = [
    "Across",
    "InPlace",
    "LaneExchange",
    "NodeBarrier",
    "Place",
    "Schedule",
    "SharedArrays",
    "SharedMemoryCommunicator",
    "SharedWindow",
    "Slots",
    "Stream",
    "StreamReducer",
    "Transfer",
    "word_of",
]
