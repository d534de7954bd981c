"""The batches of a data set: a part of every global batch for each replica, or batches of a rank's or replica's own."""

from __future__ import annotations

import numbers
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain, islice, zip_longest
from typing import Any, Final, cast, final

import numpy as np

from mpidist import nest
from mpidist.datasets.parts import MISSING
from mpidist.datasets.unread_rows import UnreadRows
from mpidist.errors import InvalidArgumentError
from mpidist.replicas import Replicas
from mpidist.transport import arrays
from mpidist.transport.array_libraries.libraries import library_of
from mpidist.transport.communicator import shard_bounds

__all__ = [
    "IN_STEP",
    "BatchSource",
    "GlobalBatches",
    "OwnBatches",
    "WholeBatches",
    "num_batches",
    "order_fields_of",
    "require_batches",
    "rest_of_pipeline",
    "without_first",
]

_PUT_IN_A_LIST: Final = "put batches in a list: [batch, ...]"
_FORM: Final = "form of the first batch"
_MAX_ARRAYS: Final = 8  # that a form names

# What users can do if ranks differ in the step itself, in the number of batches or rows, in their form, or content.
IN_STEP: Final = "Let all ranks stop at the same step, by a value that is reduced over ranks"
_SAME_SIZES: Final = (
    "Give every rank the same global batches: as many, with as many rows. Compare what the ranks read: files, rows and "
    "batch size"
)
_SAME_FORM: Final = (
    "Give every rank the same global batches: as many arrays, with the same dtypes and shapes. Compare what the ranks "
    "read"
)
_SAME_CONTENT: Final = (
    "Give every rank the same global batches: shuffle with the same seed on all ranks, and copy a part, which is a "
    "view of its batch, before you change the part in place"
)


class BatchSource(ABC):
    """The batches of a data set, and which parts of them are those of this rank's replicas.

    Args:
        order_fields: What the order of the batches depends on, by name, besides the epoch. JSON can hold it. Also an
            attribute.

    Attributes:
        unit: What tells how much of a pass the program has had: `"samples"`, `"steps"` or `"batches"`.
        num_at_end: How much of a pass a step is where this rank has no batch left, and others have.
    """

    unit: str
    num_at_end = 1

    def __init__(self, order_fields: Mapping[str, int]) -> None:
        self.order_fields = order_fields

    @property
    @abstractmethod
    def batches(self) -> Iterable[Any]:
        """A re-iterable with what this rank reads at each step."""

    def steps_from(self, epoch: int, num_seen: int) -> Iterator[tuple[Any, int, Sequence[Any]]]:
        """Read what is left of a pass: at each step what this rank reads, how much it is, and `parts_of` it. Local.

        Args:
            epoch: The number of the pass.
            num_seen: How much of the pass to leave out, at its beginning.
        """
        for batch in self.batches_from(epoch, num_seen):
            yield batch, self.num_in(batch), self.parts_of(batch)

    @abstractmethod
    def batches_from(self, epoch: int, num_seen: int) -> Iterable[Any]:
        """Return what is left of a pass: what this rank reads at each step."""

    @abstractmethod
    def num_in(self, batch: Any) -> int:
        """Return how much of a pass a step's batch is."""

    @abstractmethod
    def parts_of(self, batch: Any) -> Sequence[Any]:
        """Return the part of each replica of this rank; `MISSING` for a replica whose own batches have ended.

        Args:
            batch: What this rank read at a step.

        Raises:
            InvalidArgumentError: If the batch cannot be cut.
        """

    @abstractmethod
    def common_fields(self, batch: Any, num_in_batch: int, is_first: bool) -> dict[str, str]:
        """Describe what must be equal on all ranks in a batch, by name.

        Args:
            batch: What this rank read at a step.
            num_in_batch: What `num_in` returned.
            is_first: Whether the batch is the first one of a pass.
        """

    @property
    @abstractmethod
    def end_fields(self) -> dict[str, str]:
        """What takes the place of `common_fields` after the last batch."""

    @abstractmethod
    def advice_for(self, everyone: list[dict[str, str]]) -> str:
        """Say what users can do if ranks differ at a step.

        Args:
            everyone: Each rank's `common_fields` or `end_fields`, which are not all equal.
        """


