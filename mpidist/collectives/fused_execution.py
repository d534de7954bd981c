"""Reducing calls through shared memory: where their arrays lie, what is staged before ranks agree, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from operator import is_
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.collectives.out_arrays import KnownOuts, keep_apart, target_arrays
from mpidist.collectives.plan import Plan, StreamPlan
from mpidist.transport import InPlace, Place, SharedArrays, Stream, StreamReducer, Transfer, complete, word_of

__all__ = ["NOWHERE", "Placement", "StreamCalls"]

# New results of small arrays are parts of one new array: making and filling each by itself would take longer.
_SMALL_RESULT: Final = 4096  # elements of an average array
_MANY: Final = 4  # arrays
_IN_PLACE_BYTES: Final = 128 << 10  # from which on symmetric arrays are added where they lie


@final
class Placement(NamedTuple):
    """Where the arguments of a call lie in memory that the node shares.

    Attributes:
        sources: The places of the values, if they all lie in arrays that each rank has of its own.
        outs: The places of the outs, if they all lie in shared memory.
        word: A number that is the same on all ranks if the places are; 0 on all ranks, or on none.
    """

    sources: list[Place] | None
    outs: list[Place] | None
    word: int

    @property
    def is_private(self) -> bool:
        """Whether everything is staged."""
        return self.sources is None and self.outs is None

    def is_that_of(self, other: Placement) -> bool:
        """Whether both are of the same arrays."""
        return _are(self.sources or (), other.sources or ()) and _are(self.outs or (), other.outs or ())

    @classmethod
    def of(
        cls, shared: SharedArrays, arrays: Sequence[Any], outs: Sequence[Any] | None, known: KnownOuts | None
    ) -> Placement:
        """Find the places of the values, and of the arrays that take the results, if any were given."""
        if shared.is_empty:
            return NOWHERE
        into = None if known is None else known.places
        is_in_place = outs is not None and _are(arrays, outs)
        sources = into if is_in_place else shared.places(arrays)
        if sources is not None and sources[0].per_node:
            sources = None
        if sources is not None and into is not None and not _can_write(sources, into):
            return PRIVATE
        if sources is None and into is None:
            return PRIVATE
        word = into_word = 0 if known is None else known.word
        if not is_in_place:
            word = word_of(sources)
        return cls(sources, into, word ^ (into_word << 1))


NOWHERE: Final = Placement(None, None, 0)  # there is no shared array, or it does not matter
PRIVATE: Final = Placement(None, None, 2)  # other ranks' arguments may lie in shared arrays


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
class StreamCalls:
    """Calls of one shape.

    Args:
        reducer: The transport.
        plan: What is sent.
        shared: The shared arrays.
        meets: Whether ranks that agree on a call have passed a barrier of their node.
        wants_results: Whether this rank does.
    """

    def __init__(
        self, reducer: StreamReducer, plan: Plan, shared: SharedArrays, meets: bool, wants_results: bool = True
    ) -> None:
        assert plan.streams is not None
        self._meets = meets
        self._in_place: tuple[Placement, list[InPlace]] = NOWHERE, []  # those of the call before
        self._wants_results = wants_results
        self._reducer, self._plan, self._shared = reducer, plan, shared
        self._streams = plan.streams
        self._empty = [index for index, spec in enumerate(plan.specs) if not spec.num_elements]
        only = self._streams[0] if len(self._streams) == 1 else None
        self._small = None
        if only is not None and reducer.is_small(only.nbytes):
            self._small = reducer.one_round(only.count, only.wire)

    @property
    def is_small(self) -> bool:
        """Whether every rank adds everything, from copies, wherever the arrays lie."""
        return self._small is not None and self._is_copied(self._streams[0])

    def begin(self, arrays: Sequence[Any]) -> Any:
        """Stage the first chunk. Local, and it can be left at that.

        Returns:
            What `finish` needs.
        """
        if self._small is not None:
            return self._small.stage([arrays[index] for index in self._streams[0].indices])
        if not self._streams:
            return None
        its = self._streams[0]
        transfer = self._transfer(its, self._stream(its, arrays))
        transfer.begin()
        return transfer

    def finish(
        self,
        begun: Any,
        arrays: Sequence[Any],
        outs: Sequence[Any] | None,
        placement: Placement,
        known: KnownOuts | None,
        is_over: Callable[[], bool],
    ) -> list[Any]:
        """Reduce. Collective. As `steps`, at once; `is_over` as in `waiting.complete`."""
        if self._small is not None and placement.outs is None:
            return self._finish_small(begun, arrays, outs, known)
        with np.errstate(all="ignore"):  # an overflow is a result; raising it on one rank would leave the others
            return complete(self.steps(begun, arrays, outs, placement, known), is_over)

    def steps(
        self,
        begun: Any,
        arrays: Sequence[Any],
        outs: Sequence[Any] | None,
        placement: Placement,
        known: KnownOuts | None,
    ) -> Generator[int, None, list[Any]]:
        """Reduce. Yields while it waits for other ranks.

        Args:
            begun: What `begin` returned, if the ranks of the node passed a barrier since; else `None`.
            arrays: The values, native arrays.
            outs: Arrays that take the results, if any were given.
            placement: Where they lie, if the ranks agree on it.
            known: What was found about the outs.

        Returns:
            The results; the outs, where they could be written in place.
        """
        if self._small is not None and placement.outs is None:
            return self._finish_small(begun, arrays, outs, known)
        writes_outs = placement.outs is not None and self._can_write_outs(placement.outs)
        if writes_outs and self._are_in_place(placement):
            yield from self._add_in_place(placement)
            return list(outs or ())
        if writes_outs:
            results = list(outs or ())
            if placement.sources is None:
                arrays = keep_apart(arrays, results)
        else:
            results = self._results(outs, known)
            if outs is not None:
                arrays = keep_apart(arrays, results)
        for its in self._streams:
            if writes_outs or placement.sources is not None:
                transfer = self._shared_transfer(its, arrays, results, placement, writes_outs, outs is None)
                has_begun = False
            else:
                has_begun = begun is not None and its is self._streams[0]
                transfer = self._private_transfer(its, begun if has_begun else None, arrays, results, outs is None)
            if not has_begun:
                transfer.begin()
            yield from transfer.steps(has_begun)
        return results

    def _results(self, outs: Sequence[Any] | None, known: KnownOuts | None) -> list[Any]:
        """Say where each result is made; `None` for arrays that are still to be allocated."""
        if outs is not None:
            in_outs = known is not None and known.are_targets
            return list(outs) if in_outs else target_arrays(self._plan, outs, self._shared)
        results: list[Any] = [None] * len(self._plan.specs)
        for index in self._empty if self._wants_results else ():
            results[index] = np.empty(self._plan.specs[index].shape, self._plan.results[index])
        return results

    def _finish_small(
        self, begun: Any, arrays: Sequence[Any], outs: Sequence[Any] | None, known: KnownOuts | None
    ) -> list[Any]:
        its, small = self._streams[0], self._small
        assert small is not None
        results = self._results(outs, known)
        if begun is None:
            begun = small.stage([arrays[index] for index in its.indices])
            self._reducer.synchronize()
        self._reducer.count(its.nbytes)
        if not self._wants_results:
            return results
        keeps = its.wire == its.result
        if keeps and len(its.indices) == 1:
            (index,) = its.indices
            if outs is None:
                results[index] = np.empty(self._plan.specs[index].shape, its.wire)
            small.add(begun, its.reduction, its.divide_by, results[index].reshape(-1))
            return results
        total = np.empty(its.count, its.wire)
        small.add(begun, its.reduction, its.divide_by if keeps else 1, total)
        if not keeps:
            total = (total / its.divide_by).astype(its.result, copy=False)
        parts = self._split(total, its)
        for index, part in zip(its.indices, parts, strict=True):
            if outs is None:
                results[index] = part
            else:
                results[index][...] = part
        return results

    def _private_transfer(
        self, its: StreamPlan, begun: Transfer | None, arrays: Sequence[Any], results: list[Any], makes_new: bool
    ) -> Transfer:
        transfer = begun
        if transfer is None:
            transfer = self._transfer(its, self._stream(its, arrays))
        else:
            transfer.stream.sources = _flat(arrays, its)  # copies by now, of those that results would overwrite
        if (
            makes_new
            and self._wants_results
            and len(its.indices) >= _MANY
            and its.count < _SMALL_RESULT * len(its.indices)
        ):
            whole = np.empty(its.count, its.result)
            for index, part in zip(its.indices, self._split(whole, its), strict=True):
                results[index] = part
            transfer.stream.results = [whole]
            transfer.cut_results(self._reducer.schedule((its.count,), its.wire.itemsize))
        else:
            transfer.stream.results = self._targets(its, results, makes_new)
        return transfer

    def _shared_transfer(
        self,
        its: StreamPlan,
        arrays: Sequence[Any],
        results: list[Any],
        placement: Placement,
        writes_outs: bool,
        makes_new: bool,
    ) -> Transfer:
        stream = self._stream(its, arrays)
        if placement.sources is not None and all(self._plan.specs[at].dtype == its.wire for at in its.indices):
            stream.peers = _by_rank(placement.sources, its)
        if writes_outs:
            assert placement.outs is not None
            stream.shared = _by_rank(placement.outs, its)
        else:
            stream.results = self._targets(its, results, makes_new)
        return self._transfer(its, stream)

    def _are_in_place(self, placement: Placement) -> bool:
        """Whether nothing is copied: values and outs lie where all ranks that add reach them."""
        return (
            placement.sources is not None
            and not self._reducer.spans_nodes
            and all(self._plan.specs[at].dtype == its.wire for its in self._streams for at in its.indices)
        )

    def _add_in_place(self, placement: Placement) -> Generator[int, None, None]:
        known, parts = self._in_place
        if not placement.is_that_of(known):
            parts = [self._prepare_in_place(its, placement) for its in self._streams]
            self._in_place = placement, parts
        has_begun = self._meets
        for its, part in zip(self._streams, parts, strict=True):
            self._reducer.count(its.nbytes)
            yield from part.steps(has_begun)
            has_begun = True

    def _prepare_in_place(self, its: StreamPlan, placement: Placement) -> InPlace:
        assert placement.sources is not None
        assert placement.outs is not None
        sources, outs = ([places[at] for at in its.indices] for places in (placement.sources, placement.outs))
        return InPlace(self._shared.runs(sources, outs, its.wire), self._reducer.slots, its.reduction, its.divide_by)

    def _is_copied(self, its: StreamPlan) -> bool:
        """Whether a stream is so small that one barrier and copies are faster than two barriers without."""
        return self._reducer.is_small(its.nbytes) and its.nbytes <= _IN_PLACE_BYTES

    def _can_write_outs(self, outs: Sequence[Place]) -> bool:
        """Whether whoever adds shall write the outs of all ranks; small ones are written sooner by each rank."""
        return all(its.wire == its.result and (outs[0].per_node or not self._is_copied(its)) for its in self._streams)

    def _transfer(self, its: StreamPlan, stream: Stream) -> Transfer:
        self._reducer.count(its.nbytes)
        return self._reducer.transfer(stream, its.reduction, its.divide_by, its.schedule)

    def _stream(self, its: StreamPlan, arrays: Sequence[Any]) -> Stream:
        return Stream(its.wire, _flat(arrays, its), result=its.result)

    def _targets(self, its: StreamPlan, results: list[Any], makes_new: bool) -> list[Any]:
        if not self._wants_results:
            return []
        if makes_new:
            for index in its.indices:
                results[index] = np.empty(self._plan.specs[index].shape, its.result)
        return _flat(results, its)

    def _split(self, whole: Any, its: StreamPlan) -> list[Any]:
        """View one flat array as the results of a stream, in the stream's order."""
        specs = self._plan.specs
        shape = specs[its.indices[0]].shape
        if its.is_uniform:
            return list(whole.reshape(len(its.indices), *shape))
        parts, at = [], 0
        for index, length in zip(its.indices, its.lengths, strict=True):
            parts.append(whole[at : at + length].reshape(specs[index].shape))
            at += length
        return parts


def _flat(arrays: Sequence[Any], its: StreamPlan) -> list[Any]:
    if its.schedule.is_fine:  # copied as they are, whatever their shape and layout
        return [arrays[index] for index in its.indices]
    return [arrays[index] if arrays[index].ndim == 1 else arrays[index].reshape(-1) for index in its.indices]


def _by_rank(places: Sequence[Place], its: StreamPlan) -> list[list[Any]]:
    """Turn places into [ranks][pieces]."""
    chosen = [places[index].everyone for index in its.indices]
    return [list(pieces) for pieces in zip(*chosen, strict=True)]
