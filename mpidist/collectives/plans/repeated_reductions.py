"""Reductions through shared memory, with all that is the same in repeated calls prepared."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, cast, final

import numpy as np

from mpidist.collectives.arguments.operands import NO_OPERANDS, Spec
from mpidist.collectives.plans.call import Execution, ReductionCall
from mpidist.collectives.plans.fused_results import FusedResults
from mpidist.collectives.plans.plan import FusedList
from mpidist.transport.agreement.comparison_rounds import CarriedNumbers
from mpidist.transport.group.started_calls import Steps
from mpidist.transport.host_memory.result_memory import LentArrays, RecycledResults
from mpidist.transport.native.loading import native
from mpidist.transport.shared_memory.fused_reducer import FusedReducer, OneShot
from mpidist.transport.shared_memory.in_place import InPlace
from mpidist.transport.shared_memory.two_shot import FusedArrays
from mpidist.transport.waiting import complete

__all__ = [
    "LargeArray",
    "Lists",
    "ListsOfDtypes",
    "RepeatedReduction",
    "SYMMETRIC_BYTES",
    "SmallArray",
    "SmallLists",
    "SymmetricInPlace",
]

Array = np.ndarray[Any, Any]

# Compiled two-shot all-reduces are faster than one-shot ones from these bytes on: all of a call is compiled. That of a
# list always is, but where numbers of several dtypes share a barrier. A rank of a one-shot call reads all arrays.
_COMPILED_BYTES_OF_ALL_RANKS: Final = 16 << 10
_COMPILED_DTYPES_BYTES: Final = 32 << 10
SYMMETRIC_BYTES: Final = 192 << 10  # below, compiled code reduces a single symmetric array as it reduces private ones
_ALIGNMENT: Final = 64  # bytes: of lists in a slot


class RepeatedReduction(ABC):
    """Reduces arrays of one shape and dtype, or lists of such arrays.

    A call is `begin`, a barrier of the node, `finish` and `close`. Where compiled code can carry out all of a call, the
    call is `run` (`native.WholeCall.run`, or else `None`) and `close`; what `run` leaves is done by `resume` and
    `finish`.
    """

    run: Any = None
    _sums: list[int]  # the calls and bytes of the traffic, as `FusedReducer.count` adds them
    _num_lists = 1  # that a call adds to them
    _nbytes: int
    _forms: list[tuple[tuple[int, ...], np.dtype[Any]]]  # of a list of arrays

    def fits(self, arrays: list[Any], need_own_data: bool = False) -> bool:
        """Whether a list of the right length has such arrays: NumPy's, contiguous, of the right shapes and dtypes.

        `need_own_data`: views do not fit, which may be views of a result, that is written early.
        """
        return bool(native.have_forms(arrays, self._forms, need_own_data, False))

    def lend(self) -> tuple[Any, int]:
        """Return where a new result is written, and its `LentArrays.place`. Local."""
        raise NotImplementedError(f"{type(self).__name__} has no new results")

    @abstractmethod
    def begin(self, value: Any, result: Any, place: int) -> Any:
        """Stage an array, or a list, all contiguous; return the argument of `finish`. Local.

        `result` and `place` are what `lend` has returned, or what takes the result, and 0.
        """

    @abstractmethod
    def finish(self, begun: Any, result: Any) -> None:
        """Reduce what `begin` or `resume` returned. Collective."""

    def steps(self, begun: Any, result: Any) -> Steps:
        """Reduce as `finish` does, in the steps of a started call."""
        self.finish(begun, result)
        yield from ()

    def resume(self, value: Any, result: Any, place: int, have_agreed: bool) -> Any:
        """Take over from `run`, which has begun a call; return the argument of `finish`. Local.

        `have_agreed`: `run` has found that all ranks make the call.
        """
        raise NotImplementedError(f"no compiled code begins the calls of {type(self).__name__}")

    def close(self, result: Any, is_new: bool) -> Any:
        """Count a call that is done, and return its result to the program; `is_new` if `lend` returned it. Local."""
        self._sums[0] += self._num_lists
        self._sums[1] += self._nbytes
        return result

    def forget(self) -> None:  # noqa: B027  one subclass refers to no array
        """Drop the reference to an array that was staged, if `finish` is not called. Local."""


@final
class SmallArray(RepeatedReduction):
    """Reduces small arrays: every rank adds all numbers.

    Where arrays have another dtype than the messages, no whole call is compiled.
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
        self._shape, self._dtype = spec.shape, fused.wire
        self._sums, self._nbytes = reducer.traffic.sums_of("all_reduce"), reducer.link_bytes(fused.nbytes)
        self._reduction, self._divide_by = fused.reduction, fused.divide_by
        self._one_shot = one_shot
        self._whole = reducer.whole_call(
            fused.reduction, fused.wire, fused.divide_by, None, flight if spec.dtype == fused.wire else None
        )
        self.run = None if self._whole is None else self._whole.run

    def lend(self) -> tuple[Array, int]:
        return np.empty(self._shape, self._dtype) if self._memory is None else self._memory.take()[0], 0

    def begin(self, value: Array, result: Array, place: int) -> Any:
        return self._one_shot.stage((value,))

    def resume(self, value: Array, result: Array, place: int, have_agreed: bool) -> Any:
        return self._one_shot.staged_for(self._whole.staged_for)

    def finish(self, begun: Any, result: Array) -> None:
        self._reduction.combine_and_divide(begun, result.reshape(-1), self._divide_by)