@final
class GlobalBatches(BatchSource):
    """Batches that are the same on every rank: replica i takes the i-th contiguous part of each.

    Args:
        batches: A re-iterable of global batches: nests of arrays of one length on axis 0.
        replicas: Which replicas this rank carries.
        compares_numbers: Whether ranks compare a checksum of the first batch of each pass.
    """

    unit = "samples"

    def __init__(self, batches: Iterable[Any], replicas: Replicas, compares_numbers: bool) -> None:
        super().__init__(order_fields_of(batches))
        self._batches, self._replicas = batches, replicas
        self._compares_numbers = compares_numbers

    @property
    def batches(self) -> Iterable[Any]:
        return self._batches

    def batches_from(self, epoch: int, num_seen: int) -> Iterable[Any]:
        batches: Any = self._batches
        if callable(getattr(batches, "unread_from", None)):
            return cast("Iterable[Any]", batches.unread_from(epoch, num_seen))
        if _tells_epoch(batches):
            return cast("Iterable[Any]", batches.iter_from(epoch, num_seen))
        return without_first(batches, num_seen) if num_seen else self._batches

    def num_in(self, batch: Any) -> int:
        return _length_of(nest.flatten(batch)[0])

    def parts_of(self, batch: Any) -> Sequence[Any]:
        leaves, _ = nest.flatten(batch)
        bounds = shard_bounds(_length_of(leaves), self._replicas.total)
        parts = []
        for replica_id in self._replicas.ids_here:
            start, stop = bounds[replica_id], bounds[replica_id + 1]
            parts.append(nest.rebuild(batch, [leaf[start:stop] for leaf in leaves]))
        return parts

    def common_fields(self, batch: Any, num_in_batch: int, is_first: bool) -> dict[str, str]:
        fields = {"global batch": f"{num_in_batch} rows"}
        if is_first and self._compares_numbers:
            leaves, _ = nest.flatten(batch)
            fields[_FORM] = _form_of(leaves)
            fields["checksum of the first batch"] = f"{_checksum(leaves):08x}"
        return fields

    @property
    def end_fields(self) -> dict[str, str]:
        return {"global batch": "none"}

    def advice_for(self, everyone: list[dict[str, str]]) -> str:
        if len({fields["global batch"] for fields in everyone}) > 1:
            return _SAME_SIZES
        return _SAME_CONTENT if len({fields.get(_FORM) for fields in everyone}) == 1 else _SAME_FORM


class WholeBatches(BatchSource, ABC):
    """Batches that replicas get as they are, and that differ between ranks. Their numbers may differ, too.

    What a rank reads at a step is a tuple, with `MISSING` for a replica that has no batch left.
    """

    @property
    def batches(self) -> Iterable[Any]:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches_from(0, 0))

    def parts_of(self, batch: Any) -> Sequence[Any]:
        return tuple(batch)

    def common_fields(self, batch: Any, num_in_batch: int, is_first: bool) -> dict[str, str]:
        return {}

    @property
    def end_fields(self) -> dict[str, str]:
        return {}

    def advice_for(self, everyone: list[dict[str, str]]) -> str:
        return IN_STEP


