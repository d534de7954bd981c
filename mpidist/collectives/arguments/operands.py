"""The values that a caller passes, as native arrays. Errors name a wrong value by its path in the nest."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from operator import attrgetter
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist import nest
from mpidist.errors import InvalidArgumentError, InvalidTypeError
from mpidist.nest.text import paths
from mpidist.replicas import Replicas
from mpidist.transport import arrays
from mpidist.transport.array_libraries.libraries import library_of
from mpidist.transport.gpu.new_arrays import NewArrays
from mpidist.transport.group.device_levels import DeviceLevels
from mpidist.transport.half import is_of_numpy
from mpidist.transport.host_memory.result_memory import RecycledResults, ResultMemory, node_bytes
from mpidist.transport.text import count_text, size_text, value_text
from mpidist.values import (
    Contributions,
    DistributedValues,
    IndexedSlices,
    components_of,
    contribution,
    contributions,
    local_component,
)

__all__ = [
    "NO_OPERANDS",
    "NewResults",
    "Operands",
    "Spec",
    "axes_of",
    "axes_text",
    "axis_of",
    "host_sizes",
    "leaves_of_replicas",
    "messages_of",
    "native_dtype",
    "open_contributions",
    "replica_components",
    "require_memory",
    "require_values",
    "specs_along",
    "swapped",
    "symmetric_spec",
    "whole_axis",
    "axes_tuple",
]

_shape_of: Final = attrgetter("shape")
_dtype_of: Final = attrgetter("dtype")
_SMALL_BYTES: Final = 16 << 10  # two more copies of a larger array are no better than a message of its own
_MOST_SMALL: Final = 64
_KNOWN_TYPES: Final[set[type]] = {np.ndarray, float, int}  # types for whose values some library was found before


@final
class Spec(NamedTuple):  # a tuple, because every call hashes the specs of its arrays
    """Form of one array, equal on all ranks."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device: bool

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __repr__(self) -> str:
        name = "bf16" if self.dtype.name == "bfloat16" else f"{self.dtype.kind}{8 * self.dtype.itemsize}"
        has_name = self.dtype.kind in "mM" or not is_of_numpy(self.dtype)  # the names of times have their units
        if has_name and name != "bf16":
            name = self.dtype.name
        return f"{name}[{','.join(map(str, self.shape))}]{' on a GPU' * self.device}"


