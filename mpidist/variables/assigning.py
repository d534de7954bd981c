"""How a variable is assigned: in replica context, in cross-replica context, and inside `update`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import numpy as np

from mpidist import context_stack
from mpidist.context_stack import CurrentStrategy, parts_of
from mpidist.replicas import Replicas
from mpidist.values import PerReplica, local_component
from mpidist.variables.array_protocol import ReadsAsArray
from mpidist.variables.casting import cast_for
from mpidist.variables.rules import VariableAggregation, VariableSynchronization

__all__ = ["Assignable", "CopyAssignment", "require_no_effect", "store"]


class Assignable(ABC):
    """An array that belongs to a strategy, and can be assigned."""

    _strategy: CurrentStrategy
    _trainable: bool
    _synchronization: VariableSynchronization
    _aggregation: VariableAggregation

    @property
    def strategy(self) -> CurrentStrategy:
        """The strategy that was current when the variable was made."""
        return self._strategy

    @property
    def trainable(self) -> bool:
        """Whether an optimizer should change the variable."""
        return self._trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the copies are aggregated. On parameter servers there is one array alone."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How values or copies are aggregated: of a variable on servers, the values of a worker's replicas."""
        return self._aggregation

    @abstractmethod
    def _assign(self, call: str, value: Any, ufunc: np.ufunc | None, read_value: bool) -> Any:
        """Assign as the method of this name does. `ufunc` combines the old value and `value`; `None` replaces it."""

    @final
    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        """Set the value, and return the variable.

        In `Strategy.run` the replicas' values are aggregated, and the call is collective, unless the aggregation is
        NONE or the synchronization ON_READ. Elsewhere the call is local. With NONE, replicas of one rank must assign
        the same bits, and the variable is written once; that is checked at their next collective call and at the end of
        `run`.

        On a parameter server the variable is changed later, and the call waits for no other worker. Where this worker
        has several replicas, all of them call it together in `run`: the server gets one change, of the aggregate, and
        with NONE the call is refused.

        Args:
            value: An array of the variable's shape and of the same kind of number (a float is not cast to an integer),
                or a number; of a distributed value, this rank's component. Outside of `run` a `PerReplica` is refused
                if the number of replicas was chosen.
            use_locking: Must be `False`: one thread at a time writes a variable, so there is nothing to lock.
            name: Must be `None`: there is no graph whose operations have names.
            read_value: `False` returns `None`.

        Raises:
            ValueError: If the shape or the kind of number differs, if an integer is too large for the dtype, or if a
                Python number or a mirrored value is assigned with aggregation SUM in `run`, which would add it once
                for every replica; if several replicas of a worker assign a variable on servers with NONE; or if
                `use_locking` or `name` is given.
            TypeError: If the value is neither an array nor a number.
            UnavailableError: If the variable's parameter server is lost.
            RuntimeError: If another strategy is current.
        """
        if use_locking or name is not None:
            require_no_effect("assign", use_locking, name)
        return self._assign("assign", value, None, read_value)

    @final
    def assign_add(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Add to the value, and return the variable. As `assign`; in `run` the deltas are aggregated."""
        if use_locking or name is not None:
            require_no_effect("assign_add", use_locking, name)
        return self._assign("assign_add", delta, np.add, read_value)

    @final
    def assign_sub(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Subtract from the value, and return the variable. As `assign_add`."""
        if use_locking or name is not None:
            require_no_effect("assign_sub", use_locking, name)
        return self._assign("assign_sub", delta, np.subtract, read_value)


class CopyAssignment(Assignable):
    """How the copies of a `Variable` are assigned.

    Attributes:
        _name: The variable's name.
        _value: This rank's copy; of several, that of the rank's first replica.
        _replicas: Which replicas this rank carries, if their number was chosen; else `None`.
    """

    _name: str
    _value: Any
    _replicas: Replicas | None

    @abstractmethod
    def _assign_in_replica(self, value: Any, ufunc: np.ufunc | None) -> None:
        """Assign in replica context. `ufunc` as in `_assign`."""

    @abstractmethod
    def _assign_across_replicas(self, value: Any, ufunc: np.ufunc | None) -> None:
        """Assign in cross-replica context."""

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
            parts_of(self._strategy).require_not_mixed(call)
        return entry

    @final
    def _cast(self, value: Any) -> Any:
        """Return a value as an array that can be written to this rank's copy; the value itself, if it is one."""
        own = self._value
        is_array = type(value) is type(own) or isinstance(value, np.generic)
        if not is_array:
            value = local_component(value) if self._replicas is None else self._component(value)
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

    @abstractmethod
    def _write(self, value: Any, ufunc: np.ufunc | None) -> None:
        """Write this rank's copy, or the current replica's."""

    @final
    def _current_entry_in_run(self) -> context_stack.Entry | None:
        """Return the innermost entry of the context stack, if it is of the strategy's `run`."""
        entry = context_stack.innermost()
        is_in_run = entry is not None and entry.strategy is self._strategy and entry.replica_context is not None
        return entry if is_in_run else None

    def _component(self, value: Any) -> Any:
        """Take the current replica's component of a value, if the number of replicas was chosen."""
        if isinstance(value, PerReplica) and self._current_entry_in_run() is None:
            raise ValueError(
                f"variable {self._name!r} takes one value for all replicas, and a PerReplica was assigned to it in "
                "cross-replica context: reduce the PerReplica first, as with strategy.reduce('mean', value), or assign "
                "each component inside strategy.run()"
            )
        return local_component(value)

    @final
    def _is_of_default_strategy(self) -> bool:
        return context_stack.is_default(self._strategy)


def require_no_effect(call: str, use_locking: bool = False, name: str | None = None) -> None:
    """Refuse arguments of tf.distribute that have no effect here, unless they have their defaults.

    Raises:
        ValueError: If one has another value.
    """
    if use_locking:
        raise ValueError(f"{call}: use_locking must be False: one thread at a time writes a variable; leave it out")
    if name is not None:
        raise ValueError(f"{call}: name must be None: there is no graph whose operations have names; leave it out")


def store(target: Any, array: Any, ufunc: np.ufunc | None) -> None:
    """Write an array. `ufunc` combines its old value and `array`; `None` replaces the old value."""
    if ufunc is None:
        target[...] = array
    else:
        ufunc(target, array, out=target)
