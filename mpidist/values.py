"""Values that have a component on each replica, and what the replicas of a rank contribute to a reduction of them.

A distributed value holds the components of this rank's replicas: one, unless the strategy puts several replicas on a
rank. Reductions take these components, and refuse the sum of a mirrored value, which no replica contributes to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

import numpy as np

from mpidist import nest
from mpidist.errors import InvalidArgumentError
from mpidist.options import ReduceOp

if TYPE_CHECKING:
    from mpidist.transport.group.sync_group import SyncGroup

__all__ = [
    "Contributions",
    "DistributedValues",
    "IndexedSlices",
    "Mirrored",
    "PerReplica",
    "ValueContext",
    "components_of",
    "contribution",
    "contributions",
    "has_distributed",
    "join_components",
    "is_mirrored",
    "local_component",
    "local_components",
    "require_contributions",
]


_DISTRIBUTED: Final[set[type]] = set()  # subclasses of DistributedValues; one set operation checks thousands of leaves


class DistributedValues(ABC):
    """A value with a component per replica; a rank holds those of its own. `PerReplica`, `Mirrored`, `Variable`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse to make an instance of the abstract class itself."""
        if cls is DistributedValues:
            raise TypeError("DistributedValues is abstract: make a PerReplica or a Mirrored")
        return super().__new__(cls)

    def __init_subclass__(cls) -> None:
        _DISTRIBUTED.add(cls)

    @property
    @abstractmethod
    def values(self) -> tuple[Any, ...]:
        """The components of this rank's replicas, in a tuple."""

    @abstractmethod
    def is_mirrored_over(self, group: SyncGroup) -> bool:
        """Whether all ranks of a group hold equal components now, for certain, so that no rank contributes to a sum."""


class _Components(DistributedValues):
    """A distributed value that is made of this rank's components: one, unless the rank carries several replicas."""

    def __init__(self, values: tuple[Any, ...] | list[Any]) -> None:
        if not isinstance(values, (list, tuple)):
            kind = type(self).__name__
            raise TypeError(f"{kind} takes a tuple of this rank's components, not {type(values).__name__}")
        if not values:
            raise ValueError(f"{type(self).__name__} must be given a component for each replica of this rank; got none")
        self._values = tuple(values)

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of this rank's replicas, in a tuple."""
        return self._values

    @abstractmethod
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Convert to a NumPy array, or refuse."""

    def __repr__(self) -> str:
        components = ", ".join(f"{at}: {component!r}" for at, component in enumerate(self._values))
        return f"{type(self).__name__}:{{{components}}}"


@final
class PerReplica(_Components):
    """A value whose components may differ between replicas. It is no array: `values[0]` is this rank's first one."""

    def is_mirrored_over(self, group: SyncGroup) -> bool:
        """Return False: components may differ."""
        return False

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        raise ValueError(
            "a PerReplica cannot be converted to an array, as each replica has another component: reduce or gather it, "
            "or take this rank's component, values[0]"
        )

    def __bool__(self) -> NoReturn:
        raise ValueError(
            "a PerReplica is neither true nor false, as each replica has another component: reduce it, or take this "
            "rank's component, values[0]"
        )


@final
class Mirrored(_Components):
    """A value whose components are equal on all replicas. As an array it is this rank's component."""

    def is_mirrored_over(self, group: SyncGroup) -> bool:
        """Return True: components are equal."""
        return True

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self._values[0], dtype=dtype, copy=copy)


@final
class IndexedSlices:
    """Some rows of an array: for `reduce`, `all_reduce`, `batch_reduce` and the `scatter_...` methods of variables.

    A sum or mean has the rows of all replicas, in their order. If an index occurs more than once, the rows are added,
    and are in the order of indices. With `axis`, `weight`, `out` and `start_all_reduce` they are refused.

    Args:
        values: The rows, [k, ...].
        indices: The numbers of the rows, [k] integers. A number may be repeated.
        dense_shape: The shape of the whole array, if known.
    """

    def __init__(self, values: Any, indices: Any, dense_shape: Iterable[int] | None = None) -> None:
        self._values = values
        self._indices = indices
        self._dense_shape = None if dense_shape is None else tuple(dense_shape)

    @property
    def values(self) -> Any:
        """The rows, [k, ...]."""
        return self._values

    @property
    def indices(self) -> Any:
        """The numbers of the rows, [k]."""
        return self._indices

    @property
    def dense_shape(self) -> tuple[int, ...] | None:
        """The shape of the whole array, if known."""
        return self._dense_shape

    def __repr__(self) -> str:
        return f"IndexedSlices(values={self._values!r}, indices={self._indices!r}, dense_shape={self._dense_shape!r})"


@final
@dataclass(eq=False)
class ValueContext:
    """The argument of the function of `experimental_distribute_values_from_function`.

    Args:
        replica_id_in_sync_group: The replica that the function makes a value for.
        num_replicas_in_sync: Number of replicas.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


@final
class Contributions:
    """What all replicas of this rank contribute to a call that they make together: nests without distributed values."""

    def __init__(self, nests: Sequence[Any]) -> None:
        self.nests = nests

    def flatten(self, replica_ids: Sequence[int]) -> tuple[list[list[Any]], nest.Structure]:
        """List the leaves of each replica's nest, and their common form; refuse nests of different forms."""
        flattened = [nest.flatten(value) for value in self.nests]
        first = flattened[0][1]
        for replica_id, (_, structure) in zip(replica_ids, flattened, strict=True):
            if structure != first:
                raise InvalidArgumentError(
                    f"replica {replica_id} passes {nest.form_text(structure)}, and replica {replica_ids[0]} "
                    f"{nest.form_text(first)}; all replicas must pass nests of one form"
                )
        return [leaves for leaves, _ in flattened], first


