"""One way to sum, and what a library must offer to be measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from contest.work import Work

__all__ = ["Library", "Way", "runs"]

_BUCKET_BYTES = 25 << 20


def _as_they_are(result: Any) -> Any:
    return result


def _nothing() -> None:
    pass


def _at_once(timed: Callable[[], Any]) -> Any:
    return timed()


@dataclass(frozen=True)
class Way:
    """One way to sum.

    Attributes:
        written: [calls], the arrays that are written before each step, for each call.
        call: What is timed: the number of the call to its result.
        sums: The result as NumPy arrays, one for each array of the work.
        load: Hand what was written to the library, where that is not shared; not timed.
        within: Calls a function in the context that `call` needs.
    """

    written: Sequence[Sequence[Any]]
    call: Callable[[int], Any]
    sums: Callable[[Any], Sequence[Any]] = field(default=_as_they_are)
    load: Callable[[], None] = field(default=_nothing)
    within: Callable[[Callable[[], Any]], Any] = field(default=_at_once)


class Library:
    """What a group measures with. Every `over_*.py` has one."""

    rank: int
    size: int
    versions: dict[str, str]

    def ways(self, work: Work) -> dict[str, Way]:
        """Prepare a work, and name the ways to do it. Collective."""
        raise NotImplementedError

    def forget(self) -> None:
        """Give back what `ways` took. Collective."""


def runs(nbytes: Sequence[int], limit: int = _BUCKET_BYTES) -> list[slice]:
    """Group arrays in order into buckets of at most `limit` bytes; a larger array is a bucket of its own."""
    found, start, held = [], 0, 0
    for at, extra in enumerate(nbytes):
        if at > start and held + extra > limit:
            found.append(slice(start, at))
            start, held = at, 0
        held += extra
    return [*found, slice(start, len(nbytes))]
