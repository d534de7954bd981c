"""Variables: an array on every rank, kept equal or read together."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from mpidist import contexts
from mpidist.options import NamedInAnyCase, ReduceOp
from mpidist.transport import arrays
from mpidist.values import local

if TYPE_CHECKING:
    from mpidist.strategy import Strategy

__all__ = ["MirroredVariable", "SyncOnReadVariable", "Variable", "VariableAggregation", "VariableSynchronization"]


@final
class VariableSynchronization(NamedInAnyCase):
    """When the copies of a variable are brought together: `AUTO` is `ON_WRITE`."""

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


@final
class VariableAggregation(NamedInAnyCase):
    """How what the replicas write, or hold, becomes one. `ONLY_FIRST_REPLICA` takes rank 0's."""

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"


_ADD: Final = operator.add
_SUBTRACT: Final = operator.sub


class Variable(NDArrayOperatorsMixin, ABC):
    """An array that a strategy keeps on every rank. Making one is collective over the ranks of the current strategy.

    Works as an array: NumPy's operators and functions read it. Assigning in `Strategy.run` aggregates what the
    replicas write; assigning in cross-replica context writes this rank's copy, so every rank must write the same.

    Args:
        initial_value: An array, a number, or a function that returns one. Rank 0's is taken on every rank.
        trainable: Whether an optimizer should change it. By default yes, unless it is read together.
        name: The same on every rank.
        dtype: What the value is cast to; by default its own.
        synchronization: `AUTO` and `ON_WRITE` keep the copies equal; `ON_READ` lets them differ and aggregates when
            the variable is read in cross-replica context, which is then collective.
        aggregation: How.

    Raises:
        ValueError: If `synchronization` or `aggregation` cannot be had, or a MEAN of integers is asked for.
        InvalidArgumentError: If the ranks' names, shapes, dtypes or rules differ. On every rank.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Variable:
        if cls is not Variable:
            return super().__new__(cls)
        try:
            wanted = VariableSynchronization(kwargs.get("synchronization", VariableSynchronization.AUTO))
        except ValueError:
            wanted = VariableSynchronization.AUTO  # `__init__` refuses it, together with the other ranks
        return super().__new__(SyncOnReadVariable if wanted is VariableSynchronization.ON_READ else MirroredVariable)

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
        strategy = contexts.get_strategy()
        error: Exception | None = None
        array: Any = np.empty(0)
        fields: dict[str, str] = {}
        self._strategy = strategy
        self._name = name if name is not None else strategy.extended.next_variable_name()
        try:
            self._synchronization = _synchronization(synchronization)
            self._aggregation = VariableAggregation(aggregation)
            array = _native(initial_value() if callable(initial_value) else initial_value, dtype)
            if self._aggregation is VariableAggregation.MEAN and array.dtype.kind in "iub":
                raise ValueError(f"a variable of dtype {array.dtype.name} cannot have aggregation MEAN")
            fields = {
                "name": self._name,
                "value": f"{array.dtype.name}{list(array.shape)}",
                "synchronization": str(self._synchronization),
                "aggregation": str(self._aggregation),
            }
        except Exception as problem:  # the initialiser's own, too: the other ranks must learn of it
            error = problem
        strategy.extended.agree_on_variable(fields, name is None, error)
        value = strategy.extended.cross_device_ops.broadcast(array, "all", call="initial value of a Variable")
        self._value = self._place(value)
        self._trainable = self._default_trainable() if trainable is None else trainable

    def _place(self, value: Any) -> Any:
        """Put the initial value where this kind of variable lives."""
        return value

    @staticmethod
    @abstractmethod
    def _default_trainable() -> bool:
        """Whether an optimizer should change variables of this kind."""

    @abstractmethod
    def read_value(self) -> Any:
        """Return the value as the current context sees it: a new array."""

    @abstractmethod
    def _write_replica(self, value: Any, combine: Callable[[Any, Any], Any] | None) -> None:
        """Write from inside `Strategy.run`."""

    @abstractmethod
    def _write_cross_replica(self, value: Any, combine: Callable[[Any, Any], Any] | None) -> None:
        """Write in cross-replica context."""

    @property
    def strategy(self) -> Strategy:
        """The strategy that was current when the variable was made."""
        return self._strategy

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

    @property
    def trainable(self) -> bool:
        """Whether an optimizer should change it."""
        return self._trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the copies are brought together."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How."""
        return self._aggregation

    @final
    def local_value(self) -> Any:
        """Return this rank's own copy, in any context: a view that must not be written. Local."""
        view = self._value.view()
        if not arrays.is_device(view):
            view.flags.writeable = False
        return view

    @final
    def value(self) -> Any:
        """Return the value as the current context sees it: `read_value`."""
        return self.read_value()

    @final
    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the value as the current context sees it, in host memory."""
        value = self.read_value()
        return arrays.to_host(value) if arrays.is_device(value) else np.asarray(value)

    @final
    def assign(self, value: Any) -> Variable:
        """Set the value, and return the variable.

        In `Strategy.run` the replicas' values are aggregated, and the call is collective, unless the aggregation is
        NONE or the variable is read together. Elsewhere the call is local.

        Args:
            value: An array of the variable's shape, or a number; a distributed value is opened.

        Raises:
            ValueError: If the shape is another, or a Python number is assigned with aggregation SUM in `run`, where
                every replica would add it.
            RuntimeError: If another strategy is current.
        """
        return self._assign("assign", value, None)

    @final
    def assign_add(self, value: Any) -> Variable:
        """Add to the value, and return the variable. As `assign`; it is what is added that is aggregated."""
        return self._assign("assign_add", value, _ADD)

    @final
    def assign_sub(self, value: Any) -> Variable:
        """Subtract from the value, and return the variable. As `assign_add`."""
        return self._assign("assign_sub", value, _SUBTRACT)

    def _assign(self, call: str, value: Any, combine: Callable[[Any, Any], Any] | None) -> Variable:
        extended = self._strategy.extended
        entry = contexts.innermost()
        if entry is not None:
            extended.require_not_mixed(call)
        value = local(value)
        if entry is None or (entry.replica_context is None and not entry.updating):
            self._write_cross_replica(self._cast(value), combine)
        elif entry.updating:
            self._set(self._cast(value), combine)
        else:
            self._write_replica(value, combine)
        return self

    def _cast(self, value: Any) -> Any:
        array = _native(value, None)
        if array.shape != self.shape and array.shape != ():
            raise ValueError(
                f"variable {self._name!r} has shape {list(self.shape)}, and a value of shape {list(array.shape)} "
                "was assigned to it"
            )
        return array.astype(self.dtype)

    def _set(self, array: Any, combine: Callable[[Any, Any], Any] | None) -> None:
        self._value[...] = array if combine is None else combine(self._value, array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(self.numpy(), dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(out, Variable) for out in kwargs.get("out", ())):
            return NotImplemented  # assigning is for `assign`, which knows the replicas
        values = [item.read_value() if isinstance(item, Variable) else item for item in inputs]
        return getattr(ufunc, method)(*values, **kwargs)

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __getitem__(self, key: Any) -> Any:
        return self.read_value()[key]

    def __len__(self) -> int:
        return len(self._value)

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __copy__(self) -> NoReturn:
        raise RuntimeError(f"variable {self._name!r} cannot be copied: it belongs to its strategy; read its value")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__copy__()

    def __repr__(self) -> str:
        return (
            f"<mpidist.Variable {self._name!r} {self.dtype.name}{list(self.shape)} {self._synchronization} "
            f"{self._aggregation}, this rank's copy: {self._value!r}>"
        )

    __hash__ = object.__hash__


@final
class MirroredVariable(Variable):
    """A variable whose copies are kept equal: what replicas write is aggregated, and everybody writes the result."""

    @staticmethod
    def _default_trainable() -> bool:
        return True

    def read_value(self) -> Any:
        """Return a copy of this rank's copy. Local."""
        return self._value.copy()

    def _write_replica(self, value: Any, combine: Callable[[Any, Any], Any] | None) -> None:
        ops = self._strategy.extended.cross_device_ops
        aggregation = self._aggregation
        if aggregation is VariableAggregation.NONE:
            if self._is_per_node:
                what = f"variable {self._name!r} has aggregation NONE and is one for all ranks of a node"
                raise ValueError(f"{what}: a replica cannot assign to it by itself; choose SUM, MEAN, ...")
            self._set(self._cast(value), combine)
            return
        array, error = self._value, None
        try:
            array = self._contribution(value)
        except Exception as problem:  # whatever it is, the other ranks must learn of it
            error = problem
        call = f"assignment to variable {self._name!r}"
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            self._set(ops.broadcast(array, "all", call=call, error=error), combine)
        else:
            self._set(ops.all_reduce(ReduceOp[aggregation.name], array, call=call, error=error), combine)

    def _write_cross_replica(self, value: Any, combine: Callable[[Any, Any], Any] | None) -> None:
        self._set(value, combine)

    def _place(self, value: Any) -> Any:
        extended = self._strategy.extended
        self._is_per_node = extended.per_node_variables and not arrays.is_device(value)
        return extended.copy_per_node(value) if self._is_per_node else value

    def _set(self, array: Any, combine: Callable[[Any, Any], Any] | None) -> None:
        if not self._is_per_node:
            super()._set(array, combine)
            return
        extended = self._strategy.extended
        extended.agree(f"writing of variable {self._name!r}", {})  # nobody reads the old value any more
        extended.write_per_node(self._value, array if combine is None else combine(self._value, array))

    def _contribution(self, value: Any) -> Any:
        is_number = isinstance(value, (int, float, complex)) and not isinstance(value, np.generic)
        if is_number and self._aggregation is VariableAggregation.SUM and self._strategy.num_replicas_in_sync > 1:
            raise ValueError(
                f"a non-DistributedValues value {value!r} cannot be reduced: assigned to variable {self._name!r} with "
                f"aggregation SUM, it would count {self._strategy.num_replicas_in_sync} times. Assign an array that "
                "this replica contributes"
            )
        return np.broadcast_to(self._cast(value), self.shape)


