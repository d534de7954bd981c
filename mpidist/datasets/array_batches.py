"""Global batches of arrays, in an order that follows from a seed and the number of the epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import numpy as np

from mpidist import nest
from mpidist.errors import InvalidArgumentError
from mpidist.whole_number import require_bool, whole_number

__all__ = ["Batches", "UnreadRows"]


@final
class Batches:
    """Global batches of rows of arrays, shuffled anew for each epoch: a data set for `experimental_distribute_dataset`.

    The order of epoch `e` is that of `numpy.random.default_rng([seed, e])`: it depends neither on the number of passes
    that a rank has made, nor on the number of ranks, nor on the batch size.

    Args:
        data: An array, or a nest of arrays of one length on axis 0. Also memory-mapped ones, and those of h5py and
            zarr: of what is no array of memory, each rank reads its own rows alone, in the order in which they lie.
        batch_size: Rows in each global batch; the last one may have fewer. Also an attribute.
        seed: Shuffles; `None` keeps the order of the rows. Also an attribute.
        drop_remainder: Whether to leave a last batch out that has fewer rows.

    Attributes:
        num_samples: The number of rows.

    Raises:
        InvalidArgumentError: If arrays have unlike lengths, or there are none.
        TypeError: If `batch_size` or `seed` is no whole number, or `drop_remainder` no bool.
        ValueError: If `batch_size` is less than 1, or `seed` less than 0.
    """

    def __init__(self, data: Any, batch_size: int, *, seed: int | None = None, drop_remainder: bool = False) -> None:
        if isinstance(data, Mapping) and hasattr(data, "close"):  # a file, such as one of h5py or NumPy
            data = dict(data)
        self._data, self._leaves = data, nest.flatten(data)[0]
        lengths = [_length(leaf) for leaf in self._leaves]
        if not lengths:
            raise InvalidArgumentError(f"Batches: needed an array or a nest of arrays, got {data!r}, which has none")
        if len(set(lengths)) != 1:
            raise InvalidArgumentError(f"Batches: arrays must be equally long on axis 0, got lengths {lengths}")
        self.batch_size = whole_number("Batches: batch_size", batch_size, 1)
        self.seed = None if seed is None else whole_number("Batches: seed", seed, 0)
        require_bool("Batches: drop_remainder", drop_remainder)
        self.num_samples = lengths[0]
        self._drops_remainder = drop_remainder

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        rounding = 0 if self._drops_remainder else self.batch_size - 1
        return (self.num_samples + rounding) // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        return self.iter_from(0, 0)

    def iter_from(self, epoch: int, num_samples: int) -> Iterator[Any]:
        """Iterate over the rest of an epoch. Local.

        Args:
            epoch: The number of the epoch, from 0.
            num_samples: How many samples of it to leave out, at its beginning.

        Returns:
            An iterator over batches.
        """
        return (nest.map_structure(_read, batch) for batch in self.unread_from(epoch, num_samples))

    def unread_from(self, epoch: int, num_samples: int) -> Iterator[Any]:
        """Iterate as `iter_from` does, but let rows in files be read when a batch is sliced. Local.

        So each rank reads its own rows alone.
        """
        order = np.arange(self.num_samples)
        if self.seed is not None:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
        stop = self.num_samples - (self.batch_size - 1 if self._drops_remainder else 0)
        for start in range(num_samples, stop, self.batch_size):
            rows = order[start : start + self.batch_size]
            yield nest.rebuild(self._data, [_take(leaf, rows) for leaf in self._leaves])


@final
class UnreadRows:
    """Rows of an array in a file, as of h5py or zarr, by their numbers: slicing reads the rows of the slice alone.

    The array takes increasing row numbers.
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


def _length(leaf: Any) -> int:
    if hasattr(leaf, "iloc"):
        kind = type(leaf).__name__
        raise InvalidArgumentError(f"Batches: a {kind} takes row numbers as labels of its index; pass its to_numpy()")
    shape = getattr(leaf, "shape", ())
    if not shape:
        raise InvalidArgumentError(f"Batches: each leaf must be an array with rows, got {type(leaf).__name__}")
    return int(shape[0])


def _take(leaf: Any, numbers: np.ndarray[Any, Any]) -> Any:
    """Return rows of an array; of what lies in a file, `UnreadRows`."""
    return leaf[numbers] if hasattr(leaf, "__dlpack__") else UnreadRows(leaf, numbers)


def _read(leaf: Any) -> Any:
    return leaf[:] if isinstance(leaf, UnreadRows) else leaf
