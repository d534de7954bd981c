"""Reductions of whole lists through shared memory: staged, added and delivered, or added where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.collectives.arguments import Spec
from mpidist.collectives.call import Execution, ReductionCall
from mpidist.collectives.out_arrays import CheckedOuts, keep_apart, target_arrays, write_outs
from mpidist.collectives.plan import FusedList
from mpidist.transport import (
    FusedArrays,
    FusedReducer,
    InPlace,
    Pending,
    Place,
    SharedArrays,
    Steps,
    TwoShot,
    complete,
    placement_digest,
)

__all__ = ["FusedExecution"]

# New results of small arrays are parts of one new array: making and filling each by itself would take longer.
_SMALL_RESULT: Final = 4096  # elements of an average array
_MANY: Final = 4  # arrays
_IN_PLACE_BYTES: Final = 128 << 10  # from which on symmetric arrays are added where they lie


@final
class _Placement(NamedTuple):
    """Where the arguments of a call lie in memory that the node shares.

    Attributes:
        sources: The places of the values, if they all lie in arrays that each rank has of its own.
        outs: The places of the outs, if they all lie in shared memory.
        digest: A number that is the same on all ranks if the places are; 0 on all ranks, or on none.
    """

    sources: list[Place] | None
    outs: list[Place] | None
    digest: int

    def is_that_of(self, other: _Placement) -> bool:
        """Whether both are of the same arrays."""
        return _are(self.sources or (), other.sources or ()) and _are(self.outs or (), other.outs or ())

    @classmethod
    def of(
        cls, shared: SharedArrays, arrays: Sequence[Any], outs: Sequence[Any] | None, checked: CheckedOuts | None
    ) -> _Placement:
        """Find the places of the values, and of the arrays that take the results, if any were given."""
        into = None if checked is None else checked.places
        is_in_place = outs is not None and _are(arrays, outs)
        sources = into if is_in_place else shared.places(arrays)
        if sources is not None and sources[0].per_node:
            sources = None
        if sources is not None and into is not None and not _can_write(sources, into):
            return _PRIVATE
        if sources is None and into is None:
            return _PRIVATE
        into_digest = 0 if checked is None else checked.placement_digest
        digest = into_digest if is_in_place else placement_digest(sources)
        return cls(sources, into, digest ^ (into_digest << 1))


_NOWHERE: Final = _Placement(None, None, 0)  # there is no shared array, or it does not matter
_PRIVATE: Final = _Placement(None, None, 2)  # other ranks' arguments may lie in shared arrays


def _are(arrays: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(arrays) == len(others) and all(map(is_, arrays, others))


def _can_write(sources: Sequence[Place], outs: Sequence[Place]) -> bool:
    """Whether other ranks may write the outs while sources are still read: they are the same, or far apart."""
    if sources is outs or _are(sources, outs):
        return True
    same = all(
        (source.window, source.offset) == (out.window, out.offset) for source, out in zip(sources, outs, strict=True)
    )
    return same or not {source.window for source in sources} & {out.window for out in outs}


@final
class FusedExecution(Execution):
    """Calls of one plan, whose arrays are staged, added and delivered as a few lists.

    Args:
        reducer: The transport.
        lists: What is sent.
        specs: The arrays.
        results: The dtype of each result.
        shared: The shared arrays.
        agreement_is_barrier: Whether the agreement of a call also synchronises the ranks of the node.
        wants_results: Whether this rank does.
    """

    def __init__(
        self,
        reducer: FusedReducer,
        lists: Sequence[FusedList],
        specs: Sequence[Spec],
        results: Sequence[np.dtype[Any]],
        shared: SharedArrays,
        agreement_is_barrier: bool,
        wants_results: bool,
    ) -> None:
        self._reducer, self._lists, self._shared = reducer, lists, shared
        self._specs, self._results = specs, results
        self._agreement_is_barrier, self._wants_results = agreement_is_barrier, wants_results
        self._in_place: tuple[_Placement, list[InPlace]] = _NOWHERE, []  # those of the call before
        self._empty = [index for index, spec in enumerate(specs) if not spec.num_elements]
        self._small = None
        if len(lists) == 1 and reducer.is_small(lists[0].nbytes):
            self._small = reducer.one_shot(lists[0].count, lists[0].wire)
        self._ignores_placement = self._small is not None and self._is_copied(lists[0])
        self._is_one_array = len(specs) == len(lists) == 1 and lists[0].wire == lists[0].result

    def begin(self, call: ReductionCall) -> None:
        """Stage the first chunk, unless the arrays lie in memory that all ranks of the node reach."""
        checked, place = call.checked_outs, _NOWHERE
        staged: Any = None
        is_wanted = not self._ignores_placement or (checked is not None and checked.per_node_digest)
        if is_wanted and self._shared.num_windows:
            place = _Placement.of(self._shared, call.operands.arrays, call.outs, checked)
            call.placement = place.digest
        if self._agreement_is_barrier and place.sources is None and place.outs is None and self._lists:
            arrays, first = call.operands.arrays, self._lists[0]
            if self._small is not None:
                staged = self._small.stage(arrays if self._is_one_array else [arrays[at] for at in first.indices])
            else:
                staged = self._two_shot(first, FusedArrays(first.wire, _flat(arrays, first), result=first.result))
                staged.begin()
        call.state = place, staged

    def finish(self, call: ReductionCall, has_same_placement: bool) -> list[Any]:
        place, staged = call.state if has_same_placement else (_NOWHERE, None)
        if self._small is not None and place.outs is None:
            results = self._add_small(call, staged)
        else:
            results, transfers = self._transfers(call, place, staged)
            with np.errstate(all="ignore"):  # an overflow is a result; raising it on one rank would leave the others
                for transfer, is_staged in transfers:
                    complete(transfer.steps(is_staged), self._reducer.check_peers)
        if call.outs is None:
            return call.operands.restore(results)
        return write_outs(call.outs, results, self._shared)

    def steps(self, call: ReductionCall, pending: Pending, has_same_placement: bool) -> Steps:
        place, staged = call.state if has_same_placement else (_NOWHERE, None)
        if self._small is not None and place.outs is None:
            return self.finish(call, has_same_placement)
        results, transfers = self._transfers(call, place, staged)
        for transfer, is_staged in transfers:
            yield from transfer.steps(is_staged)
        if call.outs is None:
            return call.operands.restore(results)
        return write_outs(call.outs, results, self._shared)

    def _transfers(
        self, call: ReductionCall, place: _Placement, staged: Any
    ) -> tuple[list[Any], list[tuple[TwoShot | InPlace, bool]]]:
        """Say where the results go, and what has to be done: transfers, and whether each was staged already."""
        outs, arrays = call.outs, call.operands.arrays
        writes_outs = place.outs is not None and self._can_write_outs(place.outs)
        if writes_outs and self._are_in_place(place):
            return list(outs or ()), self._in_place_transfers(place)
        results = list(outs or ()) if writes_outs else self._new_results(call)
        if outs is not None and not (writes_outs and place.sources is not None):
            arrays = keep_apart(arrays, results)
        transfers: list[tuple[TwoShot | InPlace, bool]] = []
        for fused in self._lists:
            if writes_outs or place.sources is not None:
                transfer = self._shared_transfer(fused, arrays, results, place, writes_outs, outs is None)
                transfers.append((transfer, False))
            else:
                begun = None if fused is not self._lists[0] else staged
                transfer = self._private_transfer(fused, begun, arrays, results, outs is None)
                transfers.append((transfer, begun is not None))
        return results, transfers

    def _new_results(self, call: ReductionCall) -> list[Any]:
        """Say where each result is made; `None` for arrays that are still to be allocated."""
        outs, checked = call.outs, call.checked_outs
        if outs is not None:
            if checked is not None and checked.are_targets:
                return list(outs)
            return target_arrays(outs, self._specs, self._results, self._shared)
        results: list[Any] = [None] * len(self._specs)
        for index in self._empty if self._wants_results else ():
            results[index] = np.empty(self._specs[index].shape, self._results[index])
        return results

    def _add_small(self, call: ReductionCall, staged: Any) -> list[Any]:
        fused, small, outs = self._lists[0], self._small, call.outs
        assert small is not None
        if staged is None:
            arrays = call.operands.arrays
            staged = small.stage([arrays[index] for index in fused.indices])
            self._reducer.synchronize()
        self._reducer.count(fused.nbytes)
        if self._is_one_array and self._wants_results:
            result = np.empty(self._specs[0].shape, fused.wire) if outs is None else self._new_results(call)[0]
            small.add(staged, fused.reduction, fused.divide_by, result.reshape(-1))
            return [result]
        results = self._new_results(call)
        if not self._wants_results:
            return results
        keeps = fused.wire == fused.result
        total = np.empty(fused.count, fused.wire)
        small.add(staged, fused.reduction, fused.divide_by if keeps else 1, total)
        if not keeps:
            total = (total / fused.divide_by).astype(fused.result, copy=False)
        for index, part in zip(fused.indices, self._split(total, fused), strict=True):
            if outs is None:
                results[index] = part
            else:
                results[index][...] = part
        return results

    def _private_transfer(
        self, fused: FusedList, begun: TwoShot | None, arrays: Sequence[Any], results: list[Any], makes_new: bool
    ) -> TwoShot:
        transfer = begun
        if transfer is None:
            transfer = self._two_shot(fused, FusedArrays(fused.wire, _flat(arrays, fused), result=fused.result))
        else:
            transfer.arrays.sources = _flat(arrays, fused)  # copies by now, of those that results would overwrite
        are_small = len(fused.indices) >= _MANY and fused.count < _SMALL_RESULT * len(fused.indices)
        if makes_new and self._wants_results and are_small:
            whole = np.empty(fused.count, fused.result)
            for index, part in zip(fused.indices, self._split(whole, fused), strict=True):
                results[index] = part
            transfer.arrays.results = [whole]
            transfer.cut_results(self._reducer.schedule((fused.count,), fused.wire.itemsize))
        else:
            transfer.arrays.results = self._targets(fused, results, makes_new)
        return transfer

    def _shared_transfer(
        self,
        fused: FusedList,
        arrays: Sequence[Any],
        results: list[Any],
        place: _Placement,
        writes_outs: bool,
        makes_new: bool,
    ) -> TwoShot:
        given = FusedArrays(fused.wire, _flat(arrays, fused), result=fused.result)
        if place.sources is not None and fused.keeps_dtype:
            given.peers = _by_rank(place.sources, fused)
        if writes_outs:
            assert place.outs is not None
            given.shared = _by_rank(place.outs, fused)
        else:
            given.results = self._targets(fused, results, makes_new)
        return self._two_shot(fused, given)

    def _are_in_place(self, place: _Placement) -> bool:
        """Whether nothing is copied: values and outs lie where all ranks that add reach them."""
        on_one_node = place.sources is not None and not self._reducer.spans_nodes
        return on_one_node and all(fused.keeps_dtype for fused in self._lists)

    def _in_place_transfers(self, place: _Placement) -> list[tuple[TwoShot | InPlace, bool]]:
        known, parts = self._in_place
        if not place.is_that_of(known):
            parts = [self._prepare_in_place(fused, place) for fused in self._lists]
            self._in_place = place, parts
        for fused in self._lists:
            self._reducer.count(fused.nbytes)
        return [(part, at > 0 or self._agreement_is_barrier) for at, part in enumerate(parts)]

    def _prepare_in_place(self, fused: FusedList, place: _Placement) -> InPlace:
        assert place.sources is not None
        assert place.outs is not None
        sources, outs = ([places[at] for at in fused.indices] for places in (place.sources, place.outs))
        runs = self._shared.runs(sources, outs, fused.wire)
        return InPlace(runs, self._reducer.slots, fused.reduction, fused.divide_by)

    def _is_copied(self, fused: FusedList) -> bool:
        """Whether a list is so small that one barrier and copies are faster than two barriers without."""
        return self._reducer.is_small(fused.nbytes) and fused.nbytes <= _IN_PLACE_BYTES

    def _can_write_outs(self, outs: Sequence[Place]) -> bool:
        """Whether whoever adds shall write the outs of all ranks; small ones are written sooner by each rank."""
        return all(
            fused.wire == fused.result and (outs[0].per_node or not self._is_copied(fused)) for fused in self._lists
        )

    def _two_shot(self, fused: FusedList, arrays: FusedArrays) -> TwoShot:
        self._reducer.count(fused.nbytes)
        return self._reducer.two_shot(arrays, fused.reduction, fused.divide_by, fused.schedule, fused.half)

    def _targets(self, fused: FusedList, results: list[Any], makes_new: bool) -> list[Any]:
        if not self._wants_results:
            return []
        if makes_new:
            for index in fused.indices:
                results[index] = np.empty(self._specs[index].shape, fused.result)
        return _flat(results, fused)

    def _split(self, whole: Any, fused: FusedList) -> list[Any]:
        """View one flat array as the results of a list, in the list's order."""
        shape = self._specs[fused.indices[0]].shape
        if fused.is_uniform:
            return list(whole.reshape(len(fused.indices), *shape))
        parts, at = [], 0
        for index, length in zip(fused.indices, fused.lengths, strict=True):
            parts.append(whole[at : at + length].reshape(self._specs[index].shape))
            at += length
        return parts


def _flat(arrays: Sequence[Any], fused: FusedList) -> list[Any]:
    if fused.schedule.is_fine:  # copied as they are, whatever their shape and layout
        return [arrays[index] for index in fused.indices]
    return [arrays[index] if arrays[index].ndim == 1 else arrays[index].reshape(-1) for index in fused.indices]


def _by_rank(places: Sequence[Place], fused: FusedList) -> list[list[Any]]:
    return [list(pieces) for pieces in zip(*(places[index].everyone for index in fused.indices), strict=True)]