@final
class SyncOnReadVariable(Variable):
    """A variable whose copies go their own ways, and are aggregated when they are read together: a metric, say."""

    @staticmethod
    def _default_trainable() -> bool:
        return False

    def read_value(self) -> Any:
        """Return this rank's copy in `Strategy.run`; elsewhere the aggregate of all copies, which is collective."""
        entry = contexts.innermost()
        if (entry is not None and (entry.replica_context is not None or entry.updating)) or self._is_alone():
            return self._value.copy()
        ops = self._strategy.extended.cross_device_ops
        self._require_aggregation("read")
        call = f"reading of variable {self._name!r}"
        if self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return ops.broadcast(self._value, "all", call=call)
        return ops.all_reduce(ReduceOp[self._aggregation.name], self._value, call=call)

    def _write_replica(self, value: Any, combine: Callable[[Any, Any], Any] | None) -> None:
        self._set(self._cast(value), combine)

    def _write_cross_replica(self, value: Any, combine: Callable[[Any, Any], Any] | None) -> None:
        if self._is_alone():
            self._set(value, combine)
            return
        self._require_aggregation("assigned")
        if self._aggregation is VariableAggregation.SUM:
            if combine is not None:
                raise ValueError(
                    f"variable {self._name!r} has aggregation SUM: in cross-replica context it can be assigned, and "
                    "not added to or subtracted from"
                )
            value = (value / self._strategy.num_replicas_in_sync).astype(self.dtype)
        self._set(value, combine)

    def _is_alone(self) -> bool:
        return self._strategy is contexts.default_strategy()

    def _require_aggregation(self, what: str) -> None:
        if self._aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"variable {self._name!r} with aggregation NONE cannot be {what} in cross-replica context: could not "
                "convert NONE to a ReduceOp. Choose SUM, MEAN or ONLY_FIRST_REPLICA, or use local_value()"
            )


def _synchronization(value: VariableSynchronization | str) -> VariableSynchronization:
    wanted = VariableSynchronization(value)
    if wanted is VariableSynchronization.NONE:
        raise ValueError("synchronization NONE is for variables without a strategy; choose ON_WRITE or ON_READ")
    return VariableSynchronization.ON_WRITE if wanted is VariableSynchronization.AUTO else wanted


def _native(value: Any, dtype: Any) -> Any:
    if isinstance(value, (list, tuple)):
        value = np.asarray(value)
    array = arrays.library_of(value).to_native(value)
    native = array.dtype.newbyteorder("=") if dtype is None else np.dtype(dtype)
    return array.astype(native)
