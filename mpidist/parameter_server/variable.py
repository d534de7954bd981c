"""A variable that lives on a parameter server: reading and assigning it are requests to the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from mpidist import context_stack
from mpidist.context_stack import CurrentStrategy, parts_of
from mpidist.options import ReduceOp
from mpidist.parameter_server.client import ParameterClient
from mpidist.parameter_server.messages.locations import Location, RowsChange
from mpidist.parameter_server.messages.protocol import Change
from mpidist.parameter_server.rules import Rule
from mpidist.values import Contributions, DistributedValues, IndexedSlices, local_component
from mpidist.variables.array_protocol import ReadsAsArray
from mpidist.variables.assigning import Assignable, require_no_effect
from mpidist.variables.casting import cast_for, is_python_number, require_mean
from mpidist.variables.rules import VariableAggregation, VariableSynchronization, chosen_synchronization
from mpidist.variables.sparse_updates import AGGREGATED_CALLS, SparseUpdates, checked_rows, host_indices
from mpidist.variables.variable import Variable

if TYPE_CHECKING:
    from mpidist.transport.group.sync_group import SyncGroup

__all__ = ["ServerVariable", "VariableTraits", "read_together", "row_numbers"]

_ASSIGN: Final[dict[np.ufunc | None, int]] = {None: Change.ASSIGN, np.add: Change.ADD, np.subtract: Change.SUB}
_SCATTER: Final = {
    "scatter_add": Change.ADD,
    "scatter_sub": Change.SUB,
    "scatter_update": Change.ASSIGN,
    "scatter_mul": Change.SCATTER_MUL,
    "scatter_div": Change.SCATTER_DIV,
    "scatter_max": Change.SCATTER_MAX,
    "scatter_min": Change.SCATTER_MIN,
}


@final
class VariableTraits:
    """What a program says of a variable besides its value.

    Arguments are those of `Variable`, and `what`, the name of the variable in errors.

    Raises:
        ValueError: If a rule is not known, or does not fit.
    """

    def __init__(
        self, trainable: bool | None, synchronization: Any, aggregation: Any, dtype: np.dtype[Any], what: str
    ) -> None:
        self.synchronization = chosen_synchronization(synchronization)
        self.aggregation = VariableAggregation(aggregation)
        if self.aggregation is VariableAggregation.MEAN:
            require_mean(dtype, what)
        is_trainable = self.synchronization is VariableSynchronization.ON_WRITE
        self.trainable = is_trainable if trainable is None else trainable


@final
class ServerVariable(DistributedValues, ReadsAsArray, Assignable, SparseUpdates):
    """A variable on a parameter server. `Variable(...)` in the scope of a `ParameterServerStrategy` makes one.

    All workers share the one array: a read gives a snapshot of it, with this worker's own changes. A change is applied
    once and whole, and waits for no other worker; the call returns before. Rows and numbers are added on the server.

    Args:
        strategy: The strategy.
        servers: The servers, as this worker uses them. Also an attribute.
        location: Where the array lives. Also an attribute.
        traits: What else is known of the variable.
    """

    def __init__(
        self, strategy: CurrentStrategy, servers: ParameterClient, location: Location, traits: VariableTraits
    ) -> None:
        self._strategy, self._trainable = strategy, bool(traits.trainable)
        self._synchronization, self._aggregation = traits.synchronization, traits.aggregation
        self.servers = servers
        self.location = location
        self._like = np.broadcast_to(np.zeros((), location.dtype), location.shape)  # its form, without its memory

    @property
    def values(self) -> tuple[Any, ...]:
        """The value, in a tuple of one."""
        return (self.read_value(),)

    def is_mirrored_over(self, group: SyncGroup) -> bool:
        """Return False: workers may read different values."""
        return False

    @property
    def name(self) -> str:
        return self.location.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.location.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.location.dtype

    @property
    def server(self) -> int:
        """The number of the server that holds the variable."""
        return self.location.server

    def read_value(self) -> Any:
        """Ask the server for the value: a new array."""
        self.require_current("read_value")
        return self.servers.read([self.location])[0]

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """Ask the server for some rows, [k, ...].

        Args:
            indices: [k] numbers of rows.
            name: Must be `None`, as in `assign`.

        Raises:
            IndexError: If there is no such row.
            TypeError: If the indices are no integers.
        """
        require_no_effect("sparse_read", name=name)
        self.require_current("sparse_read")
        return self.servers.read_rows(self.location, row_numbers(self._what, indices, self.shape))

    def cast(self, value: Any) -> np.ndarray[Any, Any]:
        """Return a value as a contiguous array of the variable's shape and dtype, in host memory."""
        if type(value) is not np.ndarray or value.dtype != self.dtype:
            value = local_component(value)
            if isinstance(value, ReadsAsArray):
                value = value.read_value()
            value = cast_for(self._like, value, self._what)
        if value.shape != self.shape:
            if value.shape != ():
                raise ValueError(
                    f"{self._what} has shape {list(self.shape)}, and a value of shape {list(value.shape)} was assigned "
                    "to it"
                )
            value = np.broadcast_to(value, self.shape)
        elif type(value) is np.ndarray and value.flags.c_contiguous:
            return value
        contiguous: np.ndarray[Any, Any] = np.ascontiguousarray(value).reshape(self.shape)
        return contiguous

    def change_by(self, value: Any, how: int | Rule) -> None:
        """Change the variable by an array or by `IndexedSlices`."""
        if isinstance(value, IndexedSlices):
            self.servers.change_rows(self.row_changes(value), how)
        else:
            self.servers.change([self.location], [self.cast(value)], how)

    def row_changes(self, value: Any) -> list[RowsChange]:
        """Return what `IndexedSlices` change: nothing, if they have no rows.

        Raises:
            TypeError: If the value is of another type, or the indices are no integers.
            ValueError: If a row does not exist, or a shape or the kind of number differs.
        """
        return self.changes_of_rows(*checked_rows(value, self._like, self._what))

    def changes_of_rows(self, indices: np.ndarray[Any, Any], values: Any) -> list[RowsChange]:
        """Return the same for rows that are known to exist, and values of the variable's dtype."""
        return [RowsChange(self.location, indices, np.ascontiguousarray(values))] if indices.size else []

    def _assign(self, call: str, value: Any, ufunc: np.ufunc | None, read_value: bool) -> Any:
        how = _ASSIGN[ufunc]
        self.require_current(call)
        if how == Change.SUB and self.dtype.kind == "b":
            raise TypeError(f"{self._what} is of dtype bool, of which nothing can be subtracted")
        replica = self._sharing_replica()
        if replica is None:
            self.servers.change([self.location], [self.cast(value)], how)
        else:
            self._change_together(replica, call, partial(self._contribution, value), partial(self._aggregate, how))
        return self if read_value else None

    def _scatter(self, call: str, delta: Any) -> None:
        self.require_current(call)
        replica, how = self._sharing_replica(), _SCATTER[call]
        if replica is None:
            self.servers.change_rows(self.row_changes(delta), how)
        else:
            make = partial(self._rows_contribution, call, delta)
            self._change_together(replica, call, make, partial(self._aggregate_rows, how))

    def _sharing_replica(self) -> context_stack.CurrentReplica | None:
        """Return the current replica in `run`, if this worker has several."""
        entry = context_stack.innermost()
        if entry is None or entry.replica_context is None or self._strategy.num_replicas_in_sync == 1:
            return None
        return entry.replica_context

    def _change_together(
        self,
        replica: context_stack.CurrentReplica,
        call: str,
        make: Callable[[], Any],
        change: Callable[[Sequence[Any]], None],
    ) -> None:
        """Let the replicas of this worker make one change, of what `make` returns on each of them."""
        argument, error = None, None
        try:
            if self.aggregation is VariableAggregation.NONE:
                raise ValueError(
                    f"{call} of {self._what} with aggregation NONE by several replicas of a worker: say how their "
                    "values become one, by Variable(..., aggregation='sum'), 'mean' or 'only_first_replica'"
                )
            argument = make()
        except Exception as problem:  # of any kind: the other replicas must learn of it
            error = problem

        def change_once(given: Sequence[Any], wrong: Exception | None) -> None:
            if wrong is not None:
                raise wrong
            change(given)

        replica.joint_calls.write_together(f"{call} of {self._what}", change_once, argument, error)

    def _contribution(self, value: Any) -> Any:
        count = self._strategy.num_replicas_in_sync
        if self.aggregation is VariableAggregation.SUM and is_python_number(value):
            raise ValueError(
                f"{value!r} is assigned to {self._what} with aggregation SUM: it would count {count} times, once for "
                "each replica. Assign an array that this replica contributes"
            )
        return self.cast(value)

    def _aggregate(self, how: int, given: Sequence[Any]) -> None:
        """Change the variable by what the replicas assign together."""
        value = given[0]
        if self.aggregation is not VariableAggregation.ONLY_FIRST_REPLICA:
            op, ops = ReduceOp[self.aggregation.name], parts_of(self._strategy).cross_device_ops
            value = ops.all_reduce(op, Contributions(given), call=f"assignment to {self._what}")
        self.servers.change([self.location], [self.cast(value)], how)

    def _rows_contribution(self, call: str, delta: Any) -> tuple[Any, Any]:
        is_aggregated = self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA or call in AGGREGATED_CALLS
        if not is_aggregated:
            raise NotImplementedError(
                f"{call} of {self._what} has no {self.aggregation} over replicas; choose aggregation "
                "ONLY_FIRST_REPLICA, or change the rows outside of strategy.run()"
            )
        indices, values = checked_rows(delta, self._like, self._what)
        return indices, values

    def _aggregate_rows(self, how: int, given: Sequence[tuple[Any, Any]]) -> None:
        """Change rows of the variable by those of all replicas, one after the other."""
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            given = given[:1]
        indices, values = (np.concatenate(parts) for parts in zip(*given, strict=True))
        if self.aggregation is VariableAggregation.MEAN:
            values = (values / len(given)).astype(self.dtype, copy=False)
        self.servers.change_rows(self.changes_of_rows(indices, values), how)

    def require_current(self, call: str) -> None:
        """Check that a call of the variable can be made now: its strategy is open, and no other one is current. Local.

        Raises:
            RuntimeError: If it cannot.
        """
        entry = context_stack.innermost()
        if entry is None or entry.strategy is not self._strategy:
            parts_of(self._strategy).group.require_open(call)
            parts_of(self._strategy).require_not_mixed(call)

    def __repr__(self) -> str:
        return f"<mpidist.Variable {self.name!r} {self.dtype.name}{list(self.shape)} on parameter server {self.server}>"


def read_together(variables: Sequence[ServerVariable], into: Sequence[Any]) -> None:
    """Read variables of one strategy into contiguous arrays, with one request to each server."""
    if variables:
        variables[0].servers.read([variable.location for variable in variables], into)


def row_numbers(what: str, indices: Any, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the rows of a variable that a user asks for, int64[k]. Local.

    Raises:
        TypeError: If the indices are no integers, or the variable has no rows.
        IndexError: If there is no such row.
    """
    wanted = np.atleast_1d(host_indices(indices))
    is_whole = wanted.dtype.kind in "iu" or not wanted.size  # NumPy makes floats of an empty list
    if not is_whole or wanted.ndim != 1 or not shape:
        raise TypeError(f"rows of {what} are read by integers [k], got {indices!r}")
    for index in (wanted.min(), wanted.max()) if wanted.size else ():
        if not 0 <= index < shape[0]:
            raise IndexError(f"row {index} is out of bounds: {what} has rows 0 to {shape[0] - 1}")
    return wanted.astype(np.int64)


Variable.register(ServerVariable)
