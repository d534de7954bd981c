"""What an all-reduce algorithm writes, and what it is made with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from mpidist.collectives.plans.plan import require_num_packs
from mpidist.cross_device_ops.world_reductions import world_reduce
from mpidist.options import CommunicationOptions
from mpidist.transport.group.levels import Levels
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory.fused_reducer import FusedReducer

__all__ = ["ReduceAlgorithm"]

ReduceToRoot = Callable[[Levels, Any, Reduction, int], None]


class ReduceAlgorithm(ABC):
    """An algorithm that reduces flat buffers of all ranks. `BoundOps` calls it for the ranks of a group.

    Args:
        num_packs: Number of packs of equal size: the arrays of one dtype of a call are concatenated and cut into that
            many. 0 does not concatenate. `CommunicationOptions.bytes_per_pack` overrides it.
        reduce_to_root: Reduces a flat buffer to one rank, for calls whose destinations are not all ranks; by default
            the transport's reduce.
        is_replaceable: Whether the options `reproducible` and `RING` replace this algorithm by another one. False for
            one that adds by a rule of its own, not as `Reduction` says: it ignores `reproducible`, and refuses `RING`.

    Raises:
        TypeError: If `num_packs` is no whole number.
        ValueError: If `num_packs` is negative.
    """

    _compresses_between_nodes: ClassVar[bool] = False  # if False, compression rounds every rank's contribution

    def __init__(
        self, num_packs: int = 1, reduce_to_root: ReduceToRoot = world_reduce, is_replaceable: bool = True
    ) -> None:
        require_num_packs(type(self).__name__, num_packs)
        self._num_packs = int(num_packs)
        self._options = CommunicationOptions()
        self._reduce_to_root = reduce_to_root
        self._is_replaceable = is_replaceable

    @abstractmethod
    def _all_reduce(self, levels: Levels, buffer: Any, reduction: Reduction) -> None:
        """Leave the reduction of all ranks' buffers in every rank's buffer. The one method that an algorithm writes.

        The first phase that adds takes `reduction`, and later phases take `reduction.rest`. An algorithm that sends
        each number through `world` and `across_nodes` at most once as a contribution and once as a result may set
        `_compresses_between_nodes`: then these two communicators round numbers to half precision.

        Args:
            levels: The communicators.
            buffer: [n], flat and contiguous, of the same length and dtype on every rank.
            reduction: The elementwise operation.
        """

    def _fused_reducer_of(self, levels: Levels) -> FusedReducer | None:
        """Return the reducer of lists of arrays that may take this algorithm's place: `levels.fused`, or `None`."""
        return None

    def _require_ranks(self, size: int) -> None:  # noqa: B027  most work on any number
        """Raise a `ValueError` if the algorithm does not work on this number of ranks. Local."""

    @property
    def _configuration(self) -> tuple[Any, ...]:
        """Class and parameters, which must be equal on all ranks."""
        return type(self).__name__, self._num_packs
