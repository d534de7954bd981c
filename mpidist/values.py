"""Values that have a component on each replica, and what a rank contributes to a reduction of them.

A rank carries one replica, so a distributed value holds one component: this rank's. Reductions take that component,
and refuse the sum of a mirrored value, which no rank contributes to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

import numpy as np

from mpidist import nest
from mpidist.options import ReduceOp

if TYPE_CHECKING:
    from mpidist.transport import SyncGroup

__all__ = [
    "DistributedValues",
    "IndexedSlices",
    "Mirrored",
    "PerReplica",
    "contribution",
    "contributions",
    "has_distributed",
    "is_mirrored",
    "local_component",
    "local_components",
    "require_contributions",
]


_DISTRIBUTED: Final[set[type]] = set()  # subclasses of DistributedValues; one set operation checks thousands of leaves


class DistributedValues(ABC):
    """A value with a component per replica; this rank holds its own one. `PerReplica`, `Mirrored`, `Variable`."""

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
        """The components of this rank: a tuple of one."""

    @abstractmethod
    def is_mirrored_over(self, group: SyncGroup) -> bool:
        """Whether all ranks of a group are known to hold equal components now, so that no rank contributes to a sum."""


class _Components(DistributedValues):
    """A distributed value that is made from its components.

    Args:
        values: This rank's components, a list or tuple of one, because a rank carries one replica.

    Raises:
        TypeError: If `values` is neither a list nor a tuple.
        ValueError: If `values` does not hold exactly one component.
    """

    def __init__(self, values: tuple[Any, ...] | list[Any]) -> None:
        kind = type(self).__name__
        if not isinstance(values, (list, tuple)):
            raise TypeError(f"{kind} takes a tuple of this rank's components, not {type(values).__name__}")
        if len(values) != 1:
            raise ValueError(
                f"{kind} must be given exactly one component, because a rank carries one replica; got {len(values)}"
            )
        self._values = tuple(values)

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of this rank: a tuple of one."""
        return self._values

    @abstractmethod
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Convert to a NumPy array, or refuse."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._values!r})"


@final
class PerReplica(_Components):
    """A value whose components may differ between replicas. It is no array: `values[0]` is this rank's component."""

    def is_mirrored_over(self, group: SyncGroup) -> bool:
        """Return False: components may differ."""
        return False

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        raise ValueError(
            "a PerReplica cannot be converted to an array, as each replica has another component: reduce or gather it, "
            "or take this rank's component, values[0]"
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
    """Some rows of an array: the argument of `Variable.scatter_add` and the other scatter methods.

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


def local_component(value: Any) -> Any:
    """Return this rank's component of a `PerReplica` or `Mirrored`; any other value, a variable too, unchanged."""
    return value.values[0] if isinstance(value, _Components) else value


def contribution(value: Any) -> Any:
    """Return what this rank contributes to a reduction of a value. Local.

    That is this rank's component of a distributed value; of a variable this rank's copy, a view to be read at once; any
    other value itself.
    """
    return value.values[0] if isinstance(value, DistributedValues) else value


def local_components(value: Any) -> Any:
    """Replace every `PerReplica` and `Mirrored` in a nest by this rank's component; variables stay variables.

    Returns the same object if the nest holds none of them.
    """
    return _map_distributed(local_component, value)


def contributions(value: Any) -> Any:
    """Replace every distributed value in a nest, variables too, by this rank's `contribution`.

    Returns the same object if the nest holds no distributed value.
    """
    return _map_distributed(contribution, value)


def _map_distributed(function: Callable[[Any], Any], value: Any) -> Any:
    leaves, _ = nest.flatten(value)
    if not has_distributed(leaves):
        return value
    mapped = [function(leaf) for leaf in leaves]
    return value if all(map(is_, leaves, mapped)) else nest.rebuild(value, mapped)


def has_distributed(leaves: Iterable[Any]) -> bool:
    """Whether a leaf is a distributed value."""
    return not _DISTRIBUTED.isdisjoint(map(type, leaves))


def is_mirrored(value: Any, group: SyncGroup) -> bool:
    """Whether a value is a distributed one whose components are equal on all ranks of a group."""
    return isinstance(value, DistributedValues) and value.is_mirrored_over(group)


def require_contributions(op: ReduceOp, leaves: Sequence[Any], group: SyncGroup) -> None:
    """Refuse SUM and PROD of values that are mirrored over several ranks: each would count once per rank.

    Raises:
        ValueError: If a leaf is mirrored, and `op` is SUM or PROD.
    """
    size = group.topology.size
    if size == 1 or op not in (ReduceOp.SUM, ReduceOp.PROD) or not has_distributed(leaves):
        return
    for leaf in leaves:
        if is_mirrored(leaf, group):
            what, instead = "Mirrored value", "the array that this rank contributes"
            if not isinstance(leaf, Mirrored):
                what, instead = f"mirrored variable, {leaf.name!r},", "its local_value(), if ranks differ in it"
            raise ValueError(
                f"a {what} is the same on all {size} ranks and is no rank's contribution, so its {op} has no meaning; "
                f"take the MEAN, or pass {instead}"
            )
