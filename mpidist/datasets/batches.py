"""The batches of a data set: a part of every global batch for each replica, or batches of a rank's or replica's own."""

from __future__ import annotations

import numbers
import sys
import threading
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain, islice, zip_longest
from typing import Any, Final, NamedTuple, cast, final

import numpy as np

from mpidist import nest
from mpidist.datasets.array_batches import UnreadRows
from mpidist.datasets.parts import MISSING, spec_of
from mpidist.errors import InvalidArgumentError
from mpidist.replicas import Replicas
from mpidist.transport import arrays
from mpidist.transport.array_libraries.libraries import library_of
from mpidist.transport.communicator import shard_bounds

__all__ = [
    "BatchSource",
    "GlobalBatches",
    "Step",
    "WholeBatches",
    "advice_for",
    "order_fields_of",
    "require_batches",
    "without_first",
]

_PUT_IN_A_LIST: Final = "put batches in a list: [batch, ...]"
_NEST: Final = "nest of the first batch"
_FORM: Final = "form of the first batch"
_MAX_ARRAYS: Final = 8  # that a text names
# By a pipeline, which may be that of several data sets: `BatchSource.left`.
_left: Final[weakref.WeakKeyDictionary[Any, weakref.WeakSet[threading.Thread]]] = weakref.WeakKeyDictionary()

# What users can do if ranks differ in the number of batches or rows, in their form, or content.
_SAME_SIZES: Final = (
    "Give every rank the same global batches: as many, with as many rows. Compare what the ranks read: files, rows and "
    "batch size"
)
_SAME_FORM: Final = (
    "Give every rank the same global batches: as many arrays, in nests of one form, with the same dtypes and shapes. "
    "Compare what the ranks read"
)
_SAME_CONTENT: Final = (
    "Give every rank the same global batches: shuffle with the same seed on all ranks, and copy a part, which is a "
    "view of its batch, before you change the part in place"
)


@final
class Step(NamedTuple):
    """Batches of this rank at a step.

    `parts` are those of this rank's replicas: `MISSING` for a replica whose own batches have ended. `num_seen` is how
    much of the pass the step is, on all ranks, and `common_fields` must be equal on all ranks, by name.
    """

    parts: Sequence[Any]
    num_seen: int
    common_fields: Mapping[str, str] = {}


class BatchSource(ABC):
    """The batches of a data set, and which parts of them are those of this rank's replicas.

    Each of this rank's pipelines is a re-iterable of batches. `order_fields` determine their order, by name,
    besides the epoch, as JSON can hold it. `unit` is the unit of the position in a pass: `"samples"`, `"steps"`
    or `"batches"`. `end` is the step of a rank that has no batch left, while others have. `left`: of each pipeline
    whose passes share an iterator, the threads that read ahead in those that were left.
    """

    unit: str
    end: Step

    def __init__(self, pipelines: Sequence[Any], order_fields: Mapping[str, int]) -> None:
        self._pipelines, self.order_fields = pipelines, order_fields
        shared = [one for one in pipelines if getattr(one, "persistent_workers", False)]  # a DataLoader of PyTorch
        self.left = [_left_of(one) for one in shared]

    @abstractmethod
    def steps_from(self, epoch: int, num_seen: int) -> Iterator[Step]:
        """Read the rest of a pass. Local."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of steps that give this rank a batch; refuse batches without a length."""

    @property
    def element_spec(self) -> Any:
        """The form of a batch for one replica: the `element_spec` of the batches, or that of the first one. Local."""
        spec = getattr(self._pipelines[0], "element_spec", None)
        if spec is not None:
            return spec
        for step in self.steps_from(0, 0):
            return nest.map_structure(spec_of, next(part for part in step.parts if part is not MISSING))
        raise ValueError("an empty data set has no element_spec")


