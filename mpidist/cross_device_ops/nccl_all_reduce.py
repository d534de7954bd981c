"""NCCL between the GPUs of a node."""

from __future__ import annotations

from typing import Any, final

from mpidist.cross_device_ops.cross_device_ops import CrossDeviceOps
from mpidist.cross_device_ops.reduction_to_one_device import ReductionToOneDevice
from mpidist.transport.levels import Levels
from mpidist.transport.reduction import Reduction

__all__ = ["NcclAllReduce"]


@final
class NcclAllReduce(CrossDeviceOps):
    """Use NCCL where it can be had, and `ReductionToOneDevice` for everything else.

    Host arrays always take the second way, as in tf.distribute. This version has no NCCL transport yet, so device
    arrays take it too, staged through the host. Cost of that way: that of `ReductionToOneDevice`, S bytes to the
    root and S bytes back, per rank.

    Args:
        num_packs: As in `CrossDeviceOps`.
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__(num_packs)
        self._fallback = ReductionToOneDevice()

    def _all_reduce(self, levels: Levels, buffer: Any, reduction: Reduction) -> None:
        self._fallback._all_reduce(levels, buffer, reduction)
