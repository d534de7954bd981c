"""Variables: an array on every rank, kept equal by aggregated writes, or aggregated when it is read."""

from __future__ import annotations

import logging
from abc import ABC
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, final

import numpy as np

from mpidist import context_stack
from mpidist.context_stack import CurrentStrategy
from mpidist.options import CaseInsensitiveEnum, ReduceOp
from mpidist.transport import arrays, open_groups
from mpidist.values import DistributedValues, require_contributions
from mpidist.variables.array_protocol import ReadsAsArray
from mpidist.variables.assigning import Assignable
from mpidist.variables.casting import cast_for, is_python_number
from mpidist.variables.sparse_updates import AGGREGATED_CALLS, SparseUpdates, change_rows, checked_rows

if TYPE_CHECKING:
    from mpidist.transport import SyncGroup

__all__ = ["MirroredVariable", "SyncOnReadVariable", "Variable", "VariableAggregation", "VariableSynchronization"]

logger = logging.getLogger("mpidist.variables")


@final
class VariableSynchronization(CaseInsensitiveEnum):
    """When the copies of a variable are aggregated: `AUTO` means `ON_WRITE`."""

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


@final
class VariableAggregation(CaseInsensitiveEnum):
    """How the values that replicas write or hold are aggregated. `ONLY_FIRST_REPLICA` takes rank 0's."""

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"


class Variable(DistributedValues, ReadsAsArray, Assignable, SparseUpdates, ABC):
    """An array that a strategy keeps on every rank. Making one is collective over the ranks of the current strategy.

    Python's operators and NumPy's functions read a variable as an array. Assigning in `Strategy.run` aggregates the
    values of all replicas; assigning in cross-replica context writes this rank's copy, so every rank must write the
    same value.

    Args:
        initial_value: An array, a number, or a function that returns one. Every rank starts with the value of rank 0.
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

    _is_trainable_by_default: ClassVar[bool]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        kind: type[Variable] = cls
        if cls is Variable:
            strategy = context_stack.current_strategy()
            own = strategy.extended.variable_placement.make(strategy, *args, **kwargs)
            if own is not None:  # no subclass, so `__init__` is not called
                return own
            kind = MirroredVariable
            with suppress(ValueError):  # `__init__` raises it, on all ranks
                if VariableSynchronization(kwargs.get("synchronization", "AUTO")) is VariableSynchronization.ON_READ:
                    kind = SyncOnReadVariable
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
        strategy = context_stack.current_strategy()
        error: Exception | None = None
        array: Any = np.empty(0)
        fields: dict[str, str] = {}
        self._strategy = strategy
        self._name = name if name is not None else strategy.extended.default_variable_name()
        try:
            self._synchronization = _synchronization(synchronization)
            self._aggregation = VariableAggregation(aggregation)
            array = _native(
                initial_value() if callable(initial_value) else initial_value, dtype, f"variable {self._name!r}"
            )
            if self._aggregation is VariableAggregation.MEAN and array.dtype.kind in "iub":
                raise ValueError(f"a variable of dtype {array.dtype.name} cannot have aggregation MEAN")
            fields = {
                "name": self._name,
                "value": f"{array.dtype.name}{list(array.shape)}",
                "synchronization": str(self._synchronization),
                "aggregation": str(self._aggregation),
            }
        except Exception as problem:  # also of `initial_value`: the other ranks must learn of it
            error = problem
        strategy.extended.agree_on_variable(fields, name is None, error)
        value = strategy.extended.cross_device_ops.broadcast(array, "all", call="initial value of a Variable")
        self._value = self._place(value)
        self._local_view = self.local_value()  # read-only
        self._trainable = self._is_trainable_by_default if trainable is None else trainable
        if context_stack.current() is None and open_groups.num_open():
            logger.warning(
                "variable %r was made outside of strategy.scope(): it belongs to the default strategy, of this process "
                "alone, so its value is this rank's own, and may differ from that of other ranks; make it inside",
                self._name,
            )

    def _place(self, value: Any) -> Any:
        """Put the initial value where this kind of variable lives."""
        return value

    @property
    def values(self) -> tuple[Any, ...]:
        """This rank's copy, in a tuple of one."""
        return (self.local_value(),)

    @property
    def strategy(self) -> CurrentStrategy:
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
        """Whether an optimizer should change the variable."""
        return self._trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the copies are aggregated."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How values or copies are aggregated."""
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
        """Return the value in the current context: `read_value`."""
        return self.read_value()

    @final
    def read_value(self) -> Any:
        """Return the value in the current context: a new array. Collective for `ON_READ` in cross-replica context."""
        value = self._read_view()
        return value.copy() if value is self._local_view else value

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            f"variable {self._name!r} cannot be copied or pickled: it belongs to its strategy; read its value, as with "
            "numpy()"
        )

    def __repr__(self) -> str:
        return (
            f"<mpidist.Variable {self._name!r} {self.dtype.name}{list(self.shape)} {self._synchronization} "
            f"{self._aggregation}, this rank's copy: {self._value!r}>"
        )


