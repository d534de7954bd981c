"""How a variable is assigned: in replica context, in cross-replica context, and inside `update`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import numpy as np

from mpidist import context_stack
from mpidist.context_stack import CurrentStrategy
from mpidist.values import local_component
from mpidist.variables.array_protocol import ReadsAsArray
from mpidist.variables.casting import cast_for

__all__ = ["Assignable"]


class Assignable(ABC):
    """The methods that assign a `Variable`.

    Attributes:
        _strategy: The strategy that was current when the variable was made.
        _name: The variable's name.
        _value: This rank's copy.
    """

    _strategy: CurrentStrategy
    _name: str
    _value: Any

    @abstractmethod
    def _assign_in_replica(self, value: Any, ufunc: np.ufunc | None) -> None:
        """Assign in replica context. `ufunc` combines the old value and `value`; `None` replaces the old value."""

    @abstractmethod
    def _assign_across_replicas(self, value: Any, ufunc: np.ufunc | None) -> None:
        """Assign in cross-replica context."""

    @final
    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        """Set the value, and return the variable.

        In `Strategy.run` the replicas' values are aggregated, and the call is collective, unless the aggregation is
        NONE or the synchronization ON_READ. Elsewhere the call is local.

        Args:
            value: An array of the variable's shape and of the same kind of number (a float is not cast to an integer),
                or a number; of a distributed value, this rank's component.
            use_locking: Of no effect: no other thread writes a variable.
            name: Of no effect.
            read_value: `False` returns `None`.

        Raises:
            ValueError: If the shape or the kind of number differs, if an integer is too large for the dtype, or if a
                Python number or a mirrored value is assigned with aggregation SUM in `run`, which would add it once
                for every replica.
            TypeError: If the value is neither an array nor a number.
            RuntimeError: If another strategy is current.
        """
        return self._assign("assign", value, None, read_value)

    @final
    def assign_add(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Add to the value, and return the variable. As `assign`; in `run` the deltas are aggregated."""
        return self._assign("assign_add", delta, np.add, read_value)

    @final
    def assign_sub(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Subtract from the value, and return the variable. As `assign_add`."""
        return self._assign("assign_sub", delta, np.subtract, read_value)

    def _assign(self, call: str, value: Any, ufunc: np.ufunc | None, read_value: bool) -> Any:
        entry = self._current_entry(call)
        if entry is None or (entry.replica_context is None and not entry.is_update):
            self._assign_across_replicas(value, ufunc)
        elif entry.is_update:
            self._write(value, ufunc)
        else:
            self._assign_in_replica(value, ufunc)
        return self if read_value else None

    @final
    def _current_entry(self, call: str) -> context_stack.Entry | None:
        """Return the innermost entry of the context stack. Raises `RuntimeError` if another strategy is current."""
        entry = context_stack.innermost()
        if entry is not None and entry.strategy is not self._strategy:
            if self._is_of_default_strategy():
                what = f"variable {self._name!r} was made outside of strategy.scope(); make it inside"
                raise RuntimeError(f"{call}: mixing different strategies; {what}")
            self._strategy.extended.require_not_mixed(call)
        return entry

    @final
    def _cast(self, value: Any) -> Any:
        """Return a value as an array that can be written to this rank's copy; the value itself, if it is one."""
        own = self._value
        is_array = type(value) is type(own) or isinstance(value, np.generic)
        if not is_array:
            value = local_component(value)
            if isinstance(value, ReadsAsArray):
                value = value._read_view()
            is_array = type(value) is type(own)
        if is_array and value.dtype == own.dtype and value.shape in (own.shape, ()):
            return value
        array = cast_for(own, value, f"variable {self._name!r}")
        if array.shape != own.shape and array.shape != ():
            raise ValueError(
                f"variable {self._name!r} has shape {list(own.shape)}, and a value of shape {list(array.shape)} was "
                "assigned to it"
            )
        return array

    def _write(self, value: Any, ufunc: np.ufunc | None) -> None:
        """Write this rank's copy."""
        self._store(self._cast(value), ufunc)

    @final
    def _store(self, array: Any, ufunc: np.ufunc | None) -> None:
        if ufunc is None:
            self._value[...] = array
        else:
            ufunc(self._value, array, out=self._value)

    @final
    def _is_of_default_strategy(self) -> bool:
        return context_stack.is_default(self._strategy)
