"""Where the arrays of mirrored variables live: on each rank, or once for the ranks of a node."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from mpidist.context_stack import CurrentStrategy
from mpidist.options import CommunicationOptions
from mpidist.transport import arrays
from mpidist.transport.agreement.agreement import Call
from mpidist.transport.devices import Device
from mpidist.transport.group.raise_together import LocalWork
from mpidist.transport.group.sync_group import SyncGroup

__all__ = ["OnEachRank", "OncePerNode", "VariablePlacement"]


class VariablePlacement(ABC):
    """A part of a strategy: where its mirrored variables live, and which rank writes them.

    Attributes:
        is_shared: Whether several ranks hold one array, so that no rank may write it alone.
        devices: The devices that hold all variables; none for the devices of the ranks.
    """

    is_shared: bool
    devices: tuple[str, ...] = ()

    def __str__(self) -> str:  # ranks compare it
        return " on ".join((type(self).__name__, *self.devices))

    def make(self, strategy: CurrentStrategy, *args: Any, **kwargs: Any) -> Any:
        """Make a variable of a kind of this placement's own, or return `None`. Arguments are those of `Variable`."""
        return None

    def colocated_with(self, var: Any) -> AbstractContextManager[None]:
        """Put variables that are made in the `with` body beside another one. By default of no effect. Local."""
        return nullcontext()

    def moved(self, value: Any) -> Any:
        """Return an initial value in the memory where variables of all kinds begin: by default where it lies. Local."""
        return value

    @abstractmethod
    def for_value(self, value: Any) -> VariablePlacement:
        """Return the placement of a variable with this initial value: this placement, or one that suits it. Local."""

    @abstractmethod
    def store(self, value: Any) -> Any:
        """Return the array that holds a new variable's value. Collective, if `is_shared`.

        Args:
            value: A native array, equal on all ranks, which the placement may keep.
        """

    @abstractmethod
    def write(self, name: str, change: Callable[[], None], error: Exception | None = None) -> None:
        """Change the array of a variable. Collective, if `is_shared`.

        Args:
            name: The name of the variable.
            change: Writes the array. Called when no rank reads the old value any more.
            error: What is wrong with this rank's arguments; raised instead, if `is_shared` on all ranks.
        """


@final
class OnEachRank(VariablePlacement):
    """Each rank holds and writes an array of its own.

    Args:
        device: In whose memory the arrays lie; `None` leaves each initial value in the memory where it lies.
    """

    is_shared = False

    def __init__(self, device: Device | None = None) -> None:
        self._memory = device

    def moved(self, value: Any) -> Any:
        if self._memory is None or self._memory.is_gpu == arrays.is_device(value):
            return value
        return arrays.to_device(value) if self._memory.is_gpu else arrays.to_host(value)

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
    """The ranks of a node hold one array in shared memory, which the node's lowest rank writes.

    Args:
        group: The ranks.
        timeout_seconds: How long a rank waits for other ranks; `None` means the group's own deadline.
        device: The name of the host memory, if that is to hold all variables, also those that are given in device
            memory. `None` lets each rank hold these in its device memory.
    """

    is_shared = True

    def __init__(self, group: SyncGroup, timeout_seconds: float | None, device: str | None = None) -> None:
        self.devices = () if device is None else (device,)
        self._group = group
        self._timeout_seconds = timeout_seconds

    @classmethod
    def maker(cls, group: SyncGroup) -> Callable[[CommunicationOptions], VariablePlacement]:
        """Return a function that makes the placement for a strategy with these defaults of all calls."""
        return lambda options: cls(group, options.timeout_seconds)

    def for_value(self, value: Any) -> VariablePlacement:
        is_own = not self.devices and arrays.is_device(value)  # device memory is not shared
        return OnEachRank() if is_own else self

    def store(self, value: Any) -> Any:
        what = "placing of a variable"
        with self._group.call(self._record(what)):
            pass  # agreed on before the allocation, which may fail and leave the group usable
        is_one_node = len(self._group.topology.nodes) == 1  # whose ranks fail together
        with nullcontext() if is_one_node else LocalWork(self._group, what, self._timeout_seconds):
            call = f"{what} on {self._group.topology.node_name}"
            (array,) = self._group.shared.empty([(value.shape, value.dtype)], True, call)
        self._group.shared.write(array, arrays.on_host(value))
        return array

    def write(self, name: str, change: Callable[[], None], error: Exception | None = None) -> None:
        with self._group.call(self._record(f"writing of variable {name!r}", error)):
            self._group.shared.change(change)

    def _record(self, call: str, error: Exception | None = None) -> Call:
        fingerprint = self._group.agreement.fingerprint(call, (), dict)
        return Call(call, fingerprint, timeout_seconds=self._timeout_seconds, error=error)
