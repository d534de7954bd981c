"""Reductions of one array through shared memory, with all that is the same in repeated calls prepared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import numpy as np

from mpidist.collectives.arguments import Spec
from mpidist.collectives.plans.plan import FusedList
from mpidist.transport import FusedArrays, FusedReducer, InPlace, LentArrays, OneShot, RecycledResults, complete

__all__ = ["LargeArray", "OneArray", "SmallArray", "SymmetricArray"]

Array = np.ndarray[Any, Any]


class OneArray(ABC):
    """Reduces arrays of one shape and dtype. A call is `begin`, a barrier of the node, and `finish`."""

    @abstractmethod
    def begin(self, array: Array, out: Array | None) -> Any:
        """Stage a contiguous array. Local.

        Args:
            array: The array.
            out: A contiguous array for the result; `None` for a new one.

        Returns:
            The argument of `finish`.
        """

    @abstractmethod
    def finish(self, begun: Any, out: Array | None) -> Array:
        """Reduce. Collective.

        Args:
            begun: What `begin` returned.
            out: The same array as in `begin`.
        """

    def forget(self) -> None:  # noqa: B027  one subclass refers to no array
        """Drop the reference to an array that was staged, if `finish` is not called. Local."""


@final
class SmallArray(OneArray):
    """Reduces small arrays: every rank adds all numbers.

    Args:
        memory: Memory for new results.
        spec: The array.
        fused: The list that has this array alone.
        reducer: The transport.
        one_shot: The transport's reduction of such lists.
    """

    def __init__(
        self, memory: RecycledResults, spec: Spec, fused: FusedList, reducer: FusedReducer, one_shot: OneShot
    ) -> None:
        self._memory = memory if memory.is_kept else None
        self._shape, self._dtype, self._nbytes = spec.shape, fused.wire, fused.nbytes
        self._reduction, self._divide_by = fused.reduction, fused.divide_by
        self._count, self._one_shot = reducer.count, one_shot

    def begin(self, array: Array, out: Array | None) -> Any:
        return self._one_shot.stage((array,))

    def finish(self, begun: Any, out: Array | None) -> Array:
        result = out
        if result is None:
            result = np.empty(self._shape, self._dtype) if self._memory is None else self._memory.take()[0]
        self._count(self._nbytes)
        self._one_shot.add(begun, self._reduction, self._divide_by, result.reshape(-1))
        return result


@final
class LargeArray(OneArray):
    """Reduces larger arrays: every rank adds a shard.

    Args:
        memory: Memory for new results.
        fused: The list that has this array alone.
        reducer: The transport.
    """

    def __init__(self, memory: RecycledResults, fused: FusedList, reducer: FusedReducer) -> None:
        self._memory, self._nbytes, self._reducer = memory, fused.nbytes, reducer
        self._arrays = FusedArrays(fused.wire, (), result_dtype=fused.result_dtype)
        self._two_shot = reducer.two_shot(self._arrays, fused.reduction, fused.divide_by, fused.schedule, fused.half)

    def begin(self, array: Array, out: Array | None) -> Any:
        lent = self._memory.lend() if out is None else LentArrays([out])
        self._arrays.sources, self._arrays.results, self._arrays.place = (array,), tuple(lent.arrays), lent.place
        self._two_shot.begin()
        return lent.arrays[0]

    def finish(self, begun: Any, out: Array | None) -> Array:
        self._reducer.count(self._nbytes)
        steps, check_peers = self._two_shot.steps(has_passed_barrier=True), self._reducer.check_peers
        if self._two_shot.is_compiled:  # NumPy raises no errors of numbers, as it computes nothing
            complete(steps, check_peers)
        else:
            with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
                complete(steps, check_peers)
        self._two_shot.forget()
        if out is None:
            self._memory.note_use(self._two_shot.was_restaged)
        result: Array = begun
        return result

    def forget(self) -> None:
        self._two_shot.forget()


@final
class SymmetricArray(OneArray):
    """Reduces one symmetric array where it lies: every rank adds a shard for all.

    Args:
        fused: The list that has this array alone.
        reducer: The transport.
        in_place: The transport's reduction of the array.
    """

    def __init__(self, fused: FusedList, reducer: FusedReducer, in_place: InPlace) -> None:
        self._nbytes, self._reducer, self._in_place = fused.nbytes, reducer, in_place

    def begin(self, array: Array, out: Array | None) -> Any:
        return array

    def finish(self, begun: Any, out: Array | None) -> Array:
        self._reducer.count(self._nbytes)
        with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
            complete(self._in_place.steps(has_passed_barrier=True), self._reducer.check_peers)
        result: Array = begun
        return result