@final
class SmallLists(RepeatedReduction):
    """Reduces small lists, of several dtypes and of any layout, which share one barrier. Refers to no array.

    Args:
        dtypes: Those of the results of arrays of the forms `specs`.
        sums: Calls and bytes of the traffic, to which a call adds one for each list, and `nbytes`.
        is_wanted: Whether this rank takes the results.
    """

    def __init__(
        self,
        lists: Sequence[FusedList],
        results: Sequence[FusedResults],
        one_shots: Sequence[OneShot | CarriedNumbers],
        specs: Sequence[Spec],
        dtypes: Sequence[np.dtype[Any]],
        sums: list[int],
        nbytes: int,
        is_wanted: bool = True,
    ) -> None:
        self._lists, self._one_shots, self._sums, self._nbytes = lists, one_shots, sums, nbytes
        self._num_lists = len(lists)
        self._results = [(made, made.recycled.is_kept and not made.are_joined) for made in results if is_wanted]
        self._forms = [(spec.shape, spec.dtype) for spec in specs]
        each = enumerate(zip(specs, dtypes, strict=True))
        self._empty = [(at, spec.shape, dtype) for at, (spec, dtype) in each if is_wanted and not spec.num_elements]

    def lend(self) -> tuple[list[Any], int]:
        results: list[Any] = [None] * len(self._forms)
        for at, shape, dtype in self._empty:
            results[at] = np.empty(shape, dtype)
        return results, 0

    def begin(self, value: Sequence[Any], result: Any, place: int) -> list[list[Any]]:
        staged = []
        for one_shot, fused in zip(self._one_shots, self._lists, strict=True):
            staged.append(one_shot.stage([*map(value.__getitem__, fused.indices)]))
        return staged

    def finish(self, begun: list[list[Any]], result: list[Any]) -> None:
        for fused, (made, is_kept), parts in zip(self._lists, self._results, begun, strict=False):
            keeps, first = fused.wire == fused.result_dtype, fused.indices[0]
            if is_kept and result[first] is None:
                made.set_new(made.recycled.take(), result)
            into = result[first] if keeps and len(fused.indices) == 1 else None
            total = np.empty(fused.count, fused.wire) if into is None else into.reshape(-1)
            fused.reduction.combine_and_divide(parts, total, fused.divide_by if keeps else 1)
            if not keeps:
                with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
                    total = (total / fused.divide_by).astype(fused.result_dtype, copy=False)
            if into is None:
                made.copy(total, result)

    @staticmethod
    def starts_of(lists: Sequence[FusedList], alignment: int) -> tuple[list[int], int]:
        """Return where lists begin that lie together, and where they end, in bytes."""
        starts, end = [], 0
        for fused in lists:
            starts.append(-(-end // alignment) * alignment)
            end = starts[-1] + fused.nbytes
        return starts, end

    @staticmethod
    def one_shots_for(reducer: FusedReducer, lists: Sequence[FusedList], is_compiled: bool) -> list[OneShot]:
        """Make the all-reduces of lists that are small together; none of larger ones. Equal on all ranks.

        `is_compiled`: all ranks reduce larger lists by compiled code.
        """
        starts, end = SmallLists.starts_of(lists, _ALIGNMENT)
        is_one_array = len(lists) == len(lists[0].indices) == 1 if lists else False
        most = 0 if len(lists) == 1 else _COMPILED_DTYPES_BYTES
        if is_one_array:
            most = _COMPILED_BYTES_OF_ALL_RANKS // reducer.lanes
        if not reducer.is_small(end) or (end >= most and is_compiled):
            return []
        return [reducer.one_shot(fused.count, fused.wire, start) for fused, start in zip(lists, starts, strict=True)]


class _TwoShots(RepeatedReduction):
    """Reduces larger arrays: every rank adds a shard. Without a `flight`, no call is compiled as a whole.

    `is_per_node`: the results are per-node arrays, those of all ranks of the node.
    """

    def __init__(
        self, fused: FusedList, reducer: FusedReducer, flight: Array | None, is_per_node: bool = False
    ) -> None:
        self._reducer = reducer
        self._sums, self._nbytes = reducer.traffic.sums_of("all_reduce"), reducer.link_bytes(fused.nbytes)
        shared = ((),) if is_per_node else None  # one place, whose arrays are set in each call
        self._arrays = FusedArrays(fused.wire, (), shared=shared, result_dtype=fused.result_dtype)
        self._two_shot = reducer.two_shot(self._arrays, fused.reduction, fused.divide_by, fused.schedule, fused.half)
        self._was_restaged = False  # in the call that is to be closed: `TwoShot.was_restaged`
        whole = reducer.whole_call(fused.reduction, fused.wire, fused.divide_by, self._two_shot, flight)
        self._run_whole: Any = None if whole is None else whole.run

    @abstractmethod
    def _set(self, value: Any, result: Any, place: int) -> None:
        """Set `_arrays`."""

    def begin(self, value: Any, result: Any, place: int) -> Any:
        self._set(value, result, place)
        self._two_shot.begin()
        return self._two_shot.steps(has_passed_barrier=True)

    def resume(self, value: Any, result: Any, place: int, have_agreed: bool) -> Any:
        self._set(value, result, place)
        return self._two_shot.resume(have_agreed)

    def finish(self, begun: Any, result: Any) -> None:
        if self._two_shot.compiled is not None:  # NumPy raises no errors of numbers, as it computes nothing
            complete(begun, self._reducer.check_peers)
        else:
            with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
                complete(begun, self._reducer.check_peers)
        self._settle()

    def steps(self, begun: Any, result: Any) -> Steps:
        yield from begun
        self._settle()

    def _settle(self) -> None:
        self._two_shot.forget()
        self._was_restaged = self._two_shot.was_restaged

    def forget(self) -> None:
        self._two_shot.forget()

    def _note_use(self, memory: RecycledResults) -> None:
        if memory.is_kept:
            memory.note_use(self._was_restaged)
            self._was_restaged = False


@final
class LargeArray(_TwoShots):
    """Reduces one larger array."""

    def __init__(
        self, memory: RecycledResults, spec: Spec, fused: FusedList, reducer: FusedReducer, flight: Array | None
    ) -> None:
        super().__init__(fused, reducer, flight if spec.dtype == fused.wire else None)
        self.run = self._run_whole
        self._memory, self._shape, self._dtype = memory, spec.shape, fused.wire

    def lend(self) -> tuple[Array, int]:
        if not self._memory.is_kept:
            return np.empty(self._shape, self._dtype), 0
        lent = self._memory.lend()
        return lent.arrays[0], lent.place

    def close(self, result: Array, is_new: bool) -> Array:
        if is_new:
            self._note_use(self._memory)
        return cast("Array", super().close(result, is_new))

    def _set(self, value: Array, result: Array, place: int) -> None:
        self._arrays.sources, self._arrays.results, self._arrays.place = (value,), (result,), place


@final
class Lists(_TwoShots):
    """Reduces lists of contiguous private arrays, in compiled code: into new arrays, in place, or into others."""

    def __init__(
        self,
        made: FusedResults,
        specs: Sequence[Spec],
        fused: FusedList,
        reducer: FusedReducer,
        flight: Array | None,
        is_per_node: bool,
    ) -> None:
        super().__init__(fused, reducer, flight, is_per_node)
        self._made = made
        self._forms = [(spec.shape, spec.dtype) for spec in specs]
        self._in_order: Callable[[list[Array]], Any] = operator.itemgetter(*fused.indices)

    @property
    def is_compiled(self) -> bool:
        """Whether there is compiled code for whole calls. Without, nothing here works."""
        return self._run_whole is not None

    def can_write(self, values: list[Array], outs: list[Any]) -> bool:
        """Whether outs take the results of values that fit, and each of all these arrays has memory of its own."""
        are_apart = len({*map(id, values), *map(id, outs)}) == 2 * len(values)
        return are_apart and bool(native.have_forms(outs, self._forms, True, True))

    def lend(self) -> tuple[LentArrays, int]:
        lent = self._made.recycled.lend()
        return lent, lent.place

    def run(self, value: list[Array], result: Any, *numbers: int) -> int:
        """Call `native.WholeCall.run` with the arrays in the order of sending, which new ones have."""
        arrays = self._in_order(value)
        if isinstance(result, LentArrays):
            results = result.arrays
        else:
            results = arrays if result is value else self._in_order(result)
        progress: int = self._run_whole(arrays, results, *numbers)
        return progress

    def close(self, result: Any, is_new: bool) -> Any:
        self._sums[0] += 1
        self._sums[1] += self._nbytes
        if not is_new:
            return result
        results: list[Any] = [None] * len(self._forms)
        self._made.set_new(self._made.recycled.finalize(result), results)
        self._note_use(self._made.recycled)
        return results

    def _set(self, value: list[Array], result: Any, place: int) -> None:
        self._arrays.sources = results = self._flat(self._in_order(value))
        if result is not value:
            results = self._flat(result.arrays if isinstance(result, LentArrays) else self._in_order(result))
        if self._arrays.shared is None:
            self._arrays.results = results
        else:
            self._arrays.shared = [results]
        self._arrays.place = place

    def _flat(self, arrays: Any) -> list[Array]:
        return [one.reshape(-1) for one in arrays] if isinstance(arrays, (list, tuple)) else [arrays.reshape(-1)]


@final
class SymmetricInPlace(RepeatedReduction):
    """Reduces symmetric arrays where they lie: every rank adds a shard for all."""

    def __init__(self, fused: FusedList, reducer: FusedReducer, in_place: InPlace) -> None:
        self._reducer, self._in_place = reducer, in_place
        self._sums, self._nbytes = reducer.traffic.sums_of("all_reduce"), reducer.link_bytes(fused.nbytes)

    def begin(self, value: Any, result: Any, place: int) -> Any:
        return None

    def finish(self, begun: Any, result: Any) -> None:
        with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
            complete(self._in_place.steps(has_passed_barrier=True), self._reducer.check_peers)


@final
class ListsOfDtypes(RepeatedReduction):
    """Reduces lists of contiguous private arrays of several dtypes, as their execution does.

    `call`: a call of such a list, into new arrays or in place, that is done.
    """

    def __init__(self, execution: Execution, call: ReductionCall) -> None:
        self._execution = execution
        self._forms = [(spec.shape, spec.dtype) for spec in call.plan.specs]
        self._call = ReductionCall(call.name, call.op, call.options, (), call.structure)
        self._call.checked_outs = call.checked_outs

    def lend(self) -> tuple[list[Array], int]:
        return [], 0  # `finish` makes the arrays

    def begin(self, value: list[Array], result: list[Array], place: int) -> ReductionCall:
        call = self._call
        call.operands, call.outs = NO_OPERANDS.with_arrays(value), result or None
        self._execution.begin(call)
        return call

    def finish(self, begun: ReductionCall, result: list[Array]) -> None:
        result[:] = self._execution.finish(begun, has_same_places=True)
        self.forget()

    def close(self, result: list[Array], is_new: bool) -> list[Array]:
        return result  # which the execution has counted

    def forget(self) -> None:
        self._call.operands, self._call.outs, self._call.state = NO_OPERANDS, None, None
