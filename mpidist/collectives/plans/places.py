"""Placement of a call's arguments in the shared memory of a node."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, Final, final

from mpidist.collectives.arguments.checked_outs import CheckedOuts
from mpidist.transport.node_memory.symmetric import Place, SharedArrays, places_digest

__all__ = ["NOWHERE", "PRIVATE", "KnownPlaces", "Places"]

_MAX_KNOWN: Final = 256  # calls with other arrays

# The ids of values in shared memory, and of the checked outs in shared memory, and whether the values are these outs.
_Key = tuple[tuple[int, ...], int, bool]


@final
@dataclass(eq=False)
class Places:
    """Placement of a call's arguments in shared memory of the node.

    Attributes:
        sources: The places of the values, if all are symmetric arrays, and none is a per-node array; else `None`.
        outs: The places of the outs, if all lie in shared memory; else `None`.
        digest: Equal on all ranks if the places are: `CallRecord.variant`.
        outs_by_rank: [lists][places], the outs as an execution writes them; `None` before it has.
        in_place: [lists], what reduces these arguments where they lie; `None` before something has.
    """

    sources: list[Place] | None
    outs: list[Place] | None
    digest: int
    outs_by_rank: list[list[list[Any]]] | None = None
    in_place: list[Any] | None = None


NOWHERE: Final = Places(None, None, 0)  # no shared array exists, or places make no difference
PRIVATE: Final = Places(None, None, 2)  # private here; arguments of other ranks may lie in shared arrays


@final
class KnownPlaces:
    """The places of the arguments of earlier calls: the same arrays have the same `Places`.

    Places refer to shared memory, so they are forgotten as soon as one of their arrays is gone.

    `is_compiled`: compiled code copies all values of private results: it does so faster than others read values in
    shared memory. Such values count as private.
    """

    def __init__(self, shared: SharedArrays, is_compiled: bool) -> None:
        self._shared, self._is_compiled = shared, is_compiled
        self._known: dict[_Key, tuple[Places, list[weakref.ref[Any]]]] = {}

    def find(self, arrays: Sequence[Any], outs: Sequence[Any] | None, checked: CheckedOuts | None) -> Places:
        """Find the places of the values and of the outs (`None`: new results). Local."""
        shared_outs = checked if checked is not None and checked.places is not None else None
        # Where some outs may be symmetric, and others not, results could overwrite values that other ranks still read.
        if shared_outs is None and (self._is_compiled or (checked is not None and not checked.are_private)):
            return PRIVATE
        first = self._shared.place(arrays[0]) if arrays else None
        values = arrays if first is not None and not first.per_node else ()
        if not values and shared_outs is None:
            return PRIVATE
        is_in_place = shared_outs is not None and _are_same(values, outs or ())
        key = () if is_in_place else tuple(map(id, values)), id(shared_outs), is_in_place
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            kept = [*values] if shared_outs is None else [*values, shared_outs]
            places = self._look_up(values, shared_outs, is_in_place)
            known = self._known[key] = places, self._references(key, kept)
        return known[0]

    def _look_up(self, values: Sequence[Any], checked: CheckedOuts | None, is_in_place: bool) -> Places:
        outs = None if checked is None else checked.places
        sources = outs if is_in_place else self._shared.places(values)
        if sources is None and outs is None:
            return PRIVATE
        if sources is not None and outs is not None and not _can_be_written_early(sources, outs):
            return PRIVATE
        outs_digest = 0 if checked is None else checked.places_digest
        digest = outs_digest if is_in_place else places_digest(sources)
        return Places(sources, outs, digest ^ (outs_digest << 1))

    def _references(self, key: _Key, objects: Sequence[Any]) -> list[weakref.ref[Any]]:
        """Refer to objects weakly, so that their cache entry is dropped once one is gone."""
        weak = weakref.ref(self)

        def forget(_: Any) -> None:
            mine = weak()
            if mine is not None:
                mine._known.pop(key, None)

        return [weakref.ref(one, forget) for one in objects]


def _are_same(arrays: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(arrays) == len(others) and all(map(is_, arrays, others))


def _can_be_written_early(sources: Sequence[Place], outs: Sequence[Place]) -> bool:
    """Whether ranks may write outs while others still read sources: they coincide, or share no window."""
    if sources is outs or _are_same(sources, outs):
        return True
    same = all(
        (source.window, source.offset) == (out.window, out.offset) for source, out in zip(sources, outs, strict=True)
    )
    return same or not {source.window for source in sources} & {out.window for out in outs}
