"""One all-reduce of the transport over all ranks."""

from __future__ import annotations

from typing import Any, final

from mpidist.collectives.arguments.signature import require_usable
from mpidist.cross_device_ops.cross_device_ops import CrossDeviceOps
from mpidist.options import CommunicationOptions
from mpidist.package_names import explain_absent_arguments
from mpidist.transport.group.levels import Levels
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory.fused_reducer import FusedReducer

__all__ = ["CollectiveAllReduce"]


@final
class CollectiveAllReduce(CrossDeviceOps):
    """Leave the algorithm to the transport: one all-reduce over all ranks.

    On one node of P ranks, through shared memory: of S bytes, a rank copies S (P - 1) / P in and S out, and adds its
    shard of S / P bytes from P buffers (two-shot). Up to a size that the machine's cost model gives, a few hundred KiB,
    a rank copies S in and adds all P S bytes itself (one-shot). On K nodes large messages take 2 S (K - 1) / K bytes
    per node, the least possible, as `HierarchicalCopyAllReduce`; small messages are an `MPI_Allreduce`.

    Args:
        options: The defaults of every call: `bytes_per_pack`, `reproducible` and so on.

    Raises:
        TypeError: If `options` is no `CommunicationOptions`.
        UnavailableError: If it asks for NCCL, and CuPy or NCCL is missing.
    """

    _compresses_between_nodes = True

    @explain_absent_arguments
    def __init__(self, options: CommunicationOptions | None = None) -> None:
        super().__init__()
        if options is not None:
            self._options = CommunicationOptions().merge(options)
            require_usable(options)

    def _all_reduce(self, levels: Levels, buffer: Any, reduction: Reduction) -> None:
        levels.world.all_reduce(buffer, reduction)

    def _fused_reducer_of(self, levels: Levels) -> FusedReducer | None:
        return levels.fused
