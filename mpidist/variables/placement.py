"""Where the arrays of mirrored variables live: on each rank, or once for the ranks of a node."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, final

from mpidist.transport import Call, SyncGroup, arrays

__all__ = ["OnEachRank", "OncePerNode", "VariablePlacement"]


class VariablePlacement(ABC):
    """A part of a strategy: the place of its mirrored variables, and who writes there.

    Attributes:
        is_shared: Whether several ranks hold one array, so that no rank can write it alone.
    """

    is_shared: bool

    @abstractmethod
    def for_value(self, value: Any) -> VariablePlacement:
        """Return the placement of a variable with this initial value: this one, or another that can hold it. Local."""

    @abstractmethod
    def store(self, value: Any) -> Any:
        """Return the array that holds a new variable's value. Collective, if `is_shared`.

        Args:
            value: A native array, the same on all ranks, that nobody else keeps.
        """

    @abstractmethod
    def write(self, name: str, change: Callable[[], None], error: Exception | None = None) -> None:
        """Change the array of a variable. Collective, if `is_shared`.

        Args:
            name: The variable.
            change: Writes the array, when no rank reads the old value any more.
            error: What is wrong with this rank's arguments: it is raised, if `is_shared` on all ranks.
        """


@final
class OnEachRank(VariablePlacement):
    """Each rank holds an array of its own, and writes it."""

    is_shared = False

    def for_value(self, value: Any) -> VariablePlacement:
        return self

    def store(self, value: Any) -> Any:
        return value

    def write(self, name: str, change: Callable[[], None], error: Exception | None = None) -> None:
        if error is not None:
            raise error
        change()


@final
class OncePerNode(VariablePlacement):
    """The ranks of a node hold one array in shared memory, which the first of them writes.

    Args:
        group: The ranks.
        timeout_seconds: How long a rank waits for others; `None` is the group's own deadline.
    """

    is_shared = True

    def __init__(self, group: SyncGroup, timeout_seconds: float | None) -> None:
        self._group = group
        self._timeout_seconds = timeout_seconds

    def for_value(self, value: Any) -> VariablePlacement:
        return OnEachRank() if arrays.is_device(value) else self  # device memory is not shared

    def store(self, value: Any) -> Any:
        with self._group.call(self._record("placing of a variable")):
            pass  # without enough memory the group stays usable
        (array,) = self._group.shared.empty([(value.shape, value.dtype)], True)
        self._group.shared.write(array, value)
        return array

    def write(self, name: str, change: Callable[[], None], error: Exception | None = None) -> None:
        with self._group.call(self._record(f"writing of variable {name!r}", error)):
            self._group.shared.change(change)

    def _record(self, call: str, error: Exception | None = None) -> Call:
        fingerprint = self._group.agreement.fingerprint(call, (), dict)
        return Call(call, fingerprint, timeout_seconds=self._timeout_seconds, error=error)