@final
class OwnBatches(WholeBatches):
    """Batches that each rank, or each replica, made by itself.

    Args:
        pipelines: This rank's input pipelines, re-iterables of batches.
        num_per_step: How many batches a step takes from each pipeline, each batch for another replica.
        order_fields: As in `BatchSource`.
    """

    unit = "steps"

    def __init__(self, pipelines: Sequence[Iterable[Any]], num_per_step: int, order_fields: Mapping[str, int]) -> None:
        super().__init__(order_fields)
        self._pipelines, self._num_per_step = pipelines, num_per_step

    def num_in(self, batch: Any) -> int:
        return 1

    def batches_from(self, epoch: int, num_seen: int) -> Iterable[Any]:
        passes = [rest_of_pipeline(pipeline, epoch, num_seen * self._num_per_step) for pipeline in self._pipelines]
        return zip_longest(*(one for one in passes for _ in range(self._num_per_step)), fillvalue=MISSING)

    def __len__(self) -> int:
        return max(-(-num_batches(pipeline) // self._num_per_step) for pipeline in self._pipelines)

    @property
    def element_spec(self) -> Any:
        return getattr(self._pipelines[0], "element_spec", None)


def order_fields_of(batches: Iterable[Any]) -> dict[str, int]:
    """Return what an iterable of batches tells about their order."""
    told = {name: getattr(batches, name, None) for name in ("seed", "num_samples", "num_files")}
    return {name: int(it) for name, it in told.items() if isinstance(it, numbers.Integral)}


def num_batches(batches: Iterable[Any]) -> int:
    """Return the length of an iterable of batches.

    Raises:
        TypeError: If it has no length.
    """
    if not isinstance(batches, Sized):
        raise TypeError(f"the source of this data set, a {type(batches).__name__}, has no len()")
    return len(batches)


def require_batches(batches: Any, may_be_used_up: bool = False) -> None:
    """Refuse what is no re-iterable of batches.

    Args:
        batches: The batches.
        may_be_used_up: Whether one pass will do, as that of a generator.

    Raises:
        TypeError: If `batches` cannot be iterated again and again, or is one batch.
    """
    kind = type(batches).__name__
    if isinstance(batches, Mapping):
        raise TypeError(f"a data set is an iterable of batches, and this {kind} is one batch; {_PUT_IN_A_LIST}")
    if isinstance(batches, tuple) and batches and all(_is_array(item) for item in batches):
        raise TypeError(
            f"a data set is an iterable of batches, and a tuple of {len(batches)} arrays may be one batch of "
            f"{len(batches)} arrays; {_PUT_IN_A_LIST}"
        )
    if _is_array(batches):
        raise TypeError(
            f"a data set is an iterable of batches, and this {kind} is one array, whose rows would be the batches; "
            f"{_PUT_IN_A_LIST}"
        )
    if isinstance(batches, (str, bytes)) or not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise TypeError(f"a data set is an iterable of batches, got {kind}")
    if hasattr(batches, "__next__") and not may_be_used_up:
        raise TypeError(
            f"a data set must be one that can be iterated again, and a {kind} is used up after "
            "one pass; pass a list, or an object whose __iter__ starts anew"
        )


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") or hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")


def _tells_epoch(batches: Any) -> bool:
    """Whether an iterable has `iter_from(epoch, num_samples)`, as `Batches` has."""
    return callable(getattr(batches, "iter_from", None))


def rest_of_pipeline(pipeline: Any, epoch: int, num_batches: int) -> Iterator[Any]:
    """Iterate over an epoch of a pipeline without its first batches, unread if it tells how many samples they are."""
    if not _tells_epoch(pipeline):
        return islice(pipeline, num_batches, None) if num_batches else iter(pipeline)
    batch_size = getattr(pipeline, "batch_size", None)
    if batch_size is None:
        return islice(pipeline.iter_from(epoch, 0), num_batches, None)
    return iter(pipeline.iter_from(epoch, num_batches * batch_size))


def without_first(batches: Iterable[Any], num_samples: int) -> Iterator[Any]:
    """Iterate over global batches without their first samples, which may end in the middle of a batch."""
    left = num_samples
    for batch in batches:
        leaves, _ = nest.flatten(batch)
        skipped = min(left, _length_of(leaves)) if left else 0
        left -= skipped
        if not skipped:
            yield batch
        elif skipped < _length_of(leaves):
            yield nest.rebuild(batch, [leaf[skipped:] for leaf in leaves])
    if left:
        raise InvalidArgumentError(
            f"the position is {num_samples} samples into a pass, and the data set has {num_samples - left}: it is "
            "another data set than the one whose position was saved; restore without it"
        )


def _length_of(leaves: list[Any]) -> int:
    rows = [np.asarray(leaf) if isinstance(leaf, (int, float, np.generic)) else leaf for leaf in leaves]
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in rows]
    lengths = {shape[0] if shape else -1 for shape in shapes}
    if len(lengths) != 1 or -1 in lengths:
        raise InvalidArgumentError(
            f"a global batch must be arrays that are equally long on axis 0, got shapes {[list(s) for s in shapes]}; "
            f"if these are the arrays of one batch, {_PUT_IN_A_LIST}"
        )
    return int(lengths.pop())


def _form_of(leaves: list[Any]) -> str:
    """Write the dtypes and shapes of a batch's arrays, without the number of rows."""
    forms = [f"{getattr(leaf, 'dtype', 'rows')}{list(leaf.shape[1:])}" for leaf in leaves[:_MAX_ARRAYS]]
    return ", ".join(forms) + (f" and {len(leaves) - _MAX_ARRAYS} more" if len(leaves) > _MAX_ARRAYS else "")


def _checksum(leaves: list[Any]) -> int:
    """Return a number that is the same for equal arrays. Objects, and arrays outside of host memory, are left out.

    Of rows that are read when they are needed it is the order, and not the numbers in them.
    """
    checksum = 0
    for leaf in chain.from_iterable(map(_unmasked, leaves)):
        if isinstance(leaf, UnreadRows):
            checksum = zlib.crc32(leaf.numbers.tobytes(), checksum)
        library = library_of(leaf) if isinstance(leaf, np.ndarray) or hasattr(leaf, "__dlpack__") else None
        array = None if library is None else library.to_native(leaf)
        if array is None or arrays.is_device(array) or array.dtype.hasobject:
            continue
        checksum = zlib.crc32(f"{array.dtype.str}{array.shape}".encode(), checksum)
        for part in _without_padding(array):
            checksum = zlib.crc32(arrays.bytes_of(np.ascontiguousarray(part)).data, checksum)
    return checksum


def _unmasked(leaf: Any) -> list[Any]:
    """Return a masked array as its mask and the rest: what is masked may differ where the others are equal."""
    return [np.ma.getmaskarray(leaf), leaf.filled()] if isinstance(leaf, np.ma.MaskedArray) else [leaf]


def _without_padding(array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Return an array as arrays whose every byte is significant: padding may differ where numbers are equal."""
    if array.dtype.names is not None:
        return [part for name in array.dtype.names for part in _without_padding(array[name])]
    if array.dtype.type in (np.longdouble, np.clongdouble):  # long doubles: 10 of 16 bytes are significant on x86
        with np.errstate(over="ignore"):
            return [array.astype(np.float64 if array.dtype.type is np.longdouble else np.complex128)]
    return [array]
