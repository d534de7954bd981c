"""What is reduced: arrays that are written anew before every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BLOCK", "Work", "pattern_at", "write_number", "write_pattern"]

_PATTERN = 251  # prime, so that no chunk or shard starts where the pattern does
BLOCK = _PATTERN << 12


@dataclass(frozen=True)
class Work:
    """One thing to reduce over all ranks.

    Attributes:
        kind: `size` for one flat array, `list` for a list of gradients.
        name: `64K`, `resnet50`.
        shapes: The shape of each array.
        calls: How many calls are timed together, each with arrays of its own.
        benchmark: Whose ways are wanted.
        other_bytes: Memory that each rank writes before each step, as the rest of a training step does.
    """

    kind: str
    name: str
    shapes: tuple[tuple[int, ...], ...]
    calls: int = 1
    benchmark: str = "all_reduce"
    other_bytes: int = 0

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
        array[...] = pattern_at(0, array.size).reshape(array.shape)
        array += rank


def pattern_at(start: int, count: int) -> Any:
    """Return what `write_pattern` writes on rank 0 into `count` elements from `start` on."""
    return np.resize(np.roll(np.arange(_PATTERN, dtype=np.float32), -(start % _PATTERN)), count)
