"""What is reduced: arrays that are written anew before every step, and whether the results are right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ranks.way import Way

__all__ = ["Work", "check", "write_number", "write_pattern"]

_PATTERN = 251  # prime, so that no chunk or shard starts where the pattern does
_BLOCK = _PATTERN << 12


@dataclass(frozen=True)
class Work:
    """One thing to reduce over all ranks.

    Attributes:
        kind: `size` for one flat array, `list` for a list of gradients.
        name: `64K`, `resnet50`.
        shapes: The shape of each array.
        calls: How many calls are timed together, each with arrays of its own.
        benchmark: Whose ways are wanted.
    """

    kind: str
    name: str
    shapes: tuple[tuple[int, ...], ...]
    calls: int = 1
    benchmark: str = "all_reduce"

    @property
    def nbytes(self) -> int:
        """Bytes that one call reduces, as float32."""
        return sum(4 * int(np.prod(shape)) for shape in self.shapes)

    def empty(self, dtype: Any = np.float32) -> list[Any]:
        """Allocate the arrays of one call."""
        return [np.empty(shape, dtype) for shape in self.shapes]


def write_number(arrays: Sequence[Any], number: int) -> None:
    """Write a number everywhere."""
    for array in arrays:
        array.fill(number)


def write_pattern(arrays: Sequence[Any], rank: int) -> None:
    """Write numbers that differ from place to place, so that a shard in the wrong place shows."""
    for array in arrays:
        array[...] = _pattern(0, array.size).reshape(array.shape)
        array += rank


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
        for at in range(0, flat.size, _BLOCK):  # small temporary arrays
            block = flat[at : at + _BLOCK]
            pattern = _pattern(start + at, block.size)
            _compare(block, way, [pattern + np.float32(rank) for rank in range(size)])


def _compare(got: Any, way: Way, written: Sequence[Any]) -> None:
    wanted = way.expect(written)
    wrong = np.abs(got.astype(np.float32) - wanted) > way.tolerance * np.abs(wanted)
    if wrong.any():
        raise ArithmeticError(f"{wrong.sum()} of {got.size} numbers are wrong, such as {got[wrong][:3]}")


def _pattern(start: int, count: int) -> Any:
    return np.resize(np.roll(np.arange(_PATTERN, dtype=np.float32), -(start % _PATTERN)), count)
