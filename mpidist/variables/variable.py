"""Variables: an array on every rank, kept equal by aggregated writes, or aggregated when it is read."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, ClassVar, final

import numpy as np

from mpidist import context_stack
from mpidist.context_stack import CurrentStrategy, parts_of
from mpidist.replicas import Replicas
from mpidist.transport import arrays
from mpidist.transport.failures import open_groups
from mpidist.transport.mpi.launcher_variables import rank_from_environment
from mpidist.values import DistributedValues
from mpidist.variables.array_protocol import ReadsAsArray
from mpidist.variables.assigning import CopyAssignment
from mpidist.variables.casting import cast_for, native_of, require_mean
from mpidist.variables.rules import VariableAggregation, VariableSynchronization, chosen_synchronization
from mpidist.variables.sparse_updates import SparseUpdates

__all__ = ["Variable"]

logger = logging.getLogger("mpidist.variables")


class Variable(DistributedValues, ReadsAsArray, CopyAssignment, SparseUpdates, ABC):
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
            if replica is not None and replica.joint_calls is not None:
                return replica.joint_calls.make_variable(cls, args, kwargs)  # which `__init__` leaves as it is
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
        self._replicas = _chosen_replicas(strategy)
        self._name = name if name is not None else parts_of(strategy).default_variable_name()
        try:
            self._synchronization = chosen_synchronization(synchronization)
            self._aggregation = VariableAggregation(aggregation)
            value = initial_value() if callable(initial_value) else initial_value
            array = parts_of(strategy).variable_placement.moved(_native(value, dtype, f"variable {self._name!r}"))
            if self._aggregation is VariableAggregation.MEAN:
                require_mean(array.dtype, f"variable {self._name!r}")
            fields = {
                "name": self._name,
                "value": f"{array.dtype.name}{list(array.shape)}",
                "synchronization": str(self._synchronization),
                "aggregation": str(self._aggregation),
            }
        except Exception as problem:  # also of `initial_value`: the other ranks must learn of it
            error = problem
        parts_of(strategy).agree_on_variable(fields, name is None, error)
        value = parts_of(strategy).cross_device_ops.broadcast(array, "all", call="initial value of a Variable")
        self._value = self._place(value)
        self._local_view = self.local_value()  # read-only
        self._trainable = self._is_trainable_by_default if trainable is None else trainable
        if context_stack.current() is None and open_groups.num_open():
            logger.warning(
                "r%d | variable %r was made outside of strategy.scope(): it belongs to the default strategy, of this "
                "process alone, so its value is this rank's own, and may differ from other ranks'; make it inside",
                rank_from_environment(os.environ) or 0,
                self._name,
            )

    @abstractmethod
    def _place(self, value: Any) -> Any:
        """Put the initial value where this kind of variable lives, and return this rank's first copy."""

    @abstractmethod
    def _here(self) -> Any:
        """Return the copy of the current replica in `run`, and of this rank's first replica elsewhere."""

    def _all_here(self) -> tuple[Any, ...]:
        """Return the copy of each replica of this rank, in cross-replica context."""
        return (self._value,) * (1 if self._replicas is None else self._replicas.num_here)

    @property
    def values(self) -> tuple[Any, ...]:
        """The copies of this rank's replicas, in a tuple; in `run` of the current replica alone."""
        if self._replicas is None or self._current_entry_in_run() is not None:
            return (self.local_value(),)
        return tuple(map(_read_only_view, self._all_here()))

    @property
    def name(self) -> str:
        """The name, the same on every rank."""
        return self._name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        shape: tuple[int, ...] = self._value.shape
        return shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype."""
        dtype: np.dtype[Any] = self._value.dtype
        return dtype

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

    def __repr__(self) -> str:
        return (
            f"<mpidist.Variable {self._name!r} {self.dtype.name}{list(self.shape)} {self._synchronization} "
            f"{self._aggregation}, this rank's copy: {self._here()!r}>"
        )


def _native(value: Any, dtype: Any, what: str) -> Any:
    array = native_of(value, what)
    if dtype is not None:
        try:
            dtype = np.dtype(dtype)
        except TypeError:
            raise TypeError(f"{what}: the dtype must be one of NumPy's, as 'float32', got {dtype!r}") from None
        array = cast_for(array.reshape(-1)[:0].real.astype(dtype), value, what)
    return array.astype(array.dtype.newbyteorder("="))


def _chosen_replicas(strategy: CurrentStrategy) -> Replicas | None:
    """Return which replicas this rank carries, if their number was chosen."""
    replicas: Replicas = parts_of(strategy).replicas
    return None if replicas.tree is None else replicas


def _read_only_view(array: Any) -> Any:
    view = array.view()
    if not arrays.is_device(view):
        view.flags.writeable = False
    return view