@final
class Operands:
    """The values of one call, as native arrays; of distributed values, this rank's component, or its own copy.

    Refuses values that are neither array nor number, and Python ints that do not fit in int64. If some lie on a GPU,
    checks that a call can use `devices` now: `DeviceLevels.require_usable`.

    Attributes:
        arrays: The native arrays. They may be the caller's memory and are only read.
        key: Equal for values of the same shapes and dtypes; a key of this rank's caches.
        are_on_gpu: Whether all values are native arrays on the current GPU; if not, some may be.
    """

    __slots__ = ("_is_plain", "_specs", "_values", "are_on_gpu", "arrays", "key")

    def __init__(self, values: Sequence[Any], devices: DeviceLevels | None = None, call: str = "") -> None:
        self._specs: tuple[Spec, ...] | None = None
        self.arrays: list[Any]
        self.key: Any
        self.are_on_gpu = False
        if len(values) == 1 and type(values[0]) is np.ndarray:  # the most common argument, with less work
            (array,) = values
            self._values, self._is_plain = values, True
            self.arrays = [array]
            self.key = array.shape, array.dtype
            return
        types = set(map(type, values))
        self._is_plain = types == {np.ndarray}
        if not self._is_plain:
            self._is_plain = self.are_on_gpu = arrays.are_native_of_gpu(types, values)
        if self._is_plain:
            self._values = values
            self.arrays = list(values)
        else:
            self._values = [contribution(value) for value in values]
            self.arrays = [_native(value) for value in self._values]
        if self._is_plain or set(map(type, self.arrays)) == {np.ndarray}:
            self.key = (*map(_shape_of, self.arrays), *map(_dtype_of, self.arrays), self.are_on_gpu)
        else:
            self.key = self.specs
        if devices is not None and (
            self.are_on_gpu or (not self._is_plain and any(map(arrays.is_device, self.arrays)))
        ):
            devices.require_usable(call)

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Shape, native dtype and kind of memory of each array."""
        if self._specs is None:
            self._specs = tuple(
                Spec(array.shape, native_dtype(array.dtype), arrays.is_device(array)) for array in self.arrays
            )
        return self._specs

    def with_arrays(self, replaced: list[Any]) -> Operands:
        """Return the same operands with other native arrays."""
        other = Operands.__new__(Operands)  # `copy` takes five times as long
        other.arrays, other.key, other.are_on_gpu = replaced, self.key, self.are_on_gpu
        other._specs, other._is_plain = self._specs, self._is_plain
        other._values = replaced if self._is_plain else self._values
        return other

    def restore(self, results: list[Any]) -> list[Any]:
        """Convert native results to the kinds of the values; `None` stays `None`."""
        if self._is_plain:
            return results
        return [
            result if result is None or type(value) is np.ndarray else library_of(value).from_native(result, value)
            for result, value in zip(results, self._values, strict=True)
        ]


NO_OPERANDS: Final = Operands([])


def native_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype in this machine's byte order."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


@final
class NewResults:
    """Makes new arrays for the results of equal calls: in recycled host memory, or in device memory."""

    def __init__(self, specs: Sequence[Spec], dtypes: Sequence[np.dtype[Any]], memory: ResultMemory) -> None:
        self._on_host, self._on_device = (
            [at for at, spec in enumerate(specs) if spec.device is device] for device in (False, True)
        )
        shapes, own = [specs[at].shape for at in self._on_host], [dtypes[at] for at in self._on_host]
        self._host = RecycledResults(memory, shapes, own)
        self._device = NewArrays([specs[at].shape for at in self._on_device], [dtypes[at] for at in self._on_device])

    def take(self) -> list[Any]:
        """Return C-contiguous arrays, uninitialised."""
        if not self._on_device:
            return list(self._host.take())
        if not self._on_host:
            return self._device.take()
        results: list[Any] = [None] * (len(self._on_host) + len(self._on_device))
        for indices, made in ((self._on_host, self._host.take()), (self._on_device, self._device.take())):
            for at, array in zip(indices, made, strict=True):
                results[at] = array
        return results


def host_sizes(specs: Sequence[Spec], dtypes: Sequence[np.dtype[Any]] | None = None) -> list[int]:
    """Return the bytes that each array takes of host memory, if it had another dtype: 0 for one in device memory."""
    dtypes = [spec.dtype for spec in specs] if dtypes is None else dtypes
    return [0 if spec.device else spec.num_elements * dtype.itemsize for spec, dtype in zip(specs, dtypes, strict=True)]


def messages_of(specs: Sequence[Spec], of_one_dtype: bool = False) -> list[list[int]]:
    """List the arrays of each message, by index: many small ones of host memory together, every other one alone."""
    small: dict[np.dtype[Any] | None, list[int]] = {}
    large = []
    for index, (spec, nbytes) in enumerate(zip(specs, host_sizes(specs), strict=True)):
        if 0 < nbytes <= _SMALL_BYTES:
            small.setdefault(spec.dtype if of_one_dtype else None, []).append(index)
        else:
            large.append([index])
    return [
        *(some[at : at + _MOST_SMALL] for some in small.values() for at in range(0, len(some), _MOST_SMALL)),
        *large,
    ]


def require_memory(nbytes: int, num_local_ranks: int) -> None:
    """Check that the new results of all ranks of this node, in host memory, can fit into the node at all. Local.

    Many systems promise more memory than they have, and kill a program once it writes there.
    """
    if nbytes > node_bytes():
        what = f"the results of the {count_text(num_local_ranks, 'rank')} of a node"
        raise MemoryError(
            f"{what} need {size_text(nbytes)} of new memory, and the node has {size_text(node_bytes())}; pass "
            f"fewer numbers at a time, or run fewer ranks on a node"
        )


def open_contributions(value: Any) -> tuple[Any, list[Any], nest.Structure]:
    """Replace each distributed value in a nest by this rank's `contribution`; return the nest, its leaves, its form."""
    leaves, structure = nest.flatten(value)
    if not _KNOWN_TYPES.issuperset(map(type, leaves)):
        value = contributions(value)
        leaves, structure = nest.flatten(value)
        require_values(leaves, value)
    return value, leaves, structure


def replica_components(call: str, leaf: Any, replicas: Replicas, may_repeat: bool = False) -> tuple[Any, ...]:
    """Return the contribution of each replica of this rank; refuse a leaf of no replica if replicas were chosen.

    `may_repeat`: it makes no difference how often a value counts, as in a minimum.
    """
    if isinstance(leaf, DistributedValues):
        components = components_of(leaf, replicas.num_here)
        if any(isinstance(one, (dict, list, tuple)) for one in components):  # nests of different forms
            Contributions(components).flatten(replicas.ids_here)
        return components
    if may_repeat or replicas.are_bare:
        return (leaf,) * len(replicas.ids_here)
    raise ValueError(
        f"{call} of {value_text(leaf)}: it is this rank's and no replica's, so it would count once for each rank. Pass "
        "a PerReplica, as strategy.run() returns, or make the call inside of strategy.run()"
    )


def leaves_of_replicas(
    call: str, value: Any, replicas: Replicas, may_repeat: bool = False
) -> tuple[list[list[Any]], Any, nest.Structure]:
    """Return [replicas of this rank][leaves], the first one's nest, and its form: see `replica_components`."""
    if replicas.are_bare and type(value) is not Contributions:
        value, leaves, structure = open_contributions(value)
        return [leaves], value, structure
    if isinstance(value, Contributions):
        of_replicas, structure = value.flatten(replicas.ids_here)
        first = value.nests[0]
    else:
        leaves, structure = nest.flatten(value)
        components = [replica_components(call, leaf, replicas, may_repeat) for leaf in leaves]  # [leaves][replicas]
        of_replicas = [[of_leaf[at] for of_leaf in components] for at in range(replicas.num_here)]
        first = nest.rebuild(value, of_replicas[0])
    for leaves in of_replicas:
        require_values(leaves, first)
    return of_replicas, first, structure


