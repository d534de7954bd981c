"""Interface of an all-reduce algorithm to plans: the part of `CrossDeviceOps` that they may import."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from mpidist.options import CommunicationOptions
from mpidist.transport.group.levels import Levels
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory.fused_reducer import FusedReducer
from mpidist.whole_number import whole_number

__all__ = ["Reduce", "ReduceAlgorithm", "ReduceToRoot", "world_reduce"]

Reduce = Callable[[Levels, Any, Reduction], None]  # reduces a flat buffer [n] over all ranks, in place
ReduceToRoot = Callable[[Levels, Any, Reduction, int], None]  # the same to one rank


def world_reduce(levels: Levels, buffer: Any, reduction: Reduction, root: int) -> None:
    """Leave the reduction of all ranks' buffers in the root's buffer. S bytes per rank."""
    levels.world.reduce(buffer, reduction, root)


class ReduceAlgorithm(ABC):
    """An algorithm that reduces flat buffers of all ranks. Arguments are those of `CrossDeviceOps`."""

    # Here too, so that a subclass whose own `__init__` does not call this one works.
    _num_packs: int = 1
    _options: CommunicationOptions = CommunicationOptions()
    _reduce_to_root: ReduceToRoot = staticmethod(world_reduce)
    _is_replaceable: bool = True
    _compresses_between_nodes: ClassVar[bool] = False  # if False, compression rounds every rank's contribution

    def __init__(
        self, num_packs: int = 1, reduce_to_root: ReduceToRoot = world_reduce, is_replaceable: bool = True
    ) -> None:
        self._num_packs = whole_number(f"num_packs of {type(self).__name__}", num_packs, 0)
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
