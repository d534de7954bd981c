"""How a variable is written: the same call means another thing in a replica, across replicas and in an update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import numpy as np

from mpidist import context_stack
from mpidist.context_stack import CurrentStrategy
from mpidist.values import local
from mpidist.variables.array_protocol import ReadsAsArray
from mpidist.variables.casting import cast_for

__all__ = ["Assignable"]


class Assignable(ABC):
    """What `Variable` is assigned by.

    Attributes:
        _strategy: The strategy that was current when the variable was made.
        _name: The name.
        _value: This rank's copy.
    """

    _strategy: CurrentStrategy
    _name: str
    _value: Any

    @abstractmethod
    def _write_replica(self, value: Any, ufunc: np.ufunc | None) -> None:
        """Write from inside `Strategy.run`. `ufunc` joins what is there and the value; `None` puts the value there."""

    @abstractmethod
    def _write_cross_replica(self, value: Any, ufunc: np.ufunc | None) -> None:
        """Write in cross-replica context."""

    @final
    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        """Set the value, and return the variable.

        In `Strategy.run` the replicas' values are aggregated, and the call is collective, unless the aggregation is
        NONE or the variable is read together. Elsewhere the call is local.

        Args:
            value: An array of the variable's shape and of the same kind of number (a float does not become an integer
                by itself), or a number; a distributed value is opened.
            use_locking: Of no effect: nothing else writes a variable meanwhile.
            name: Of no effect.
            read_value: `False` returns `None`.

        Raises:
            ValueError: If the shape or the kind of number is another, if an integer is too large for the dtype, or if
                a Python number or a mirrored value is assigned with aggregation SUM in `run`, where every replica
                would add it.
            TypeError: If the value is no array and no number.
            RuntimeError: If another strategy is current.
        """
        return self._assign("assign", value, None, read_value)

    @final
    def assign_add(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Add to the value, and return the variable. As `assign`; it is what is added that is aggregated."""
        return self._assign("assign_add", delta, np.add, read_value)

    @final
    def assign_sub(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Subtract from the value, and return the variable. As `assign_add`."""
        return self._assign("assign_sub", delta, np.subtract, read_value)

    def _assign(self, call: str, value: Any, ufunc: np.ufunc | None, read_value: bool) -> Any:
        entry = self._entered(call)
        if entry is None or (entry.replica_context is None and not entry.updating):
            self._write_cross_replica(value, ufunc)
        elif entry.updating:
            self._write(value, ufunc)
        else:
            self._write_replica(value, ufunc)
        return self if read_value else None

    @final
    def _entered(self, call: str) -> context_stack.Entry | None:
        """Return what is current, unless that is another strategy, which must not write this variable."""
        entry = context_stack.innermost()
        if entry is not None and entry.strategy is not self._strategy:
            if self._is_alone():
                what = f"variable {self._name!r} was made outside of strategy.scope(); make it inside"
                raise RuntimeError(f"{call}: mixing different strategies; {what}")
            self._strategy.extended.require_not_mixed(call)
        return entry

    @final
    def _cast(self, value: Any) -> Any:
        """Return a value as an array that this rank's copy can take: the value itself, if it is one."""
        own = self._value
        is_array = type(value) is type(own) or isinstance(value, np.generic)
        if not is_array:
            value = local(value)
            if isinstance(value, ReadsAsArray):
                value = value._seen()
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
        self._put(self._cast(value), ufunc)

    @final
    def _put(self, array: Any, ufunc: np.ufunc | None) -> None:
        if ufunc is None:
            self._value[...] = array
        else:
            ufunc(self._value, array, out=self._value)

    @final
    def _is_alone(self) -> bool:
        return self._strategy is context_stack.default_strategy()
