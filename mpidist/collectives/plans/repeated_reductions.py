"""Reductions through shared memory, with all that is the same in repeated calls prepared."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, final

import numpy as np

from mpidist.collectives.arguments import Spec
from mpidist.collectives.plans.plan import FusedList
from mpidist.transport import (
    FusedArrays,
    FusedReducer,
    InPlace,
    OneShot,
    RecycledResults,
    TwoShot,
    complete,
)

__all__ = ["LargeArray", "ListInPlace", "RepeatedReduction", "SmallArray", "SymmetricArray"]

Array = np.ndarray[Any, Any]


class RepeatedReduction(ABC):
    """Reduces arrays of one shape and dtype, or lists of arrays alike in place.

    A call is `begin`, a barrier of the node, and `finish`. Where compiled code can carry out all of a call, the call is
    `run`, and `count`; what `run` leaves is done by `resume` and `finish`.

    Attributes:
        run: Carries out a call as far as no rank has to wait long: `native.WholeCall.run`. `None` if there is no such
            code.
    """

    run: Any = None

    def lend(self) -> tuple[Array, int]:
        """Return a new array for a result, and its `LentArrays.place`. Local."""
        raise NotImplementedError(f"{type(self).__name__} has no new results")

    @abstractmethod
    def begin(self, array: Array, result: Array, place: int) -> Any:
        """Stage a contiguous array. Local.

        Args:
            array: The array.
            result: A contiguous array for the result.
            place: What `lend` returned with the result; 0 for an array of the caller.

        Returns:
            The argument of `finish`.
        """

    @abstractmethod
    def finish(self, begun: Any, result: Array, is_new: bool) -> None:
        """Reduce. Collective.

        Args:
            begun: What `begin` or `resume` returned.
            result: The same array as in `begin`.
            is_new: Whether `lend` returned the array.
        """

    def resume(self, array: Array, result: Array, place: int, have_agreed: bool) -> Any:
        """Take over from `run`, which has begun a call. Local.

        Args:
            array: As in `begin`.
            result: As in `begin`.
            place: As in `begin`.
            have_agreed: Whether `run` has found that all ranks make the call.

        Returns:
            The argument of `finish`.
        """
        raise NotImplementedError(f"no compiled code begins the calls of {type(self).__name__}")

    def count(self, is_new: bool) -> None:
        """Count a call that `run` has carried out. Local.

        Args:
            is_new: As in `finish`.
        """
        raise NotImplementedError(f"no compiled code carries out the calls of {type(self).__name__}")

    def forget(self) -> None:  # noqa: B027  one subclass refers to no array
        """Drop the reference to an array that was staged, if `finish` is not called. Local."""


@final
class SmallArray(RepeatedReduction):
    """Reduces small arrays: every rank adds all numbers.

    Args:
        memory: Memory for new results.
        spec: The array.
        fused: The list that has this array alone.
        reducer: The transport.
        one_shot: The transport's reduction of such lists.
        flight: `Agreement.flight`. Where arrays have another dtype than what is sent, no call is compiled as a whole.
    """

    def __init__(
        self,
        memory: RecycledResults,
        spec: Spec,
        fused: FusedList,
        reducer: FusedReducer,
        one_shot: OneShot,
        flight: Array | None,
    ) -> None:
        self._memory = memory if memory.is_kept else None
        self._shape, self._dtype, self._nbytes = spec.shape, fused.wire, fused.nbytes
        self._reduction, self._divide_by = fused.reduction, fused.divide_by
        self._reducer, self._one_shot = reducer, one_shot
        self.run = _run_of(fused, reducer, None, flight if spec.dtype == fused.wire else None)

    def lend(self) -> tuple[Array, int]:
        return np.empty(self._shape, self._dtype) if self._memory is None else self._memory.take()[0], 0

    def begin(self, array: Array, result: Array, place: int) -> Any:
        return self._one_shot.stage((array,))

    def resume(self, array: Array, result: Array, place: int, have_agreed: bool) -> Any:
        return self._one_shot.staged

    def finish(self, begun: Any, result: Array, is_new: bool) -> None:
        self._one_shot.add(begun, self._reduction, self._divide_by, result.reshape(-1))
        self.count(is_new)

    def count(self, is_new: bool) -> None:
        self._reducer.count(self._nbytes)


class _TwoShots(RepeatedReduction):
    """Reduces larger arrays: every rank adds a shard.

    Args:
        fused: The list of the arrays.
        reducer: The transport.
        flight: `Agreement.flight`; `None` for no compiled code of whole calls.
    """

    def __init__(self, fused: FusedList, reducer: FusedReducer, flight: Array | None) -> None:
        self._nbytes, self._reducer = fused.nbytes, reducer
        self._arrays = FusedArrays(fused.wire, (), result_dtype=fused.result_dtype)
        self._two_shot = reducer.two_shot(self._arrays, fused.reduction, fused.divide_by, fused.schedule, fused.half)
        self.run = _run_of(fused, reducer, self._two_shot, flight)

    @abstractmethod
    def _set(self, array: Any, result: Any, place: int) -> None:
        """Set `_arrays`."""

    def begin(self, array: Any, result: Any, place: int) -> Any:
        self._set(array, result, place)
        self._two_shot.begin()
        return self._two_shot.steps(has_passed_barrier=True)

    def resume(self, array: Any, result: Any, place: int, have_agreed: bool) -> Any:
        self._set(array, result, place)
        return self._two_shot.resume(have_agreed)

    def finish(self, begun: Any, result: Any, is_new: bool) -> None:
        if self._two_shot.compiled is not None:  # NumPy raises no errors of numbers, as it computes nothing
            complete(begun, self._reducer.check_peers)
        else:
            with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
                complete(begun, self._reducer.check_peers)
        self._two_shot.forget()
        self._reducer.count(self._nbytes)

    def count(self, is_new: bool) -> None:
        self._reducer.count(self._nbytes)

    def forget(self) -> None:
        self._two_shot.forget()


@final
class LargeArray(_TwoShots):
    """Reduces one larger array.

    Args:
        memory: Memory for new results.
        spec: The array.
        fused: The list that has this array alone.
        reducer: The transport.
        flight: As that of `SmallArray`.
    """

    def __init__(
        self, memory: RecycledResults, spec: Spec, fused: FusedList, reducer: FusedReducer, flight: Array | None
    ) -> None:
        super().__init__(fused, reducer, flight if spec.dtype == fused.wire else None)
        self._memory, self._shape, self._dtype = memory, spec.shape, fused.wire

    def _set(self, array: Array, result: Array, place: int) -> None:
        self._arrays.sources, self._arrays.results, self._arrays.place = (array,), (result,), place

    def lend(self) -> tuple[Array, int]:
        if not self._memory.is_kept:
            return np.empty(self._shape, self._dtype), 0
        lent = self._memory.lend()
        return lent.arrays[0], lent.place

    def finish(self, begun: Any, result: Array, is_new: bool) -> None:
        super().finish(begun, result, is_new)
        if is_new:
            self._memory.note_use(self._two_shot.was_restaged)

    def count(self, is_new: bool) -> None:
        super().count(is_new)
        if is_new and self._memory.is_kept:
            self._memory.note_use(was_in_vain=False)


@final
class ListInPlace(_TwoShots):
    """Reduces the arrays of a list, all contiguous, in place. For the arguments, see `_TwoShots`."""

    def __init__(self, fused: FusedList, reducer: FusedReducer, flight: Array | None) -> None:
        super().__init__(fused, reducer, flight)
        self._in_order: Callable[[list[Array]], Any] = operator.itemgetter(*fused.indices)
        self._run_in_order = self.run
        self.run = None if self.run is None else self._run

    def _run(self, array: list[Array], result: list[Array], *numbers: int) -> int:
        arrays = self._in_order(array)
        progress: int = self._run_in_order(arrays, arrays, *numbers)
        return progress

    def _set(self, array: list[Array], result: list[Array], place: int) -> None:
        arrays = self._in_order(array)
        flat = [one.reshape(-1) for one in (arrays if type(arrays) is tuple else (arrays,))]
        self._arrays.sources, self._arrays.results, self._arrays.place = flat, flat, place


@final
class SymmetricArray(RepeatedReduction):
    """Reduces one symmetric array where it lies: every rank adds a shard for all.

    Args:
        fused: The list that has this array alone.
        reducer: The transport.
        in_place: The transport's reduction of the array.
    """

    def __init__(self, fused: FusedList, reducer: FusedReducer, in_place: InPlace) -> None:
        self._nbytes, self._reducer, self._in_place = fused.nbytes, reducer, in_place

    def begin(self, array: Array, result: Array, place: int) -> Any:
        return None

    def finish(self, begun: Any, result: Array, is_new: bool) -> None:
        self._reducer.count(self._nbytes)
        with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
            complete(self._in_place.steps(has_passed_barrier=True), self._reducer.check_peers)


def _run_of(fused: FusedList, reducer: FusedReducer, two_shot: TwoShot | None, flight: Array | None) -> Any:
    if flight is None:
        return None
    whole = reducer.whole_call(fused.reduction, fused.wire, fused.divide_by, two_shot, flight)
    return None if whole is None else whole.run