def require_values(leaves: Sequence[Any], value: Any) -> None:
    """Check that leaves of a nest are arrays or numbers; the error has a leaf's path in the nest. Local."""
    if type(value) is np.ndarray or _KNOWN_TYPES.issuperset(map(type, leaves)):
        return
    for leaf in leaves:
        if type(leaf) in _KNOWN_TYPES:
            continue
        try:
            library_of(local_component(leaf))
        except TypeError as error:
            raise _refusal(leaf, _path_of(leaf, value), str(error)) from None
        if not isinstance(leaf, DistributedValues):
            _KNOWN_TYPES.add(type(leaf))


def axis_of(axis: Any, shape: tuple[int, ...]) -> int:
    """Count an axis from the front; refuse one that the array does not have."""
    at = axis if type(axis) is int else whole_axis(axis)
    if not -len(shape) <= at < len(shape):
        what = f"an array of shape {list(shape)}" if shape else "a scalar"
        raise InvalidArgumentError(f"{what} has no axis {at}")
    return at % len(shape)


def specs_along(axes: Sequence[int], specs: Sequence[Spec], lengths: Sequence[int]) -> list[Spec]:
    """Return specs with other lengths along an axis of each."""
    return [
        spec._replace(shape=(*spec.shape[:at], int(length), *spec.shape[at + 1 :]))
        for spec, at, length in zip(specs, axes, lengths, strict=True)
    ]


def swapped(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """Return a shape with an axis in front, in whose place the first one is."""
    lengths = list(shape)
    lengths[0], lengths[axis] = lengths[axis], lengths[0]
    return tuple(lengths)


def axes_tuple(axis: Any) -> tuple[int, ...]:
    """Return an axis, or a tuple of axes, as a tuple."""
    if type(axis) is int:
        return (axis,)
    what = "a whole number or a tuple of them"
    return tuple(whole_axis(one, what) for one in axis) if isinstance(axis, tuple) else (whole_axis(axis, what),)


def axes_of(axes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Count axes from the front; refuse one that the array does not have, or that is given twice."""
    counted = tuple([axis_of(axis, shape) for axis in axes])
    if len(axes) > 1 and len(set(counted)) < len(axes):
        raise InvalidArgumentError(f"an axis is given twice in {axes}")
    return counted


def axes_text(axes: tuple[int, ...]) -> str:
    """Write axes as the caller gave them: `axis 0`, `axes (0, -1)`."""
    return f"axis {axes[0]}" if len(axes) == 1 else f"axes {axes}"


def _native(value: Any) -> Any:
    return value if type(value) is np.ndarray else library_of(value).to_native(value)


def _path_of(leaf: Any, value: Any) -> str:
    leaves, structure = nest.flatten(value)
    return next((path for path, one in zip(paths(structure), leaves, strict=True) if one is leaf), "")


def _refusal(leaf: Any, path: str, text: str) -> InvalidTypeError:
    if isinstance(local_component(leaf), IndexedSlices):
        text = (
            "IndexedSlices are for reduce, all_reduce and batch_reduce without axis and weight: call one of them (for "
            "a weighted mean, sum values times weights, and weights), or pass the arrays values and indices themselves"
        )
    if local_component(leaf) is not None:
        return InvalidTypeError(f"{path}: {text}" if path else text)
    if path:
        return InvalidTypeError(
            f"{path} is None, which is neither an array nor a number: leave the place out, on all ranks, or pass zeros"
        )
    return InvalidTypeError(
        "cannot take None, which a function without `return` gives, for example; needed an array, a number, or a nest "
        "of them"
    )


def whole_axis(axis: Any, what: str = "a whole number") -> int:
    """Return an axis of any type of whole numbers as an `int`."""
    try:
        if isinstance(axis, (bool, np.bool_)):
            raise TypeError
        return operator.index(axis)
    except TypeError:
        raise TypeError(f"axis must be {what}, got {value_text(axis)}") from None


def symmetric_spec(shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and the dtype of an array that ranks of a node share; refuse what cannot be one."""
    lengths = (shape,) if isinstance(shape, (int, np.integer)) else shape
    try:
        dims = tuple(map(operator.index, lengths))
    except TypeError:
        needed = "a whole number or a sequence of whole numbers, as (2, 3)"
        raise TypeError(f"symmetric_empty: the shape must be {needed}, got {shape!r}") from None
    try:
        native = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"symmetric_empty: the dtype must be one of NumPy's, as 'float32', got {dtype!r}") from None
    if any(length < 0 for length in dims):
        raise InvalidArgumentError(f"symmetric_empty: the lengths in the shape must be 0 or more, got {dims}")
    if native.hasobject:
        raise InvalidArgumentError(
            f"symmetric_empty: ranks cannot share Python objects, got dtype {native}; pass one of numbers, as 'float32'"
        )
    if prod(dims) * native.itemsize >= 1 << 62:
        raise InvalidArgumentError(
            f"symmetric_empty: an array of shape {dims} and dtype {native} is larger than any memory; ask for less"
        )
    return dims, native
