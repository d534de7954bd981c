"""One reducing call through shared memory: where its arrays lie, what is staged before ranks agree, and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np

from mpidist.cross_device_ops.outs import keep_apart, target_arrays
from mpidist.cross_device_ops.plan import Plan, StreamPlan
from mpidist.transport.pipeline import Stream, Transfer
from mpidist.transport.streams import StreamReducer
from mpidist.transport.symmetric import Place, SharedArrays, word_of

__all__ = ["Placement", "StreamCall"]

# New results of small arrays are parts of one new array: making and filling each by itself would take longer.
_SMALL_RESULT: Final = 4096  # elements of an average array
_MANY: Final = 4  # arrays


@final
class Placement:
    """Where the arguments of a call lie in memory that the node shares.

    Args:
        shared: The shared arrays.
        arrays: The values.
        outs: Arrays that take the results, if any were given.

    Attributes:
        sources: The places of the values, if they all lie in arrays that each rank has of its own.
        outs: The places of the outs, if they all lie in shared memory.
        word: A number that is the same on all ranks if the places are; 0 for none.
    """

    def __init__(self, shared: SharedArrays, arrays: Sequence[Any], outs: Sequence[Any] | None) -> None:
        sources = shared.places(arrays)
        self.sources = None if sources is None or sources[0].per_node else sources
        self.outs = None if outs is None else shared.places(outs)
        if self.sources is not None and self.outs is not None and not _can_write(self.sources, self.outs):
            self.sources = self.outs = None
        self.word = word_of(self.sources) ^ (word_of(self.outs) << 1)


def _can_write(sources: Sequence[Place], outs: Sequence[Place]) -> bool:
    """Whether other ranks may write the outs while sources are still read: they are the same, or far apart."""
    same = all(
        (source.window, source.offset) == (out.window, out.offset) for source, out in zip(sources, outs, strict=True)
    )
    return same or not {source.window for source in sources} & {out.window for out in outs}


@final
class StreamCall:
    """One call.

    Args:
        reducer: The transport.
        plan: What is sent.
        arrays: The values, native arrays.
        outs: Arrays that take the results, if any were given.
        shared: The shared arrays.
    """

    def __init__(
        self,
        reducer: StreamReducer,
        plan: Plan,
        arrays: Sequence[Any],
        outs: Sequence[Any] | None,
        shared: SharedArrays,
    ) -> None:
        assert plan.streams is not None
        self._reducer, self._plan, self._streams = reducer, plan, plan.streams
        self._shared = shared
        self._outs = outs
        self._arrays = arrays
        self._begun: Transfer | None = None

    def begin(self) -> None:
        """Stage the first chunk. Local: it can be left at that."""
        if self._streams:
            plan = self._streams[0]
            stream = Stream(plan.wire, self._flat(self._arrays, plan))
            self._begun = self._transfer(plan, stream)
            self._begun.begin()

    def finish(self, placement: Placement | None) -> list[Any]:
        """Reduce. Collective.

        Args:
            placement: Where the arguments lie, if the ranks agree on it. Then nothing may have been staged.

        Returns:
            The results; the outs, where they could be written in place.
        """
        if placement is None:
            return self._finish_private()
        return self._finish_shared(placement)

    def _finish_private(self) -> list[Any]:
        arrays, plan = self._arrays, self._plan
        results: list[Any] = [None] * len(plan.specs)
        if self._outs is not None:
            results = target_arrays(plan, self._outs, self._shared)
            arrays = keep_apart(arrays, results)
        for at, its in enumerate(self._streams):
            begun = self._begun if at == 0 else None
            if self._outs is None:
                targets, is_one = self._new_results(its, results)
            else:
                targets, is_one = self._flat(results, its), False
            transfer = begun if begun is not None else self._transfer(its, Stream(its.wire, self._flat(arrays, its)))
            if begun is not None and arrays is not self._arrays:
                transfer.stream.sources = self._flat(arrays, its)
            transfer.stream.results = targets
            if is_one and len(its.lengths) > 1:
                transfer.cut_results(self._reducer.schedule((its.count,), its.wire.itemsize))
            self._reducer.run(transfer, begun is not None)
        for index, spec in enumerate(plan.specs):
            if results[index] is None:
                results[index] = np.empty(spec.shape, plan.results[index])
        return results

    def _finish_shared(self, placement: Placement) -> list[Any]:
        arrays, plan = self._arrays, self._plan
        results: list[Any] = list(self._outs) if self._outs is not None else [None] * len(plan.specs)
        writes_outs = placement.outs is not None and all(
            its.wire == its.result and (placement.outs[0].per_node or not self._reducer.is_small(its.nbytes))
            for its in self._streams
        )
        if self._outs is not None and not writes_outs:
            results = target_arrays(plan, self._outs, self._shared)
        if self._outs is not None and placement.sources is None:
            arrays = keep_apart(arrays, self._outs)
        for its in self._streams:
            stream = Stream(its.wire, self._flat(arrays, its))
            keeps = all(plan.specs[at].dtype == its.wire for at in its.indices)
            if placement.sources is not None and keeps and (writes_outs or not self._reducer.is_small(its.nbytes)):
                stream.peers = _by_rank(placement.sources, its)
            if writes_outs:
                assert placement.outs is not None
                stream.shared = _by_rank(placement.outs, its)
            elif self._outs is None:
                stream.results = self._new_results(its, results, may_share=False)[0]
            else:
                stream.results = self._flat(results, its)
            self._reducer.run(self._transfer(its, stream))
        for index, spec in enumerate(plan.specs):
            if results[index] is None:
                results[index] = np.empty(spec.shape, plan.results[index])
        return results

    def _transfer(self, its: StreamPlan, stream: Stream) -> Transfer:
        self._reducer.count(its.nbytes)
        return self._reducer.transfer(stream, its.reduction, its.divide_by, its.schedule)

    def _flat(self, arrays: Sequence[Any], its: StreamPlan) -> list[Any]:
        return [arrays[index] if arrays[index].ndim == 1 else arrays[index].reshape(-1) for index in its.indices]

    def _new_results(self, its: StreamPlan, results: list[Any], may_share: bool = True) -> tuple[list[Any], bool]:
        """Allocate the results of a stream. Returns them flat, and whether they are one array."""
        shapes = [self._plan.specs[index].shape for index in its.indices]
        if may_share and len(shapes) >= _MANY and its.count < _SMALL_RESULT * len(shapes):
            whole = np.empty(its.count, its.result)
            at = 0
            for index, length, shape in zip(its.indices, its.lengths, shapes, strict=True):
                results[index] = whole[at : at + length].reshape(shape)
                at += length
            return [whole], True
        for index, shape in zip(its.indices, shapes, strict=True):
            results[index] = np.empty(shape, its.result)
        return self._flat(results, its), False


def _by_rank(places: Sequence[Place], its: StreamPlan) -> list[list[Any]]:
    """Turn places into [ranks][pieces]."""
    chosen = [places[index] for index in its.indices]
    return [list(pieces) for pieces in zip(*(place.everyone for place in chosen), strict=True)]
