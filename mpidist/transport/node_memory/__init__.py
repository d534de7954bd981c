"""Memory that the ranks of a node share: windows, and the barrier, the slots and the arrays that lie in windows."""

from mpidist.transport.node_memory.arena import SharedArena
from mpidist.transport.node_memory.barrier import Barrier, Fence, NodeBarrier
from mpidist.transport.node_memory.result_block import ResultBlock
from mpidist.transport.node_memory.staging_slots import BLOCK_BYTES, Slots
from mpidist.transport.node_memory.symmetric import Place, Run, SharedArrays, places_digest
from mpidist.transport.node_memory.window import LINE_BYTES, SharedWindow, file_system_bytes

__all__ = [
    "BLOCK_BYTES",
    "Barrier",
    "Fence",
    "LINE_BYTES",
    "NodeBarrier",
    "Place",
    "ResultBlock",
    "Run",
    "SharedArena",
    "SharedArrays",
    "SharedWindow",
    "Slots",
    "file_system_bytes",
    "places_digest",
]
