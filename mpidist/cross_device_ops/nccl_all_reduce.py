"""All-reduce by NCCL between the GPUs of a node."""

from __future__ import annotations

from typing import Any, final

from mpidist.cross_device_ops.cross_device_ops import CrossDeviceOps
from mpidist.cross_device_ops.hierarchical_copy_all_reduce import HierarchicalCopyAllReduce
from mpidist.cross_device_ops.reduction_to_one_device import ReductionToOneDevice
from mpidist.transport.group.levels import Levels
from mpidist.transport.reduction import Reduction

__all__ = ["NcclAllReduce"]


@final
class NcclAllReduce(CrossDeviceOps):
    """Use NCCL where it is available, and `ReductionToOneDevice` for everything else.

    Device arrays on one node are reduced by one call of NCCL, 2 S (P - 1) / P bytes per rank; on several nodes, too,
    with `implementation="nccl"`, and without it by `HierarchicalCopyAllReduce`, with NCCL within each node and the host
    between nodes. Host arrays are always reduced by `ReductionToOneDevice`, as in tf.distribute, and so are device
    arrays without NCCL, staged through the host: S bytes to the root and S bytes back, per rank.

    Args:
        num_packs: As in `CrossDeviceOps`.
    """

    _compresses_between_nodes = True

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__(num_packs)
        self._fallback = ReductionToOneDevice()
        self._by_node = HierarchicalCopyAllReduce()

    def _all_reduce(self, levels: Levels, buffer: Any, reduction: Reduction) -> None:
        if levels.is_all_nccl:
            levels.world.all_reduce(buffer, reduction)
        elif levels.queue is not None:
            self._by_node._all_reduce(levels, buffer, reduction)
        else:
            self._fallback._all_reduce(levels, buffer, reduction)
