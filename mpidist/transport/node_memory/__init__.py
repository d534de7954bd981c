"""Memory that the ranks of a node share: windows, and the barrier, the slots and the arrays that lie in windows."""

from mpidist.transport.node_memory.arena import SharedArena
from mpidist.transport.node_memory.barrier import Barrier, Fence, NodeBarrier, make_barrier
from mpidist.transport.node_memory.result_block import ResultBlock
from mpidist.transport.node_memory.staging_slots import Slots
from mpidist.transport.node_memory.symmetric import Place, Run, SharedArrays, places_digest
from mpidist.transport.node_memory.window import LINE_BYTES, SharedWindow

__all__ = [
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
    "make_barrier",
    "places_digest",
]
