"""Reductions of small fused lists: every rank adds all numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np

from mpidist.collectives.arguments.operands import Spec
from mpidist.collectives.plans.fused_results import FusedResults
from mpidist.collectives.plans.plan import FusedList
from mpidist.collectives.plans.repeated_reductions import RepeatedReduction
from mpidist.transport.agreement.comparison_rounds import CarriedNumbers
from mpidist.transport.shared_memory.fused_reducer import FusedReducer
from mpidist.transport.shared_memory.one_shot import OneShot

__all__ = ["SYMMETRIC_BYTES", "SmallLists"]

# Compiled two-shot all-reduces are faster than one-shot ones from these bytes on: all of a call is compiled. That of a
# list always is, but where numbers of several dtypes share a barrier. A rank of a one-shot call reads all arrays.
_COMPILED_BYTES_OF_ALL_RANKS: Final = 16 << 10
_COMPILED_DTYPES_BYTES: Final = 32 << 10
SYMMETRIC_BYTES: Final = 192 << 10  # below, compiled code reduces a single symmetric array as it reduces private ones
_ALIGNMENT: Final = 64  # bytes: of lists in a slot


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
