"""One way to reduce a work, and what a library must offer to be measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ranks.work import Work

__all__ = ["Library", "Way", "runs"]

_BUCKET_BYTES = 25 << 20


def _as_they_are(result: Any) -> Any:
    return result


def _nothing() -> None:
    pass


def _at_once(timed: Callable[[], Any]) -> Any:
    return timed()


def _sum(written: Sequence[Any]) -> Any:
    return sum(written[1:], written[0])


@dataclass(frozen=True)
class Way:
    """One way to reduce.

    Attributes:
        written: [calls], the arrays that are written before each step, for each call. Where there are none, nothing is
            checked.
        call: What is timed: the number of the call to its result.
        baseline: The way that it is held against.
        results: The result as NumPy arrays, one for each array of the work.
        load: Prepares a step: hands what was written to the library, where that is not shared. Not timed.
        within: Calls a function in the context that `call` needs.
        expect: What all ranks wrote at a place [ranks], to what belongs there in the result.
        part: Which part of each flat array this rank gets; `None` for all, in its shape.
        tolerance: Greatest relative error. Sums of what is written are exact in float32.
    """

    written: Sequence[Sequence[Any]]
    call: Callable[[int], Any]
    baseline: str = "raw in place"
    results: Callable[[Any], Sequence[Any]] = field(default=_as_they_are)
    load: Callable[[], None] = field(default=_nothing)
    within: Callable[[Callable[[], Any]], Any] = field(default=_at_once)
    expect: Callable[[Sequence[Any]], Any] = field(default=_sum)
    part: slice | None = None
    tolerance: float = 1e-6


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
