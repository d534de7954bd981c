"""Values that have a component on each replica, and what a rank contributes with them.

A rank carries one replica, so a distributed value holds one component: this rank's. Calls that combine ranks' values
see that component alone, and whether there is anything to combine: what is mirrored has no sum.
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
    "any_distributed",
    "contribution",
    "is_mirrored",
    "local",
    "open_arguments",
    "open_nest",
    "require_contributions",
]


_KINDS: Final[set[type]] = set()  # of distributed values: to find none among thousands of arrays takes no time


class DistributedValues(ABC):
    """A value with a component per replica, of which this rank holds its own: `PerReplica`, `Mirrored`, `Variable`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make one of a kind, as this class is none."""
        if cls is DistributedValues:
            raise TypeError("DistributedValues is abstract: make a PerReplica or a Mirrored")
        return super().__new__(cls)

    def __init_subclass__(cls) -> None:
        _KINDS.add(cls)

    @property
    @abstractmethod
    def values(self) -> tuple[Any, ...]:
        """The components of this rank: a tuple of one."""

    @abstractmethod
    def is_mirrored_over(self, group: SyncGroup) -> bool:
        """Whether all ranks of a group are known to hold the same here and now, so that none contributes anything."""


class _Components(DistributedValues):
    """A distributed value that was made from components.

    Args:
        values: This rank's components, as a list or tuple. A rank carries one replica, so there is one.

    Raises:
        TypeError: If `values` is neither a list nor a tuple.
        ValueError: If it does not hold exactly one component.
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
        """Say what NumPy sees."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._values!r})"


@final
class PerReplica(_Components):
    """A value whose components may differ from replica to replica. It is no array: `values[0]` is this rank's."""

    def is_mirrored_over(self, group: SyncGroup) -> bool:
        """Whether all ranks are known to hold the same: no."""
        return False

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        raise ValueError(
            "a PerReplica cannot be taken for an array, as each replica has another component: reduce or gather it, or "
            "take this rank's component, values[0]"
        )


@final
class Mirrored(_Components):
    """A value whose components are the same on every replica. NumPy sees this rank's."""

    def is_mirrored_over(self, group: SyncGroup) -> bool:
        """Whether all ranks are known to hold the same: yes."""
        return True

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self._values[0], dtype=dtype, copy=copy)


@final
class IndexedSlices:
    """Some rows of an array: what `Variable.scatter_add` and its like change.

    Args:
        values: The rows, [k, ...].
        indices: Which rows they are, [k] whole numbers. One may come several times.
        dense_shape: The shape of the whole array, if it is known.
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
        """Which rows they are, [k]."""
        return self._indices

    @property
    def dense_shape(self) -> tuple[int, ...] | None:
        """The shape of the whole array, if it is known."""
        return self._dense_shape

    def __repr__(self) -> str:
        return f"IndexedSlices(values={self._values!r}, indices={self._indices!r}, dense_shape={self._dense_shape!r})"


def local(value: Any) -> Any:
    """Return this rank's component of a `PerReplica` or `Mirrored`; anything else, a variable too, as it is."""
    return value.values[0] if isinstance(value, _Components) else value


def contribution(value: Any) -> Any:
    """Return what this rank contributes with a value: its component, its own copy of a variable, or the value itself.

    Local. What is returned for a variable is a view that must be read at once.
    """
    return value.values[0] if isinstance(value, DistributedValues) else value


def open_arguments(value: Any) -> Any:
    """Replace every `PerReplica` and `Mirrored` in a nest by this rank's component; variables stay variables.

    A nest without any stays the same object, and so does one without any for `open_nest`.
    """
    return _opened(value, local)


def open_nest(value: Any) -> Any:
    """Replace every distributed value in a nest, a variable too, by what this rank contributes with it."""
    return _opened(value, contribution)


def _opened(value: Any, open_leaf: Callable[[Any], Any]) -> Any:
    leaves, _ = nest.flatten(value)
    if not any_distributed(leaves):
        return value
    opened = [open_leaf(leaf) for leaf in leaves]
    return value if all(map(is_, leaves, opened)) else nest.rebuild(value, opened)


def any_distributed(leaves: Iterable[Any]) -> bool:
    """Whether there is a distributed value among leaves."""
    return not _KINDS.isdisjoint(map(type, leaves))


def is_mirrored(value: Any, group: SyncGroup) -> bool:
    """Whether all ranks of a group are known to hold the same value."""
    return isinstance(value, DistributedValues) and value.is_mirrored_over(group)


def require_contributions(op: ReduceOp, leaves: Sequence[Any], group: SyncGroup) -> None:
    """Refuse to add up or multiply what is mirrored over several ranks: it would count as often as there are ranks.

    Raises:
        ValueError: If one of the leaves is, and `op` is SUM or PROD.
    """
    size = group.topology.size
    if size == 1 or op not in (ReduceOp.SUM, ReduceOp.PROD) or not any_distributed(leaves):
        return
    for leaf in leaves:
        if is_mirrored(leaf, group):
            is_value = isinstance(leaf, Mirrored)
            raise ValueError(
                f"a {'Mirrored value' if is_value else f'mirrored variable, {leaf.name!r},'} is the same on all {size} "
                f"ranks and is no rank's contribution, so its {op} has no meaning; take the MEAN, or pass "
                f"{'the array that this rank contributes' if is_value else 'its local_value(), if ranks differ in it'}"
            )
