"""Into how many shards a variable is cut along its first axis, so that several servers hold it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, final

import numpy as np

from mpidist.whole_number import whole_number

__all__ = [
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
    "num_shards_of",
]


class Partitioner(ABC):
    """Chooses a number of shards. Called as `partitioner(shape=..., dtype=...)`, as in TensorFlow."""

    @final
    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of shards along each axis: 1, but for axis 0."""
        if axis != 0:
            raise ValueError(f"{type(self).__name__} cuts variables along axis 0, got axis {axis}")
        shape = tuple(int(length) for length in shape)
        return [max(1, min(self._num_shards(shape, np.dtype(dtype)), shape[0])), *[1] * (len(shape) - 1)]

    @abstractmethod
    def _num_shards(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
        """Return how many shards are wanted; fewer are made, if there are fewer rows."""


@final
class FixedShardsPartitioner(Partitioner):
    """As many shards as given, or as there are rows.

    Args:
        num_shards: The number of shards.

    Raises:
        TypeError: If the number is no whole number.
        ValueError: If the number is less than 1.
    """

    def __init__(self, num_shards: int) -> None:
        _require_positive(num_shards=num_shards)
        self._wanted = num_shards

    def _num_shards(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
        return self._wanted


@final
class MinSizePartitioner(Partitioner):
    """As many shards as possible of a least size.

    Args:
        min_shard_bytes: The least size of a shard.
        max_shards: The largest number of shards.
        bytes_per_string: Of no effect: no array here holds strings.

    Raises:
        TypeError: If a number is no whole number.
        ValueError: If a number is less than 1.
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16) -> None:
        _require_positive(min_shard_bytes=min_shard_bytes, max_shards=max_shards, bytes_per_string=bytes_per_string)
        self._min_bytes, self._max_shards = min_shard_bytes, max_shards

    def _num_shards(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
        total = prod(shape) * dtype.itemsize
        return min(self._max_shards, -(-total // self._min_bytes))


@final
class MaxSizePartitioner(Partitioner):
    """As few shards as possible of a largest size.

    Args:
        max_shard_bytes: The largest size of a shard, which a single row may exceed.
        max_shards: The largest number of shards; shards are larger then.
        bytes_per_string: Of no effect: no array here holds strings.

    Raises:
        TypeError: If a number is no whole number.
        ValueError: If a number is less than 1.
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16) -> None:
        given = {} if max_shards is None else {"max_shards": max_shards}
        _require_positive(max_shard_bytes=max_shard_bytes, bytes_per_string=bytes_per_string, **given)
        self._max_bytes, self._max_shards = max_shard_bytes, max_shards

    def _num_shards(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
        row_bytes = max(1, prod(shape[1:]) * dtype.itemsize)
        wanted = -(-shape[0] // max(1, self._max_bytes // row_bytes))
        return wanted if self._max_shards is None else min(wanted, self._max_shards)


def num_shards_of(partitioner: Callable[..., Any] | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Call a partitioner for the number of shards of a variable, and check the result."""
    if partitioner is None or not shape:
        return 1
    counts = partitioner(shape=shape, dtype=dtype)
    wrong = "variable_partitioner must return a list of a number of shards for each axis"
    if not isinstance(counts, (list, tuple)) or not counts or len(counts) > len(shape):
        raise ValueError(f"{wrong}, got {counts!r} for shape {list(shape)}")
    if counts[0] < 1 or any(count != 1 for count in counts[1:]):
        raise ValueError(f"{wrong}: at least 1 for axis 0, and 1 for all others; got {counts!r}")
    return max(1, min(int(counts[0]), shape[0]))


def _require_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        whole_number(name, number, 1)