@final
class GlobalBatches(BatchSource):
    """Batches that are the same on every rank: replica i takes the i-th contiguous part of each.

    `compares_numbers`: whether ranks compare a checksum of the first batch of each pass.
    """

    unit = "samples"
    end = Step((), 1, {"global batch": "none"})

    def __init__(self, batches: Iterable[Any], replicas: Replicas, compares_numbers: bool) -> None:
        super().__init__([batches], order_fields_of(batches))
        self._replicas, self._compares_numbers = replicas, compares_numbers

    def steps_from(self, epoch: int, num_seen: int) -> Iterator[Step]:
        for number, batch in enumerate(self._batches_from(epoch, num_seen)):
            leaves, form = nest.flatten(batch)
            length = _length_of(leaves, form)
            bounds = shard_bounds(length, self._replicas.total)
            parts = []
            for replica_id in self._replicas.ids_here:
                start, stop = bounds[replica_id], bounds[replica_id + 1]
                parts.append(nest.rebuild(batch, [leaf[start:stop] for leaf in leaves]))
            fields = {"global batch": f"{length} rows"}
            if number == 0 and self._compares_numbers:
                fields[_NEST] = nest.form_text(form)
                fields[_FORM] = _listed([f"{getattr(leaf, 'dtype', 'rows')}{list(leaf.shape[1:])}" for leaf in leaves])
                fields["checksum of the first batch"] = f"{_checksum(leaves):08x}"
            yield Step(parts, length, fields)

    def _batches_from(self, epoch: int, num_seen: int) -> Iterable[Any]:
        (batches,) = self._pipelines
        iter_from = getattr(batches, "unread_from", getattr(batches, "iter_from", None))
        if callable(iter_from):
            return cast("Iterable[Any]", iter_from(epoch, num_seen))
        return without_first(batches, num_seen) if num_seen else cast("Iterable[Any]", batches)

    def __len__(self) -> int:
        return _num_batches(self._pipelines[0])


@final
class WholeBatches(BatchSource):
    """Batches that replicas get as they are, and that differ between ranks. Their numbers may differ, too.

    A step takes `num_per_step` batches from each pipeline, each for another replica of this rank. If ranks share one
    pipeline, a step takes one for each replica of all ranks, and the replicas of this rank get those of `ids_here`.
    """

    def __init__(
        self,
        pipelines: Sequence[Iterable[Any]],
        num_per_step: int,
        order_fields: Mapping[str, int],
        ids_here: range | None = None,
    ) -> None:
        super().__init__(pipelines, order_fields)
        self._num_per_step = num_per_step
        self._own = range(num_per_step) if ids_here is None else ids_here  # which batches of a pipeline at a step
        self.unit = "steps" if ids_here is None else "batches"
        self.end = Step((), 1 if ids_here is None else num_per_step)

    def steps_from(self, epoch: int, num_seen: int) -> Iterator[Step]:
        num_before = num_seen * self._num_per_step // self.end.num_seen
        rests = [_rest_of_pipeline(pipeline, epoch, num_before) for pipeline in self._pipelines]
        for parts in zip_longest(*(one for one in map(self._own_of, rests) for _ in self._own), fillvalue=MISSING):
            yield Step(parts, self.end.num_seen)

    def _own_of(self, batches: Iterator[Any]) -> Iterator[Any]:
        return (batch for number, batch in enumerate(batches) if number % self._num_per_step in self._own)

    def __len__(self) -> int:
        return max(
            -(-max(0, _num_batches(pipeline) - self._own[0]) // self._num_per_step) for pipeline in self._pipelines
        )


def advice_for(everyone: Sequence[Mapping[str, str]]) -> str:
    """Return advice for users if ranks differ at a step in their `common_fields`, which global batches have."""
    if len({fields.get("global batch") for fields in everyone}) > 1:
        return _SAME_SIZES
    return _SAME_CONTENT if len({(fields.get(_NEST), fields.get(_FORM)) for fields in everyone}) == 1 else _SAME_FORM


def order_fields_of(batches: Iterable[Any], *others: str) -> dict[str, int]:
    """Return the fields of an iterable of batches that determine their order."""
    told = {name: getattr(batches, name, None) for name in ("seed", "num_samples", "num_files", *others)}
    return {name: int(it) for name, it in told.items() if isinstance(it, numbers.Integral)}


def _left_of(pipeline: Any) -> weakref.WeakSet[threading.Thread]:
    threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
    try:
        return _left.setdefault(pipeline, threads)
    except TypeError:  # it has no hash, or no weak references: each data set of it has its own
        return threads


def require_batches(batches: Any, may_be_used_up: bool = False) -> None:
    """Require a re-iterable of batches. `may_be_used_up`: one pass will do, as that of a generator."""
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
    torch_data: Any = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(batches, torch_data.Dataset) and not hasattr(batches, "__iter__"):
        advice = "pass a DataLoader of it, with batch_size=None if items are batches"
        raise TypeError(f"a data set is an iterable of batches, and a {kind} has items; {advice}")
    if isinstance(batches, (str, bytes)) or not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise TypeError(f"a data set is an iterable of batches, got {kind}")
    if hasattr(batches, "__next__") and not may_be_used_up:
        raise TypeError(
            f"a data set must be one that can be iterated again, and a {kind} is used up after "
            "one pass; pass a list, or an object whose __iter__ starts anew"
        )


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") or hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")


