"""How ranks share the batches of a data set: each a part of every global batch, or each batches of its own."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Final, final

import numpy as np

from mpidist import nest
from mpidist.errors import InvalidArgumentError
from mpidist.transport import arrays, shard_bounds

__all__ = ["GlobalBatches", "OwnBatches", "SharedBatches", "empty_like", "require_batches"]

_ROW_BY_ROW: Final = "put batches in a list: [batch, ...]"
_IN_STEP: Final = "Let all ranks stop at the same step, by a value that is reduced over ranks"


class SharedBatches(ABC):
    """The batches of a data set, and how ranks share them.

    Attributes:
        source: A re-iterable of batches.
        advice: What people can do if ranks differ at a step.
    """

    advice: str

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source

    @abstractmethod
    def part_of(self, batch: Any) -> Any:
        """Return this rank's part of a batch.

        Raises:
            InvalidArgumentError: If the batch cannot be cut.
        """

    @abstractmethod
    def common(self, batch: Any, is_first: bool) -> dict[str, str]:
        """Say what of a batch all ranks must have alike, by name.

        Args:
            batch: The batch, as the source gave it.
            is_first: Whether the batch is the first one of a pass.
        """

    @property
    @abstractmethod
    def end(self) -> dict[str, str]:
        """What a rank has in the place of `common` when it has run out of batches."""


@final
class GlobalBatches(SharedBatches):
    """Batches that are the same on every rank: each rank takes the contiguous part of its place.

    Args:
        source: A re-iterable of global batches: nests of arrays that are equally long on axis 0.
        rank: This rank.
        size: Number of ranks.
        compares_numbers: Whether ranks compare a checksum of the first batch of each pass.
    """

    advice = (
        f"{_IN_STEP}. Give every rank the same global batches: seed alike what shuffles them, and copy a part, which "
        "is a view of its batch, before you change the part in place"
    )

    def __init__(self, source: Iterable[Any], rank: int, size: int, compares_numbers: bool) -> None:
        super().__init__(source)
        self._rank, self._size = rank, size
        self._compares_numbers = compares_numbers

    def part_of(self, batch: Any) -> Any:
        leaves, _ = nest.flatten(batch)
        bounds = shard_bounds(_length_of(leaves), self._size)
        start, stop = bounds[self._rank], bounds[self._rank + 1]
        return nest.rebuild(batch, [leaf[start:stop] for leaf in leaves])

    def common(self, batch: Any, is_first: bool) -> dict[str, str]:
        leaves, _ = nest.flatten(batch)
        fields = {"global batch": f"{_length_of(leaves)} rows"}
        if is_first and self._compares_numbers and self._size > 1:
            fields["checksum of the first batch"] = f"{_checksum(leaves):08x}"
        return fields

    @property
    def end(self) -> dict[str, str]:
        return {"global batch": "none"}


@final
class OwnBatches(SharedBatches):
    """Batches that each rank made by itself, taken as they are. Ranks may run out of batches at different steps."""

    advice = _IN_STEP

    def part_of(self, batch: Any) -> Any:
        return batch

    def common(self, batch: Any, is_first: bool) -> dict[str, str]:
        return {}

    @property
    def end(self) -> dict[str, str]:
        return {}


def require_batches(source: Any) -> None:
    """Refuse what is no re-iterable of batches.

    Raises:
        TypeError: If `source` cannot be iterated again and again, or is one batch.
    """
    kind = type(source).__name__
    if isinstance(source, Mapping):
        raise TypeError(f"a data set is an iterable of batches, and this {kind} is one batch; {_ROW_BY_ROW}")
    if isinstance(source, tuple) and source and all(_is_array(item) for item in source):
        raise TypeError(
            f"a data set is an iterable of batches, and a tuple of {len(source)} arrays may be one batch of "
            f"{len(source)} arrays; {_ROW_BY_ROW}"
        )
    if _is_array(source):
        raise TypeError(
            f"a data set is an iterable of batches, and this {kind} is one array, which would be taken row by row; "
            f"{_ROW_BY_ROW}"
        )
    if isinstance(source, (str, bytes)) or not (hasattr(source, "__iter__") or hasattr(source, "__getitem__")):
        raise TypeError(f"a data set is an iterable of batches, got {kind}")
    if hasattr(source, "__next__"):
        raise TypeError(
            f"a data set must be one that can be iterated again, and a {kind} is used up after "
            "one pass; pass a list, or an object whose __iter__ starts anew"
        )


def empty_like(leaf: Any) -> Any:
    """Return an array like a batch, of length 0 on axis 0; a number counts as a row of its own."""
    if not hasattr(leaf, "shape") or leaf.shape == ():
        return np.empty(0, np.asarray(leaf).dtype)
    return leaf[:0]


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") or hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")


def _length_of(leaves: list[Any]) -> int:
    rows = [np.asarray(leaf) if isinstance(leaf, (int, float, np.generic)) else leaf for leaf in leaves]
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in rows]
    lengths = {shape[0] if shape else -1 for shape in shapes}
    if len(lengths) != 1 or -1 in lengths:
        raise InvalidArgumentError(
            f"a global batch must be arrays that are equally long on axis 0, got shapes {[list(s) for s in shapes]}; "
            f"if this is one batch taken apart, {_ROW_BY_ROW}"
        )
    return int(lengths.pop())


def _checksum(leaves: list[Any]) -> int:
    """Return a number that is the same for equal arrays of host memory. What has to be read from elsewhere is not."""
    checksum = 0
    for leaf in leaves:
        library = arrays.library_of(leaf) if isinstance(leaf, np.ndarray) or hasattr(leaf, "__dlpack__") else None
        array = None if library is None else library.to_native(leaf)
        if array is None or arrays.is_device(array) or array.dtype.hasobject:
            continue
        checksum = zlib.crc32(f"{array.dtype.str}{array.shape}".encode(), checksum)
        checksum = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, checksum)
    return checksum