def local_component(value: Any, at: int = 0, num_replicas: int = 1) -> Any:
    """Return a component of a `PerReplica` or `Mirrored`; any other value, a variable too, unchanged.

    `at`: which of the `num_replicas` of this rank, counted from 0. A value must have one component for each of them.
    """
    return components_of(value, num_replicas)[at] if isinstance(value, _Components) else value


def contribution(value: Any) -> Any:
    """Return what this rank contributes to a reduction of a value, where a rank carries one replica. Local.

    That is this rank's component of a distributed value; of a variable this rank's copy, a view to be read at once; any
    other value itself.
    """
    return components_of(value, 1)[0] if isinstance(value, DistributedValues) else value


def components_of(value: DistributedValues, num_replicas: int) -> tuple[Any, ...]:
    """Return the components of a distributed value: one for each of this rank's replicas, or it is a `ValueError`."""
    values = value.values
    if len(values) == 1 and not isinstance(value, PerReplica):  # one for all replicas of the rank
        return values * num_replicas
    if len(values) != num_replicas:
        carries = "one replica" if num_replicas == 1 else f"{num_replicas} replicas"
        raise ValueError(
            f"this {type(value).__name__} has {len(values)} components, and this rank carries {carries}; make "
            "distributed values with experimental_distribute_values_from_function, or with a component for each replica"
        )
    return values


def join_components(nests: Sequence[Any], keeps_alike: bool = False) -> Any:
    """Join what each replica of this rank returned into one nest, whose leaves are `PerReplica` values.

    A leaf that is `None` on all replicas, or one variable on all, is itself. Nests of different forms are joined whole.
    If `keeps_alike`, any leaf that is the same on all replicas is itself, such as a text; but not arrays, numbers and
    `IndexedSlices`: whether these are the same may depend on how many replicas a rank carries.
    """
    first = nests[0]
    if type(first) is np.ndarray and (len(nests) == 1 or set(map(type, nests)) == {np.ndarray}):
        return PerReplica(tuple(nests))
    if first is None and (len(nests) == 1 or all(one is None for one in nests)):
        return None
    flattened = [nest.flatten(value) for value in nests]
    if any(structure != flattened[0][1] for _, structure in flattened):
        return PerReplica(tuple(nests))
    join = _joined_unless_alike if keeps_alike else _joined
    joined = [
        PerReplica(components) if type(components[0]) is np.ndarray else join(components)
        for components in zip(*(leaves for leaves, _ in flattened), strict=True)
    ]
    return nest.rebuild(nests[0], joined)


def _joined(components: tuple[Any, ...]) -> Any:
    first = components[0]
    is_shared = first is None or (type(first) in _DISTRIBUTED and not isinstance(first, _Components))
    if is_shared and all(component is first for component in components):
        return first
    return PerReplica(components)


def _joined_unless_alike(components: tuple[Any, ...]) -> Any:
    first = components[0]
    is_number = isinstance(first, (int, float, complex)) and not isinstance(first, bool)
    if isinstance(first, (DistributedValues, IndexedSlices)) or is_number or hasattr(first, "shape"):
        return _joined(components)
    with suppress(Exception):  # of objects whose comparison compares arrays
        if all(component is first or component == first for component in components):
            return first
    return _joined(components)


def local_components(value: Any, at: int = 0, num_replicas: int = 1) -> Any:
    """Replace every `PerReplica` and `Mirrored` in a nest by a component; variables stay variables.

    Returns the same object if the nest holds none of them. Arguments are those of `local_component`.
    """
    return _map_distributed(value, local_component, at, num_replicas)


def contributions(value: Any) -> Any:
    """Replace every distributed value in a nest, variables too, by this rank's `contribution`.

    Returns the same object if the nest holds no distributed value.
    """
    return _map_distributed(value, contribution)


def _map_distributed(value: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    kind = type(value)
    leaves = value if kind is list else value.values() if kind is dict else (value,)
    if set(map(type, leaves)) == {np.ndarray}:  # the most frequent nests, without a walk
        return value
    leaves, _ = nest.flatten(value)
    if not has_distributed(leaves):
        return value
    mapped = [function(leaf, *arguments) for leaf in leaves]
    return value if all(map(is_, leaves, mapped)) else nest.rebuild(value, mapped)


def has_distributed(leaves: Iterable[Any]) -> bool:
    """Whether a leaf is a distributed value."""
    return not _DISTRIBUTED.isdisjoint(map(type, leaves))


def is_mirrored(value: Any, group: SyncGroup) -> bool:
    """Whether a value is a distributed one whose components are equal on all ranks of a group."""
    return isinstance(value, DistributedValues) and value.is_mirrored_over(group)


def require_contributions(op: ReduceOp, leaves: Sequence[Any], group: SyncGroup, num_replicas: int) -> None:
    """Refuse SUM and PROD of values that are mirrored over several replicas: each would count once per replica."""
    if num_replicas == 1 or op not in (ReduceOp.SUM, ReduceOp.PROD) or not has_distributed(leaves):
        return
    for leaf in leaves:
        if is_mirrored(leaf, group):
            what, instead = "Mirrored value", "the array that this replica contributes"
            if not isinstance(leaf, Mirrored):
                what, instead = f"mirrored variable, {leaf.name!r},", "its local_value(), if replicas differ in it"
            raise ValueError(
                f"a {what} is the same on all {num_replicas} replicas and is no replica's contribution, so its {op} "
                f"has no meaning; take the MEAN, or pass {instead}"
            )