def _num_batches(batches: Any) -> int:
    if not isinstance(batches, Sized):
        raise TypeError(f"the source of this data set, a {type(batches).__name__}, has no len()")
    return len(batches)


def _rest_of_pipeline(pipeline: Any, epoch: int, num_batches: int) -> Iterator[Any]:
    """Iterate over an epoch of a pipeline without its first batches, unread if it has their number of samples."""
    if not callable(getattr(pipeline, "iter_from", None)):
        return islice(pipeline, num_batches, None) if num_batches else iter(pipeline)
    batch_size = getattr(pipeline, "batch_size", None)
    if batch_size is None:
        return islice(pipeline.iter_from(epoch, 0), num_batches, None)
    return iter(pipeline.iter_from(epoch, num_batches * batch_size))


def without_first(batches: Iterable[Any], num_samples: int) -> Iterator[Any]:
    """Iterate over global batches without their first samples, which may end in the middle of a batch."""
    left = num_samples
    for batch in batches:
        leaves, form = nest.flatten(batch)
        skipped = min(left, _length_of(leaves, form)) if left else 0
        left -= skipped
        if not skipped:
            yield batch
        elif skipped < _length_of(leaves, form):
            yield nest.rebuild(batch, [leaf[skipped:] for leaf in leaves])
    if left:
        raise InvalidArgumentError(
            f"the position is {num_samples} samples into a pass, and the data set has {num_samples - left}: it is "
            "another data set than the one whose position was saved; restore without it"
        )


def _length_of(leaves: list[Any], form: nest.Structure) -> int:
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
    lengths = {shape[0] if shape else -1 for shape in shapes}
    if len(lengths) != 1 or -1 in lengths:
        got = [
            f"{name}: {list(leaf.shape) if hasattr(leaf, 'shape') else type(leaf).__name__}"
            for name, leaf in zip(nest.array_names(form), leaves, strict=True)
        ]
        advice = f"if these are the arrays of one batch, {_PUT_IN_A_LIST}"
        if leaves and form is not nest.LEAF and all(isinstance(leaf, numbers.Number) for leaf in leaves):
            advice = "make an array of each list of numbers, as by np.asarray"
        raise InvalidArgumentError(
            f"a global batch must be arrays that are equally long on axis 0, got {_listed(got) or 'no array'}; {advice}"
        )
    return int(lengths.pop())


def _listed(texts: list[str]) -> str:
    """Join the texts of a batch's arrays; of many, the first ones."""
    rest = len(texts) - _MAX_ARRAYS
    return ", ".join(texts[:_MAX_ARRAYS]) + (f" and {rest} more" if rest > 0 else "")


def _checksum(leaves: list[Any]) -> int:
    """Return a number that is the same for equal arrays. Objects, and arrays outside of host memory, are left out.

    Of rows that are read when they are needed it is the order, and not the numbers in them.
    """
    checksum = 0
    for leaf in chain.from_iterable(map(_unmasked, leaves)):
        leaf = leaf.detach() if hasattr(leaf, "requires_grad") else leaf  # of PyTorch, which exports no other
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
    """Return a masked array as its mask and the rest: masked elements may differ where the others are equal."""
    return [np.ma.getmaskarray(leaf), leaf.filled()] if isinstance(leaf, np.ma.MaskedArray) else [leaf]


def _without_padding(array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Return an array as arrays whose every byte is significant: padding may differ where numbers are equal."""
    if array.dtype.names is not None:
        return [part for name in array.dtype.names for part in _without_padding(array[name])]
    return [arrays.without_padding(array)]
