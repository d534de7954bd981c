"""One way to reduce a work, and what a library must offer to be measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ranks.work import BLOCK, pattern_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ranks.work import Work

__all__ = ["Library", "Way", "check", "runs"]

_BUCKET_BYTES = 25 << 20


def _as_they_are(result: Any) -> Any:
    return result


def _nothing() -> None:
    pass


def _uncounted() -> list[int]:
    return []


def _at_once(timed: Callable[[], Any]) -> Any:
    return timed()


def _sum(written: Sequence[Any]) -> Any:
    return sum(written[1:], written[0])


@dataclass(frozen=True)
class Way:
    """One way to reduce.

    Attributes:
        written: Lists of arrays that are written before each step, one for each call, and replica of the rank. Where
            there are none, nothing is checked.
        call: What is timed: the number of the call to its result.
        baseline: The way that it is held against.
        results: The result as NumPy arrays, one for each array of the work.
        load: Prepares a step: hands what was written to the library, where that is not shared. Not timed.
        within: Calls a function in the context that `call` needs.
        expect: What all ranks wrote at a place [ranks], to what belongs there in the result.
        part: Which part of each flat array this rank gets; `None` for all, in its shape.
        tolerance: Greatest relative error. Sums of what is written are exact in float32.
        sent: The number of bytes that this rank has sent since the start, by the library's own count; or nothing.
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
    sent: Callable[[], list[int]] = field(default=_uncounted)


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


def check(results: Sequence[Any], way: Way, shapes: Sequence[tuple[int, ...]], size: int, number: int | None) -> None:
    """Raise unless the results of a way are right.

    Args:
        results: What this rank got, an array for each of the work.
        way: Says what they should be.
        shapes: Of the work's arrays.
        size: Number of ranks.
        number: Every rank has written `number + rank`, and the ends of each array are compared; `None`: every rank has
            called `write_pattern`, and all is compared.
    """
    if len(results) != len(shapes):
        raise ArithmeticError(f"{len(results)} arrays came back for {len(shapes)}")
    for got, shape in zip(results, shapes):  # noqa: B905 - Python 3.8
        flat, (start, stop, _) = got.reshape(-1), (way.part or slice(None)).indices(int(np.prod(shape)))
        if flat.size != stop - start or (way.part is None and got.shape != tuple(shape)):
            raise ArithmeticError(f"an array {got.shape} came back for {tuple(shape)}")
        if number is not None:
            _compare(flat[[0, -1]] if flat.size else flat, way, [np.float32(number + rank) for rank in range(size)])
            continue
        for at in range(0, flat.size, BLOCK):  # small temporary arrays
            block = flat[at : at + BLOCK]
            pattern = pattern_at(start + at, block.size)
            _compare(block, way, [pattern + np.float32(rank) for rank in range(size)])


def _compare(got: Any, way: Way, written: Sequence[Any]) -> None:
    wanted = way.expect(written)
    wrong = np.abs(got.astype(np.float32) - wanted) > way.tolerance * np.abs(wanted)
    if wrong.any():
        raise ArithmeticError(f"{wrong.sum()} of {got.size} numbers are wrong, such as {got[wrong][:3]}")
