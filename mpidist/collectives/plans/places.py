"""Where the arguments of a call lie in the shared memory of a node."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, Final, NamedTuple, final

from mpidist.collectives.arguments import CheckedOuts
from mpidist.transport import Place, SharedArrays, places_digest

__all__ = ["NOWHERE", "PRIVATE", "Places"]


@final
class Places(NamedTuple):
    """Where the arguments of a call lie in shared memory of the node.

    Attributes:
        sources: The places of the values, if all are symmetric arrays, and none is a per-node array; else `None`.
        outs: The places of the outs, if all lie in shared memory; else `None`.
        digest: A digest of the places, equal on all ranks if the places are: `CallRecord.variant`.
    """

    sources: list[Place] | None
    outs: list[Place] | None
    digest: int

    def has_same_arrays(self, other: Places) -> bool:
        """Whether both are the places of the same arrays."""
        return _are_same(self.sources or (), other.sources or ()) and _are_same(self.outs or (), other.outs or ())

    @classmethod
    def of(
        cls, shared: SharedArrays, arrays: Sequence[Any], outs: Sequence[Any] | None, checked: CheckedOuts | None
    ) -> Places:
        """Find the places of the values and of the outs."""
        out_places = None if checked is None else checked.places
        is_in_place = outs is not None and _are_same(arrays, outs)
        sources = out_places if is_in_place else shared.places(arrays)
        if sources is not None and sources[0].per_node:
            sources = None
        if sources is not None and out_places is not None and not _can_be_written_early(sources, out_places):
            return PRIVATE
        if sources is None and out_places is None:
            return PRIVATE
        outs_digest = 0 if checked is None else checked.places_digest
        digest = outs_digest if is_in_place else places_digest(sources)
        return cls(sources, out_places, digest ^ (outs_digest << 1))


NOWHERE: Final = Places(None, None, 0)  # no shared array exists, or places make no difference
PRIVATE: Final = Places(None, None, 2)  # private here; arguments of other ranks may lie in shared arrays


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
