"""Reductions of one private array through shared memory, where nothing has to be looked at but the array."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import numpy as np

from mpidist.collectives.arguments import Spec
from mpidist.collectives.plans.plan import FusedList
from mpidist.transport import FusedReducer, OneShot, RecycledResults, TwoShot

__all__ = ["LargeArray", "OneArray", "SmallArray"]

Array = np.ndarray[Any, Any]


class OneArray(ABC):
    """Reduces arrays of one shape and dtype: `begin`, a barrier of the node, `finish`."""

    @abstractmethod
    def begin(self, array: Array) -> Any:
        """Stage an array. Local.

        Returns:
            The argument of `finish`; `None` if nothing was staged, as this array has another layout.
        """

    @abstractmethod
    def finish(self, begun: Any, out: Array | None) -> Array:
        """Reduce. Collective.

        Args:
            begun: What `begin` returned.
            out: A contiguous array for the result; `None` for a new one.
        """


@final
class SmallArray(OneArray):
    """Reduces small arrays: every rank adds all numbers.

    Args:
        spec: The array.
        fused: The list that has this array alone.
        reducer: The transport.
        one_shot: The transport's reduction of such lists.
    """

    def __init__(self, spec: Spec, fused: FusedList, reducer: FusedReducer, one_shot: OneShot) -> None:
        self._shape, self._dtype, self._nbytes = spec.shape, fused.wire, fused.nbytes
        self._reduction, self._divide_by = fused.reduction, fused.divide_by
        self._count, self._one_shot = reducer.count, one_shot

    def begin(self, array: Array) -> Any:
        return self._one_shot.stage((array,))

    def finish(self, begun: Any, out: Array | None) -> Array:
        result = np.empty(self._shape, self._dtype) if out is None else out
        self._count(self._nbytes)
        self._one_shot.add(begun, self._reduction, self._divide_by, result.reshape(-1))
        return result


@final
class LargeArray(OneArray):
    """Reduces larger arrays, by compiled code: every rank adds a shard.

    Args:
        memory: Memory for new results.
        nbytes: Bytes of the array.
        reducer: The transport.
        two_shot: The transport's reduction of one such array.
    """

    def __init__(self, memory: RecycledResults, nbytes: int, reducer: FusedReducer, two_shot: TwoShot) -> None:
        self._memory, self._nbytes, self._reducer, self._two_shot = memory, nbytes, reducer, two_shot

    def begin(self, array: Array) -> Any:
        return self._two_shot.begin_again(array) or None

    def finish(self, begun: Any, out: Array | None) -> Array:
        result: Array = self._memory.take()[0] if out is None else out
        self._reducer.count(self._nbytes)
        self._two_shot.finish_again(result, self._reducer.check_peers)
        return result
