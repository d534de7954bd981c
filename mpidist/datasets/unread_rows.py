"""Rows of an array in a file that are read when they are asked for."""

from __future__ import annotations

from typing import Any, final

import numpy as np

__all__ = ["UnreadRows"]


@final
class UnreadRows:
    """Some rows of an array in a file, as of h5py or zarr: slicing reads the rows of the slice, and no others.

    Args:
        array: The array. It takes increasing row numbers.
        numbers: The numbers of the rows. Also an attribute.
    """

    def __init__(self, array: Any, numbers: np.ndarray[Any, Any]) -> None:
        self._array, self.numbers = array, numbers

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that all rows have together."""
        return (len(self.numbers), *self._array.shape[1:])

    def __getitem__(self, part: slice) -> Any:
        numbers = self.numbers[part]
        if not len(numbers):
            return self._array[:0]
        in_order, places = np.unique(numbers, return_inverse=True)
        first, last = int(in_order[0]), int(in_order[-1])
        if last - first + 1 == len(in_order):  # a slice is read much faster than a list of numbers
            return self._array[first : last + 1][places]
        return self._array[in_order][places]
