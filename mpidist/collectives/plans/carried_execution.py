"""Reductions of some numbers over several nodes: the comparison of the call carries them, and every rank adds all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np

from mpidist.collectives.arguments.operands import Spec
from mpidist.collectives.plans.call import Execution, ReductionCall
from mpidist.collectives.plans.fused_results import FusedResults
from mpidist.collectives.plans.plan import FusedList
from mpidist.collectives.plans.small_lists import SmallLists
from mpidist.transport.agreement.comparison_rounds import CarriedNumbers, CarryingRounds, carried_bytes
from mpidist.transport.communicator import Traffic
from mpidist.transport.group.started_calls import Pending, Steps
from mpidist.transport.host_memory.result_memory import ResultMemory

__all__ = ["CarriedExecution"]

_ALIGNMENT: Final = 16  # bytes, for numbers of all dtypes
_MOST_ARRAYS_AHEAD: Final = 4  # of a call that joins ahead: each is compared with the outs of all calls under way


@final
class CarriedExecution(Execution):
    """Reduces lists of a few numbers, which the rounds of comparison carry to all ranks."""

    def __init__(
        self,
        rounds: CarryingRounds,
        lists: Sequence[FusedList],
        specs: Sequence[Spec],
        results: Sequence[np.dtype[Any]],
        memory: ResultMemory,
        traffic: Traffic,
    ) -> None:
        self.can_join_ahead = len(specs) <= _MOST_ARRAYS_AHEAD
        made = [FusedResults(fused, specs, memory, None) for fused in lists]
        starts = SmallLists.starts_of(lists, _ALIGNMENT)[0]
        carried = [CarriedNumbers(rounds, its.count, its.wire, at) for its, at in zip(lists, starts, strict=True)]
        nbytes = sum(fused.nbytes for fused in lists) * (rounds.received.shape[1] - 1)
        self._small = SmallLists(lists, made, carried, specs, results, traffic.sums_of("compare"), nbytes)

    @staticmethod
    def can_carry(lists: Sequence[FusedList], ranks: int) -> bool:
        """Whether a round of comparison of so many ranks carries these lists."""
        return SmallLists.starts_of(lists, _ALIGNMENT)[1] <= carried_bytes(ranks)

    def begin(self, call: ReductionCall) -> None:
        call.state = self._small.begin(call.operands.arrays, None, 0)

    def finish(self, call: ReductionCall, has_same_places: bool) -> list[Any]:
        results, _ = self._small.lend()
        self._small.finish(call.state, results)
        self._small.close(results, is_new=True)
        return results

    def steps(self, call: ReductionCall, pending: Pending, has_same_places: bool) -> Steps:
        yield from ()
        return self.finish(call, has_same_places)
