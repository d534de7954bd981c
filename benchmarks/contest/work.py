"""What is summed: float32 arrays that are written anew before every step, and whether their sums are right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Work", "check_ends", "check_pattern", "write_number", "write_pattern"]

_PATTERN = 251  # prime, so that no chunk or shard starts where the pattern does
_BLOCK = _PATTERN << 12
_TOLERANCE = 1e-6  # of means that are multiplied again; sums of these numbers are exact


@dataclass(frozen=True)
class Work:
    """One thing to sum over all ranks.

    Attributes:
        kind: `size` for one flat array, `list` for a list of gradients.
        name: `64K`, `resnet50`.
        shapes: The shape of each array.
        calls: How many calls are timed together, each with arrays of its own.
    """

    kind: str
    name: str
    shapes: tuple[tuple[int, ...], ...]
    calls: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes that one call sums."""
        return sum(4 * int(np.prod(shape)) for shape in self.shapes)

    def empty(self) -> list[Any]:
        """Allocate the arrays of one call."""
        return [np.empty(shape, np.float32) for shape in self.shapes]


def write_number(arrays: Sequence[Any], number: int) -> None:
    """Write a number everywhere."""
    for array in arrays:
        array.fill(number)


def write_pattern(arrays: Sequence[Any], rank: int) -> None:
    """Write numbers that differ from place to place, so that a shard in the wrong place shows."""
    for array in arrays:
        array[...] = _pattern(array)
        array += rank


def check_pattern(
    sums: Sequence[Any], shapes: Sequence[tuple[int, ...]], size: int, tolerance: float = _TOLERANCE
) -> None:
    """Raise unless every element is the sum of what `write_pattern` wrote on all ranks, but for a share of it."""
    ranks = size * (size - 1) // 2
    _check_shapes(sums, shapes)
    for got in sums:
        flat = got.reshape(-1)
        for at in range(0, flat.size, _BLOCK):  # small temporary arrays
            block = flat[at : at + _BLOCK]
            expected = size * _pattern(block) + ranks
            if not np.all(np.abs(block - expected) <= tolerance * expected):
                raise ArithmeticError(f"the sum of {size} ranks is wrong for an array {got.shape}")


def check_ends(sums: Sequence[Any], shapes: Sequence[tuple[int, ...]], size: int, number: int) -> None:
    """Raise unless the ends of each array are the sum of `number + rank` over all ranks."""
    expected = size * number + size * (size - 1) // 2
    _check_shapes(sums, shapes)
    for got in sums:
        flat = got.reshape(-1)
        if abs(flat[0] - expected) + abs(flat[-1] - expected) > _TOLERANCE * expected:
            raise ArithmeticError(f"the sum of {size} ranks is {flat[0]}, {flat[-1]} and not {expected}")


def _check_shapes(sums: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> None:
    if [got.shape for got in sums] != list(shapes):
        raise ArithmeticError(f"{len(sums)} arrays of other shapes came back for {len(shapes)}")


def _pattern(array: Any) -> Any:
    return np.resize(np.arange(_PATTERN, dtype=np.float32), array.shape)
