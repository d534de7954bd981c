"""Variables: an array on every rank, kept equal by aggregated writes, or aggregated when it is read."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, final

import numpy as np

from mpidist import context_stack
from mpidist.context_stack import parts_of
from mpidist.replicas import Replicas
from mpidist.transport import arrays
from mpidist.transport.failures import open_groups
from mpidist.transport.mpi.launcher_variables import rank_from_environment
from mpidist.values import DistributedValues, PerReplica, local_component
from mpidist.variables.array_protocol import ReadsAsArray
from mpidist.variables.assigning import Assignable
from mpidist.variables.casting import cast_for, initial_array, require_added, require_mean
from mpidist.variables.rules import VariableAggregation, VariableSynchronization, chosen_synchronization

__all__ = ["Variable"]

logger = logging.getLogger("mpidist.variables")


class Variable(DistributedValues, Assignable, ABC):
    """An array that a strategy keeps on every rank. Making one is collective over the ranks of the current strategy.

    Made in `Strategy.run`, where a rank carries several replicas, it is one variable for all of them.

    Python's operators and NumPy's functions read a variable as an array. Assigning in `Strategy.run` aggregates the
    values of all replicas; assigning in cross-replica context writes this rank's copy, so every rank must write the
    same value. Replicas of one rank share the rank's copy, unless the synchronization is `ON_READ`.

    Args:
        initial_value: An array, a number, or a function that returns one. Every rank starts with the value of rank 0.
            The variable lies in the memory where this value lies; a strategy whose devices the user named as GPUs moves
            a value of host memory to the rank's GPU.
        trainable: Whether an optimizer should change the variable. By default yes, unless it is `ON_READ`.
        name: The name, equal on all ranks.
        dtype: The dtype that the initial value is cast to; by default its own.
        synchronization: `AUTO` and `ON_WRITE` keep the copies equal; `ON_READ` lets them differ and aggregates when
            the variable is read in cross-replica context, which is then collective.
        aggregation: How values or copies are aggregated.

    Raises:
        ValueError: If `synchronization` is NONE, if one of the two is not known, or if the aggregation of integers is
            MEAN.
        InvalidArgumentError: If the ranks' names, shapes, dtypes or rules differ. On every rank.
    """

    _kinds: ClassVar[dict[VariableSynchronization, type[Variable]]] = {}
    _is_trainable_by_default: ClassVar[bool]

    def __init_subclass__(cls, synchronization: VariableSynchronization) -> None:
        super().__init_subclass__()
        Variable._kinds[synchronization] = cls

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        kind: type[Variable] = cls
        if cls is Variable:
            replica = context_stack.current_replica()
            if replica is not None and replica.calls.make_variable is not None:
                return replica.calls.make_variable(cls, args, kwargs)  # which `__init__` leaves as it is
            strategy = context_stack.current_strategy()
            own = parts_of(strategy).variable_placement.make(strategy, *args, **kwargs)
            if own is not None:  # no subclass, so `__init__` is not called
                return own
            kind = cls._kinds[VariableSynchronization.ON_WRITE]
            with suppress(ValueError):  # `__init__` raises it, on all ranks
                kind = cls._kinds.get(VariableSynchronization(kwargs.get("synchronization", "AUTO")), kind)
        made: Variable = super().__new__(kind)
        return made

    def __init__(
        self,
        initial_value: Any,
        *,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
    ) -> None:
        if "_strategy" in vars(self):  # of replicas of this rank, which have made it together
            return
        strategy = context_stack.current_strategy()
        error: Exception | None = None
        array: Any = np.empty(0)
        fields: dict[str, str] = {}
        self._strategy = strategy
        replicas: Replicas = parts_of(strategy).replicas
        self._replicas = None if replicas.tree is None else replicas
        self._name = name if name is not None else parts_of(strategy).default_variable_name()
        try:
            self._synchronization = chosen_synchronization(synchronization)
            self._aggregation = VariableAggregation(aggregation)
            value = initial_value() if callable(initial_value) else initial_value
            array = parts_of(strategy).variable_placement.moved(initial_array(value, dtype, f"variable {self._name!r}"))
            self._require_aggregation_of(array.dtype)
            fields = {
                "name": self._name,
                "value": f"{array.dtype.name}{list(array.shape)}",
                "synchronization": str(self._synchronization),
                "aggregation": str(self._aggregation),
            }
        except Exception as problem:  # also of `initial_value`: the other ranks must learn of it
            error = problem
        parts_of(strategy).agree_on_variable(fields, name is None, error)
        self._suffix = parts_of(strategy).variable_suffix(self._name)
        value = parts_of(strategy).cross_device_ops.broadcast(array, "all", call="initial value of a Variable")
        self._copies = self._place(value)
        self._value = self._like = self._copies[0]
        self._local_view = self.local_value()  # read-only
        self._trainable = self._is_trainable_by_default if trainable is None else trainable
        if context_stack.current() is None and open_groups.num_open():
            logger.warning(
                "r%d | variable %r was made outside of strategy.scope(): it belongs to the default strategy, of this "
                "process alone, so its value is this rank's own, and may differ from other ranks'; make it inside",
                rank_from_environment(os.environ) or 0,
                self._name,
            )

    def _require_aggregation_of(self, dtype: np.dtype[Any]) -> None:
        """Require that the aggregation can combine numbers of a dtype."""
        what, rule = f"variable {self._name!r}", self._aggregation
        if rule is VariableAggregation.MEAN:
            require_mean(dtype, what)
        is_added = rule in (VariableAggregation.SUM, VariableAggregation.MEAN)
        if is_added and self._synchronization is VariableSynchronization.ON_READ:
            require_added(dtype, what, rule)

    @abstractmethod
    def _place(self, value: Any) -> Sequence[Any]:
        """Put the initial value where this kind of variable lives, and return the copy of each replica of this rank."""

    @abstractmethod
    def _here(self) -> Any:
        """Return the copy of the current replica in `run`, and of this rank's first replica elsewhere."""

    @property
    def values(self) -> tuple[Any, ...]:
        """The copies of this rank's replicas, in a tuple; in `run` of the current replica alone."""
        if self._replicas is None or self._is_in_run():
            return (self.local_value(),)
        return tuple(map(_read_only_view, self._copies))

    @final
    def local_value(self) -> Any:
        """Return this rank's own copy, in any context: a view that must not be written. Local.

        Where a rank carries several replicas, in `run` the copy of the current replica, elsewhere of the first one.
        """
        return _read_only_view(self._value if self._replicas is None else self._here())

    @abstractmethod
    def _read_view(self) -> Any:
        """Return the value in the current context: an array to be read at once, and not written."""

    @final
    def read_value(self) -> Any:
        """Return the value in the current context: a new array. Collective for `ON_READ` in cross-replica context."""
        value = self._read_view()
        return value.copy() if value is self._local_view or self._replicas is not None else value

    def _assign_in_replica(self, value: Any, ufunc: np.ufunc | None) -> None:
        """Assign in replica context. `ufunc` as in `_assign`."""
        self._write(value, ufunc)

    def _assign_across_replicas(self, value: Any, ufunc: np.ufunc | None) -> None:
        """Assign in cross-replica context."""
        self._write(value, ufunc)

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
            if context_stack.is_default(self._strategy):
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
            if self._replicas is not None and isinstance(value, PerReplica) and not self._is_in_run():
                raise self._per_replica_error()
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

    @abstractmethod
    def _write(self, value: Any, ufunc: np.ufunc | None) -> None:
        """Write this rank's copy, or the current replica's."""

    @final
    def _is_in_run(self) -> bool:
        """Whether the code runs in the function of the strategy's `run`."""
        entry = context_stack.innermost()
        return entry is not None and entry.strategy is self._strategy and entry.replica_context is not None

    def __repr__(self) -> str:
        return (
            f"<mpidist.Variable {self._name!r} {self.dtype.name}{list(self.shape)} {self._synchronization} "
            f"{self._aggregation}, this rank's copy: {self._here()!r}>"
        )


def _read_only_view(array: Any) -> Any:
    view = array.view()
    if not arrays.is_device(view):
        view.flags.writeable = False
    return view