@final
class MirroredVariable(Variable):
    """A variable whose copies are kept equal: every rank writes the aggregate of what the replicas assign."""

    _is_trainable_by_default = True

    def is_mirrored_over(self, group: SyncGroup) -> bool:
        """Return True for the ranks of its strategy, in cross-replica context."""
        entry = context_stack.innermost()
        return group is self._strategy.extended.group and (entry is None or entry.replica_context is None)

    def _read_view(self) -> Any:
        return self._local_view

    def _assign_in_replica(self, value: Any, ufunc: np.ufunc | None) -> None:
        aggregation = self._aggregation
        if aggregation is VariableAggregation.NONE:
            self._require_own_copy()
            self._write(value, ufunc)
            return
        ops = self._strategy.extended.cross_device_ops
        array, error = self._value, None
        try:
            array = self._contribution(value)
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = problem
        call = f"assignment to variable {self._name!r}"
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            self._write(ops.broadcast(array, "all", call=call, error=error), ufunc)
        else:
            self._write(ops.all_reduce(ReduceOp[aggregation.name], array, call=call, error=error), ufunc)

    def _assign_across_replicas(self, value: Any, ufunc: np.ufunc | None) -> None:
        self._write(value, ufunc)

    def _place(self, value: Any) -> Any:
        self._placement = self._strategy.extended.variable_placement.for_value(value)
        return self._placement.store(value)

    def _write(self, value: Any, ufunc: np.ufunc | None) -> None:
        if not self._placement.is_shared:
            self._store(self._cast(value), ufunc)
            return
        array, error = self._value, None
        try:
            array = self._cast(value)
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = problem
        self._placement.write(self._name, partial(self._store, array, ufunc), error)

    def _require_own_copy(self) -> None:
        if self._placement.is_shared:
            what = f"variable {self._name!r} has aggregation NONE and is one for all ranks of a node"
            raise ValueError(f"{what}: a replica cannot assign to it by itself; choose SUM, MEAN, ...")

    def _contribution(self, value: Any) -> Any:
        num_replicas = self._strategy.num_replicas_in_sync
        if self._aggregation is VariableAggregation.SUM and num_replicas > 1:
            require_contributions(ReduceOp.SUM, [value], self._strategy.extended.group, num_replicas)
            if is_python_number(value):
                raise ValueError(
                    f"a non-DistributedValues value {value!r} cannot be reduced: assigned to variable {self._name!r} "
                    f"with aggregation SUM, it would count {num_replicas} times. Assign an array that this replica "
                    "contributes"
                )
        array = self._cast(value)
        return array if array.shape == self.shape else np.broadcast_to(array, self.shape)

    def _scatter(self, call: str, delta: Any) -> None:
        entry = self._current_entry(call)
        aggregates = self._aggregation is not VariableAggregation.NONE
        if entry is None or entry.replica_context is None:
            aggregates = False
        elif not aggregates:
            self._require_own_copy()
        elif call not in AGGREGATED_CALLS and self._aggregation is not VariableAggregation.ONLY_FIRST_REPLICA:
            raise NotImplementedError(
                f"{call} of variable {self._name!r} has no {self._aggregation} over replicas; choose aggregation "
                "ONLY_FIRST_REPLICA or NONE, or change the rows outside of strategy.run()"
            )
        indices, values, error = np.empty(0, np.int64), self._value, None
        try:
            indices, values = checked_rows(delta, self._value, f"variable {self._name!r}")
        except Exception as problem:
            error = problem
        if aggregates:
            indices, values = self._gather_rows(call, indices, values, error)
        self._placement.write(self._name, partial(change_rows, call, self._value, indices, values), error)

    def _gather_rows(self, call: str, indices: Any, values: Any, error: Exception | None) -> tuple[Any, Any]:
        """Gather the rows of all replicas, for the aggregation."""
        extended, aggregation = self._strategy.extended, self._aggregation
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA and not extended.replicas.has_first:
            indices, values = indices[:0], values[:0]
        call = f"{call} of variable {self._name!r}"
        indices, values = extended.all_gather(call, (indices, values), 0, None, error)
        if aggregation is VariableAggregation.MEAN:
            values = (values / self._strategy.num_replicas_in_sync).astype(self.dtype, copy=False)
        return indices, values


