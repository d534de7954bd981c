"""One call to whatever transport serves all ranks."""

from __future__ import annotations

from typing import Any, final

from mpidist.cross_device_ops.cross_device_ops import CrossDeviceOps
from mpidist.options import CommunicationOptions
from mpidist.transport import FusedReducer, Levels, Reduction

__all__ = ["CollectiveAllReduce"]


@final
class CollectiveAllReduce(CrossDeviceOps):
    """Leave the algorithm to the transport: one all-reduce over all ranks.

    On one node through shared memory: of S bytes, a rank copies S (P - 1) / P into it and S out of it, and adds S / P
    from P places; up to a few hundred KiB, by the machine's cost model, it copies S in and adds P S itself. Over
    several nodes, of large messages, 2 S (K - 1) / K bytes per node, the least for K nodes, as
    `HierarchicalCopyAllReduce`; of small ones `MPI_Allreduce`, whose library chooses.

    Args:
        options: The defaults of every call: `bytes_per_pack`, `reproducible` and so on.

    Raises:
        TypeError: If `options` is something else.
    """

    _compresses_between_nodes = True

    def __init__(self, options: CommunicationOptions | None = None) -> None:
        super().__init__()
        if options is not None:
            self._options = self._merge(options)

    def _all_reduce(self, levels: Levels, buffer: Any, reduction: Reduction) -> None:
        levels.world.all_reduce(buffer, reduction)

    def _fused_reducer_of(self, levels: Levels) -> FusedReducer | None:
        return levels.fused
