"""Values that have a component on each replica: `PerReplica`, `Mirrored`.

A rank carries one replica, so a distributed value holds a tuple of one component: this rank's.
"""

from __future__ import annotations

from abc import ABC
from typing import Any, final

from mpidist import nest

__all__ = ["DistributedValues", "Mirrored", "PerReplica", "local", "open_nest"]


class DistributedValues(ABC):
    """A value with one component per replica, of which this rank holds its own.

    Args:
        values: This rank's components, as a list or tuple. A rank carries one replica, so there is one.

    Raises:
        TypeError: If `values` is neither a list nor a tuple.
        ValueError: If it does not hold exactly one component.
    """

    def __init__(self, values: tuple[Any, ...] | list[Any]) -> None:
        kind = type(self).__name__
        if kind == "DistributedValues":
            raise TypeError("DistributedValues is abstract: make a PerReplica or a Mirrored")
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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._values!r})"


@final
class PerReplica(DistributedValues):
    """A value whose components may differ from replica to replica."""


@final
class Mirrored(DistributedValues):
    """A value whose components are the same on every replica."""


def local(value: Any) -> Any:
    """Return this rank's component of a distributed value, and anything else as it is."""
    return value.values[0] if isinstance(value, DistributedValues) else value


def open_nest(value: Any) -> Any:
    """Replace every distributed value in a nest by this rank's component; a nest without any stays the same object."""
    leaves, _ = nest.flatten(value)
    if not any(isinstance(leaf, DistributedValues) for leaf in leaves):
        return value
    return nest.rebuild(value, [local(leaf) for leaf in leaves])