@final
class SyncOnReadVariable(Variable):
    """A variable whose copies may differ. Reading it in cross-replica context aggregates them: a metric, say."""

    _is_trainable_by_default = False

    def is_mirrored_over(self, group: SyncGroup) -> bool:
        """Return False: copies may differ."""
        return False

    def _read_view(self) -> Any:
        """Return this rank's copy in `Strategy.run`; elsewhere the aggregate of all copies, which is collective."""
        entry = context_stack.innermost()
        if (
            entry is not None and (entry.replica_context is not None or entry.is_update)
        ) or self._is_of_default_strategy():
            return self._local_view
        ops = self._strategy.extended.cross_device_ops
        self._require_aggregation("read")
        call = f"reading of variable {self._name!r}"
        if self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return ops.broadcast(self._value, "all", call=call)
        return ops.all_reduce(ReduceOp[self._aggregation.name], self._value, call=call)

    def _assign_in_replica(self, value: Any, ufunc: np.ufunc | None) -> None:
        self._write(value, ufunc)

    def _assign_across_replicas(self, value: Any, ufunc: np.ufunc | None) -> None:
        if not self._is_of_default_strategy():
            self._require_aggregation("assigned")
            if self._aggregation is VariableAggregation.SUM:
                if ufunc is not None:
                    raise ValueError(
                        f"variable {self._name!r} has aggregation SUM: in cross-replica context it can be assigned, "
                        "and not added to or subtracted from"
                    )
                self._store(self._share_of_sum(self._cast(value)), None)
                return
        self._write(value, ufunc)

    def _share_of_sum(self, total: Any) -> Any:
        """Return this rank's part of a sum: equal parts, of integers with the remainder in replica 0's part."""
        count = self._strategy.num_replicas_in_sync
        if total.dtype.kind not in "biu":
            return total / count
        wide = total.astype(np.uint64 if total.dtype.kind == "u" else np.int64)
        rest = np.fmod(wide, wide.dtype.type(count))
        share = (wide - rest) // wide.dtype.type(count)
        return share + rest if self._strategy.extended.replicas.has_first else share

    def _scatter(self, call: str, delta: Any) -> None:
        raise NotImplementedError(
            f"{call} is not supported by variable {self._name!r}, which is ON_READ: read the variable, change the "
            "array, and assign the array"
        )

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


def _native(value: Any, dtype: Any, what: str) -> Any:
    given = np.asarray(value) if isinstance(value, (list, tuple)) else value
    array = arrays.library_of(given).to_native(given)
    if dtype is not None:
        array = cast_for(array.reshape(-1)[:0].real.astype(dtype), value, what)
    return array.astype(array.dtype.newbyteorder("="))
