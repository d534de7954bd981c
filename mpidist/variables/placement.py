"""Where the arrays of mirrored variables live: on each rank, or once for the ranks of a node."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import numpy as np

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

    By default each rank holds and writes an array of its own. If it `is_shared`, several ranks hold one array, so that
    no rank may write it alone. `devices` hold all variables; none for the devices of the ranks.
    """

    is_shared = False
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

    def for_value(self, value: Any) -> VariablePlacement:
        """Return the placement of a variable with this initial value: this placement, or one that suits it. Local."""
        return self

    def store(self, value: Any) -> Any:
        """Return the array that holds a value, equal on all ranks, which may be kept. Collective, if `is_shared`."""
        return value

    def write(self, what: str, change: Callable[[], None], error: Exception | None = None) -> None:
        """Call `change`, which writes the array, when no rank reads the old value any more. Collective, if `is_shared`.

        An error of this rank's arguments is raised instead, if `is_shared` on all ranks.
        """
        if error is not None:
            raise error
        change()


@final
class OnEachRank(VariablePlacement):
    """Each rank holds and writes an array of its own, in a device's memory or where each initial value lies."""

    def __init__(self, device: Device | None = None) -> None:
        self._memory = device

    def moved(self, value: Any) -> Any:
        if self._memory is None or self._memory.is_gpu == arrays.is_device(value):
            return value
        return arrays.to_device(value) if self._memory.is_gpu else arrays.to_host(value)


@final
class OncePerNode(VariablePlacement):
    """The ranks of a node hold one array in shared memory, which the node's lowest rank writes.

    A `device` names the host memory, if that is to hold all variables; else each rank holds those that are given in
    device memory there.
    """

    is_shared = True

    def __init__(self, group: SyncGroup, options: CommunicationOptions, device: str | None = None) -> None:
        self.devices = () if device is None else (device,)
        self._group, self._timeout_seconds = group, options.timeout_seconds

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

    def write(self, what: str, change: Callable[[], None], error: Exception | None = None) -> None:
        def change_quietly() -> None:
            with np.errstate(all="ignore"):  # only one rank would have the error: see `transport.float_errors`
                change()

        with self._group.call(self._record(f"writing of {what}", error)):
            self._group.shared.change(change_quietly)

    def _record(self, call: str, error: Exception | None = None) -> Call:
        fingerprint = self._group.agreement.fingerprint(call, (), dict)
        return Call(call, fingerprint, timeout_seconds=self._timeout_seconds, error=error)
