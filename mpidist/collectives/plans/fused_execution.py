"""Reductions of fused arrays: through shared memory, or some numbers of several nodes by the comparison of the call.

In shared memory they are staged, added and copied out, or added in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import is_
from typing import Any, Final, final

import numpy as np

from mpidist.collectives.arguments.operands import Spec
from mpidist.collectives.arguments.out_arrays import copy_overwritten, target_arrays
from mpidist.collectives.plans.call import Execution, ReductionCall
from mpidist.collectives.plans.fused_results import FusedResults
from mpidist.collectives.plans.places import NOWHERE, PRIVATE, KnownPlaces, Places
from mpidist.collectives.plans.plan import FusedList
from mpidist.collectives.plans.repeated_reductions import (
    SYMMETRIC_BYTES,
    LargeArray,
    Lists,
    ListsOfDtypes,
    RepeatedReduction,
    SmallArray,
    SmallLists,
    SymmetricInPlace,
)
from mpidist.transport.agreement.comparison_rounds import CarriedNumbers, CarryingRounds, carried_bytes
from mpidist.transport.communicator import Traffic
from mpidist.transport.group.started_calls import Pending, Steps
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.host_memory.result_memory import LentArrays, ResultMemory
from mpidist.transport.node_memory.symmetric import Place
from mpidist.transport.shared_memory.fused_reducer import FusedReducer
from mpidist.transport.shared_memory.in_place import InPlace
from mpidist.transport.shared_memory.two_shot import FusedArrays, TwoShot
from mpidist.transport.waiting import complete

__all__ = ["CarriedExecution", "FusedExecution"]

_ALIGNMENT: Final = 16  # of lists in a round of comparison: for numbers of all dtypes
_MOST_ARRAYS_AHEAD: Final = 4  # of a call that joins ahead: each is compared with the outs of all calls under way

_Transfers = list[tuple[TwoShot | InPlace, bool]]  # [lists], each with `has_passed_barrier`


@final
class FusedExecution(Execution):
    """Carries out the calls of one plan through shared memory, with one list of fused arrays for each dtype.

    Attributes:
        private_variants: `CallRecord.variant` of calls of private arrays which compiled code reduces, before the
            strategy allocates shared memory, and from then on.
    """

    def __init__(
        self,
        group: SyncGroup,
        reducer: FusedReducer,
        lists: Sequence[FusedList],
        specs: Sequence[Spec],
        results: Sequence[np.dtype[Any]],
        destinations: tuple[tuple[int, ...], ...] | None,
    ) -> None:
        self._reducer, self._lists, self._shared = reducer, lists, group.shared
        self._specs, self._results = specs, results
        self._wants_results = destinations is None or any(group.topology.rank in ranks for ranks in destinations)
        self._agreement_is_barrier = group.agreement.is_node_barrier  # it also synchronises the ranks of the node
        arenas = [reducer.result_arena(fused.reduction, fused.wire, fused.result_dtype) for fused in lists]
        self._is_compiled = None not in arenas  # on all ranks
        one_shots = SmallLists.one_shots_for(reducer, lists, self._is_compiled)
        shares = destinations is None and not one_shots  # results with other ranks, which have such ones, too
        self._made = [
            FusedResults(fused, specs, group.result_memory, arena if shares else None, self._wants_results)
            for fused, arena in zip(lists, arenas, strict=True)
        ]
        self._small, self._one_shots = None, one_shots
        if one_shots:
            sums, nbytes = reducer.traffic.sums_of("all_reduce"), sum(reducer.link_bytes(its.nbytes) for its in lists)
            given = lists, self._made, one_shots, specs, results, sums, nbytes, self._wants_results
            self._small = SmallLists(*given)
        # [lists] of private arrays, from the calls before; taken while a call uses it, and gone if the call fails.
        self._idle: list[TwoShot | None] = [None] * len(lists)
        self._repeated_lists: dict[bool, Lists] = {}  # by whether results are per-node arrays
        self._empty = [index for index, spec in enumerate(specs) if not spec.num_elements]
        # A single small array is copied faster, by code that is compiled as a whole, than it is added in place.
        is_copied = self._is_compiled and max((fused.nbytes for fused in lists), default=0) < SYMMETRIC_BYTES
        self._ignores_places = len(specs) == 1 and (is_copied or self._small is not None)
        self.private_variants = NOWHERE.digest, (NOWHERE if self._ignores_places else PRIVATE).digest
        self._is_one_array = len(specs) == len(lists) == 1 and lists[0].wire == lists[0].result_dtype

    @cached_property
    def _known(self) -> KnownPlaces:
        return KnownPlaces(self._shared, self._is_compiled)

    def begin(self, call: ReductionCall) -> None:
        """Allocate new results, and stage the first chunk unless the arrays lie in shared memory."""
        checked, places = call.checked_outs, NOWHERE
        staged: Any = None
        new: list[LentArrays] = []
        if call.outs is None and self._small is None:
            new = [made.recycled.lend() for made in self._made]
        is_per_node = checked is not None and checked.per_node_digest != 0
        if self._shared.num_windows and (is_per_node or not self._ignores_places):
            places = self._known.find(call.operands.arrays, call.outs, checked)
            call.variant = places.digest
        writes_outs = self._writes_outs(places)
        can_stage = self._agreement_is_barrier and places.sources is None
        if can_stage and writes_outs and len(self._lists) == 1:  # copies are made before any rank writes
            arrays = copy_overwritten(call.operands.arrays, call.outs or (), are_shared=True)
            staged = self._shared_transfer(0, arrays, None, places)
            staged.begin()
        elif can_stage and self._lists and not writes_outs:
            if self._small is not None:
                staged = self._small.begin(call.operands.arrays, None, 0)
            else:
                staged = self._take(0, call.operands.arrays)
                if new:
                    staged.arrays.results = self._lists[0].flat_results(new[0].arrays)
                    staged.arrays.place = new[0].place
                staged.begin()
        call.state = places, staged, new

    def finish(self, call: ReductionCall, has_same_places: bool) -> list[Any]:
        places, staged, new = call.state if has_same_places else (NOWHERE, None, [])
        if self._small is not None and not self._writes_outs(places):
            return self._add_small(self._small, call, staged)
        with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
            results: list[Any] = complete(self._steps(call, places, staged, new), self._reducer.check_peers)
        return results

    def steps(self, call: ReductionCall, pending: Pending, has_same_places: bool) -> Steps:
        places, staged, new = call.state if has_same_places else (NOWHERE, None, [])
        if self._small is not None and not self._writes_outs(places):
            return self._add_small(self._small, call, staged)
        return (yield from self._steps(call, places, staged, new))

    def _steps(self, call: ReductionCall, places: Places, staged: Any, lent: list[LentArrays]) -> Steps:
        results, new, transfers = self._transfers(call, places, staged, lent)
        for transfer, is_staged in transfers:
            yield from transfer.steps(is_staged)
        for made, own, (transfer, _) in zip(self._made, new, transfers, strict=False):
            made.set_new(made.recycled.finalize(own), results)
            made.recycled.note_use(isinstance(transfer, TwoShot) and transfer.was_restaged)
        self._put_back(transfers)
        return results

    def of_one_array(self, flight: Any) -> RepeatedReduction | None:
        """Return what reduces one private array again and again; `None` where these calls need more than that."""
        if not (self._is_one_array and self._agreement_is_barrier):
            return None
        fused, spec = self._lists[0], self._specs[0]
        if self._small is not None:
            one_shot = self._one_shots[0]
            return SmallArray(self._made[0].recycled, spec, fused, self._reducer, one_shot, flight)
        return LargeArray(self._made[0].recycled, spec, fused, self._reducer, flight)

    def of_list(self, call: ReductionCall, flight: Any) -> RepeatedReduction | None:
        """Return what reduces contiguous private lists like this call's again; `None` where C does not add them."""
        places: Places = call.state[0]
        if not (self._is_compiled and self._agreement_is_barrier) or places.sources is not None:
            return None
        is_per_node = self._writes_outs(places)
        if self._small is not None or len(self._lists) > 1:
            if is_per_node or not (call.outs is None or all(map(is_, call.outs, call.operands.arrays))):
                return None
            return self._small or ListsOfDtypes(self, call)
        if not self._lists or self._empty:
            return None
        fused = self._lists[0]
        if fused.wire != fused.result_dtype or not fused.keeps_dtype:
            return None
        if is_per_node not in self._repeated_lists:
            given = self._made[0], self._specs, fused, self._reducer, flight
            self._repeated_lists[is_per_node] = Lists(*given, is_per_node)
        reduction = self._repeated_lists[is_per_node]
        return reduction if reduction.is_compiled else None

    def of_symmetric(self, call: ReductionCall) -> RepeatedReduction | None:
        """Return what reduces the symmetric arrays of a call again, in place; `None` where they are not all such."""
        places: Places = call.state[0]
        is_in_place = call.outs is not None and all(map(is_, call.outs, call.operands.arrays))
        is_one_list = len(self._lists) == 1 and self._lists[0].wire == self._lists[0].result_dtype and not self._empty
        if not (is_in_place and is_one_list and self._agreement_is_barrier and self._writes_outs(places)):
            return None
        return SymmetricInPlace(self._lists[0], self._reducer, places.in_place[0]) if places.in_place else None

    def variant_of(self, array: np.ndarray[Any, Any], out: np.ndarray[Any, Any] | None) -> int | None:
        """Return `CallRecord.variant` of a call of one array (`out` is `None`: new), `None` if `begin` finds it."""
        shared = self._shared
        if not shared.num_windows:
            return NOWHERE.digest
        if self._ignores_places:
            return None if out is not None and shared.is_per_node(out) else NOWHERE.digest
        if out is not None and not shared.is_private(out):
            return None
        return PRIVATE.digest if self._is_compiled or shared.is_private(array) else None

    def _transfers(
        self, call: ReductionCall, places: Places, staged: Any, new: list[LentArrays]
    ) -> tuple[list[Any], list[LentArrays], _Transfers]:
        """Return the array of each result, `None` for a new one; the new arrays of each list; and the transfers."""
        outs, arrays = call.outs, call.operands.arrays
        writes_outs = self._writes_outs(places)
        if writes_outs and self._are_in_place(places):
            return list(outs or ()), [], self._in_place_transfers(places)
        results = list(outs or ()) if writes_outs else self._new_results(call)
        if outs is not None and not (writes_outs and (staged is not None or places.sources is not None)):
            checked = call.checked_outs
            owners = checked.owners if checked is not None and checked.are_targets else None  # else the outs are others
            arrays = copy_overwritten(arrays, results, places.outs is not None, owners)
        if outs is None and not new:
            new = [made.recycled.lend() for made in self._made]
        transfers: _Transfers = []
        for at, fused in enumerate(self._lists):
            if writes_outs:
                transfer = self._shared_transfer(at, arrays, None, places) if staged is None else staged
                transfers.append((transfer, staged is not None))
                continue
            into = new[at] if new else LentArrays([results[index] for index in fused.indices])
            if places.sources is not None:
                transfers.append((self._shared_transfer(at, arrays, into, places), False))
            else:
                begun = None if at else staged
                are_copies = arrays is not call.operands.arrays  # some of them: results would overwrite the values
                transfers.append((self._private_transfer(at, begun, arrays, are_copies, into), begun is not None))
        return results, new, transfers

    def _new_results(self, call: ReductionCall) -> list[Any]:
        """Return the array of each result; `None` for an array that is set later."""
        outs, checked = call.outs, call.checked_outs
        if outs is not None:
            if checked is not None and checked.are_targets:
                return list(outs)
            return target_arrays(outs, self._specs, self._results, self._shared)
        results: list[Any] = [None] * len(self._specs)
        for index in self._empty if self._wants_results else ():
            results[index] = np.empty(self._specs[index].shape, self._results[index])
        return results

    def _add_small(self, small: SmallLists, call: ReductionCall, staged: Any) -> list[Any]:
        if staged is None:
            staged = small.begin(call.operands.arrays, None, 0)
            self._reducer.synchronize()
        results = small.lend()[0] if call.outs is None else self._new_results(call)
        small.finish(staged, results)
        small.close(results, call.outs is None)
        return results

    def _take(self, at: int, arrays: Sequence[Any]) -> TwoShot:
        """Return the transfer of a list of private arrays: that of an earlier call, if no other call uses it."""
        fused = self._lists[at]
        sources = fused.flat(arrays)
        transfer, self._idle[at] = self._idle[at], None
        if transfer is None:
            return self._two_shot(fused, FusedArrays(fused.wire, sources, result_dtype=fused.result_dtype))
        self._reducer.count(fused.nbytes)
        transfer.arrays.sources, transfer.arrays.results, transfer.arrays.place = sources, (), 0
        return transfer

    def _put_back(self, transfers: _Transfers) -> None:
        """Keep the transfers of private arrays for later calls, without the arrays."""
        for at, (transfer, _) in enumerate(transfers):
            if isinstance(transfer, TwoShot) and transfer.arrays.peers is None and transfer.arrays.shared is None:
                transfer.forget()
                self._idle[at] = transfer

    def _private_transfer(
        self, at: int, begun: TwoShot | None, arrays: Sequence[Any], are_copies: bool, into: LentArrays
    ) -> TwoShot:
        fused, transfer = self._lists[at], begun
        if transfer is None:
            transfer = self._take(at, arrays)
            transfer.arrays.place = into.place
        elif are_copies:
            transfer.arrays.sources = fused.flat(arrays)
        if not self._wants_results:
            return transfer
        if begun is None or not into.place:
            transfer.arrays.results = fused.flat_results(into.arrays)
        if len(into.arrays) != len(fused.indices):
            transfer.set_results_schedule(self._reducer.schedule((fused.count,), fused.wire.itemsize))
        else:
            transfer.set_results_schedule(fused.schedule)
        return transfer

    def _shared_transfer(self, at: int, arrays: Sequence[Any], into: LentArrays | None, places: Places) -> TwoShot:
        """Return the transfer of a list's values in shared memory, or to outs in shared memory if `into` is `None`."""
        fused = self._lists[at]
        given = FusedArrays(fused.wire, fused.flat(arrays), result_dtype=fused.result_dtype)
        if places.sources is not None and fused.keeps_dtype:
            given.peers = _by_rank(places.sources, fused)
        if into is None:
            if places.outs_by_rank is None:
                places.outs_by_rank = [_by_rank(places.outs or (), one) for one in self._lists]
            given.shared = places.outs_by_rank[at]
        elif self._wants_results:
            is_joined = len(into.arrays) != len(fused.indices)
            given.results = fused.flat_results(self._made[at].split(into.arrays[0]) if is_joined else into.arrays)
        return self._two_shot(fused, given)

    def _are_in_place(self, places: Places) -> bool:
        """Whether nothing is copied: all ranks that add reach the values and the outs."""
        on_one_node = places.sources is not None and not self._reducer.spans_nodes
        return on_one_node and all(fused.keeps_dtype for fused in self._lists)

    def _in_place_transfers(self, places: Places) -> _Transfers:
        if places.in_place is None:
            places.in_place = [self._prepare_in_place(fused, places) for fused in self._lists]
        for fused in self._lists:
            self._reducer.count(fused.nbytes)
        return [(part, at > 0 or self._agreement_is_barrier) for at, part in enumerate(places.in_place)]

    def _prepare_in_place(self, fused: FusedList, places: Places) -> InPlace:
        assert places.sources is not None
        assert places.outs is not None
        sources = [places.sources[index] for index in fused.indices]
        outs = [places.outs[index] for index in fused.indices]
        runs = self._shared.runs(sources, outs, fused.wire)
        return self._reducer.in_place(runs, fused.reduction, fused.divide_by)

    def _writes_outs(self, places: Places) -> bool:
        """Whether the rank that adds writes the outs of all ranks, which lie in shared memory.

        Each rank copies to its own outs itself if values are private, which is compiled, or a value is small.
        """
        outs = places.outs
        if outs is None or (places.sources is None and not outs[0].per_node):
            return False
        return all(
            fused.wire == fused.result_dtype and (outs[0].per_node or not self._ignores_places) for fused in self._lists
        )

    def _two_shot(self, fused: FusedList, arrays: FusedArrays) -> TwoShot:
        self._reducer.count(fused.nbytes)
        return self._reducer.two_shot(arrays, fused.reduction, fused.divide_by, fused.schedule, fused.half)


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


def _by_rank(places: Sequence[Place], fused: FusedList) -> list[list[Any]]:
    return [list(pieces) for pieces in zip(*(places[index].arrays for index in fused.indices), strict=True)]
