"""Reductions of small fused lists: every rank adds all numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np

from mpidist.collectives.plans.fused_results import FusedResults
from mpidist.collectives.plans.plan import FusedList
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
class SmallLists:
    """Reduces small lists, which share one barrier: a call is `stage`, a barrier of the node, and `add`."""

    def __init__(
        self,
        lists: Sequence[FusedList],
        results: Sequence[FusedResults],
        one_shots: Sequence[OneShot | CarriedNumbers],
    ) -> None:
        self._lists, self._results, self._one_shots = lists, results, one_shots

    def stage(self, arrays: Sequence[Any]) -> list[list[Any]]:
        """Stage all values of a call; return the argument of `add`. Local."""
        return [
            one_shot.stage([arrays[index] for index in fused.indices])
            for one_shot, fused in zip(self._one_shots, self._lists, strict=True)
        ]

    def add(self, staged: list[list[Any]], results: list[Any], are_new: bool) -> None:
        """Add the staged data of all ranks, to the results, or to new arrays if `are_new`. Local."""
        for at, (fused, made) in enumerate(zip(self._lists, self._results, strict=True)):
            keeps = fused.wire == fused.result_dtype
            total = np.empty(fused.count, fused.wire)
            fused.reduction.combine_and_divide(staged[at], total, fused.divide_by if keeps else 1)
            if not keeps:
                with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
                    total = (total / fused.divide_by).astype(fused.result_dtype, copy=False)
            if are_new and made.recycled.is_kept and not made.are_joined:
                made.set_new(made.recycled.take(), results)
            made.copy(total, results)

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
