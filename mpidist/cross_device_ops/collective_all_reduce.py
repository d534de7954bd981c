"""One call to whatever transport serves all ranks."""

from __future__ import annotations

from typing import Any, final

from mpidist.cross_device_ops.cross_device_ops import CrossDeviceOps
from mpidist.options import CommunicationOptions
from mpidist.transport.levels import Levels
from mpidist.transport.reduction import Reduction
from mpidist.transport.streams import StreamReducer

__all__ = ["CollectiveAllReduce"]


@final
class CollectiveAllReduce(CrossDeviceOps):
    """Leave the algorithm to the transport: one all-reduce over all ranks, 2 S (P - 1) / P bytes per rank.

    Over MPI that is `MPI_Allreduce`, whose library chooses by size and, some of them, by node.

    Args:
        options: The defaults of every call: `bytes_per_pack`, `reproducible` and so on.

    Raises:
        TypeError: If `options` is something else.
    """

    def __init__(self, options: CommunicationOptions | None = None) -> None:
        super().__init__()
        if options is not None:
            self._options = self._merge(options)

    def _all_reduce(self, levels: Levels, buffer: Any, reduction: Reduction) -> None:
        levels.world.all_reduce(buffer, reduction)

    def _streams_of(self, levels: Levels) -> StreamReducer | None:
        return levels.streams
