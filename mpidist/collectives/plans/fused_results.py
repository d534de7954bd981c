"""The results of fused lists: new arrays, or views of one new array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

from mpidist.collectives.arguments.operands import Spec
from mpidist.collectives.plans.plan import FusedList
from mpidist.transport.host_memory.result_memory import RecycledResults, ResultMemory
from mpidist.transport.native.loading import native
from mpidist.transport.node_memory.arena import SharedArena

__all__ = ["FusedResults"]

# New results of many small arrays are views of one new array: to make and fill each by itself takes longer.
_SMALL_RESULT: Final = 4096  # elements of an average array
_MANY: Final = 4  # arrays


@final
class FusedResults:
    """The results of one fused list, in shared memory of `arena` if there is one.

    `are_joined`: new results are views of one new array. `recycled`: the memory of the new array or arrays; of none,
    unless this rank wants the results (`is_wanted`).
    """

    def __init__(
        self,
        fused: FusedList,
        specs: Sequence[Spec],
        memory: ResultMemory,
        arena: SharedArena | None,
        is_wanted: bool = True,
    ) -> None:
        self._fused, self._shapes = fused, [specs[index].shape for index in fused.indices]
        self._indices = fused.indices if is_wanted else ()
        self.are_joined = is_wanted and len(fused.indices) >= _MANY and fused.count < _SMALL_RESULT * len(fused.indices)
        shapes = [(fused.count,)] if self.are_joined else self._shapes if is_wanted else []
        self.recycled = RecycledResults(memory, shapes, [fused.result_dtype] * len(shapes), arena)

    def split(self, whole: Any) -> list[Any]:
        """Split a flat array into views with the shapes of the results."""
        fused = self._fused
        if fused.is_uniform:
            return list(whole.reshape(len(fused.indices), *self._shapes[0]))
        if native is not None and whole.flags.carray:
            parts: list[Any] = native.split(whole, self._shapes)
            return parts
        views, at = [], 0
        for shape, length in zip(self._shapes, fused.lengths, strict=True):
            views.append(whole[at : at + length].reshape(shape))
            at += length
        return views

    def set_new(self, new: list[Any], results: list[Any]) -> None:
        """Set the results of the list to new arrays, or to views of the one that has all."""
        parts = self.split(new[0]) if self.are_joined else new
        for index, part in zip(self._indices, parts, strict=True):
            results[index] = part

    def copy(self, whole: Any, results: list[Any]) -> None:
        """Copy a flat array to the results of the list; those that are `None` become views of it."""
        for index, part in zip(self._fused.indices, self.split(whole), strict=True):
            if results[index] is None:
                results[index] = part
            else:
                results[index][...] = part
