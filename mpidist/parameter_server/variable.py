"""Variables on parameter servers, whole or cut into shards: reading and assigning them are requests to the servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from mpidist import context_stack
from mpidist.context_stack import CurrentStrategy, parts_of
from mpidist.options import ReduceOp
from mpidist.parameter_server.client import Location, ParameterClient, Push, RowsChange
from mpidist.parameter_server.messages.protocol import SCATTERS, Change
from mpidist.values import Contributions, DistributedValues, IndexedSlices, PerReplica, local_component
from mpidist.variables.array_protocol import ReadsAsArray
from mpidist.variables.assigning import Assignable, require_no_effect
from mpidist.variables.casting import cast_for, is_python_number
from mpidist.variables.rules import VariableAggregation, VariableSynchronization
from mpidist.variables.sparse_updates import AGGREGATED_CALLS, checked_rows, host_indices
from mpidist.variables.variable import Variable

if TYPE_CHECKING:
    from mpidist.transport.group.sync_group import SyncGroup

__all__ = ["ServerVariable", "ShardedVariable", "change_together", "read_together", "sharing_replica"]

Array = np.ndarray[Any, Any]

_ASSIGN: Final[dict[np.ufunc | None, int]] = {None: Change.ASSIGN, np.add: Change.ADD, np.subtract: Change.SUB}


@final
class ServerVariable(DistributedValues, Assignable):
    """A variable on a parameter server. `Variable(...)` in the scope of a `ParameterServerStrategy` makes one.

    All workers share the one array: a read gives a snapshot of it, with this worker's own changes. A change is applied
    once and whole, and waits for no other worker; the call returns before. Rows and numbers are added on the server.

    `servers`, as this worker uses them, and `location`, where the array lives, are attributes, too.
    """

    def __init__(
        self,
        strategy: CurrentStrategy,
        servers: ParameterClient,
        location: Location,
        trainable: bool,
        synchronization: VariableSynchronization,
        aggregation: VariableAggregation,
    ) -> None:
        self._strategy, self.servers, self.location = strategy, servers, location
        self._trainable, self._synchronization, self._aggregation = trainable, synchronization, aggregation
        self._name, self._suffix = location.name, parts_of(strategy).variable_suffix(location.name)
        self._like = np.broadcast_to(np.zeros((), location.dtype), location.shape)  # its form, without its memory

    @property
    def values(self) -> tuple[Any, ...]:
        """The value, in a tuple of one."""
        return (self.read_value(),)

    def is_mirrored_over(self, group: SyncGroup) -> bool:
        """Return False: workers may read different values."""
        return False

    @property
    def server(self) -> int:
        """The number of the server that holds the variable."""
        return self.location.server

    def read_value(self) -> Any:
        """Read the value from the server, as a new array."""
        self.require_current("read_value")
        return self.servers.read([self.location])[0]

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """Read some rows from the server, [k, ...].

        Args:
            indices: [k] numbers of rows.
            name: Must be `None`, as in `assign`.

        Raises:
            IndexError: If there is no such row.
            TypeError: If the indices are no integers.
        """
        require_no_effect("sparse_read", name=name)
        self.require_current("sparse_read")
        return self.servers.read_rows(self.location, _row_numbers(self._what, indices, self.shape))

    def cast(self, value: Any) -> Array:
        """Return a value as a contiguous array of the variable's shape and dtype, in host memory."""
        return _cast(self, value)

    def row_changes(self, value: Any) -> list[RowsChange]:
        """Return what `IndexedSlices` change: nothing, if they have no rows."""
        return self.changes_of_rows(*checked_rows(value, self._like, self._what))

    def changes_of_rows(self, indices: Array, values: Any) -> list[RowsChange]:
        """Return the same for rows that exist for certain, and values of the variable's dtype."""
        return [RowsChange(self.location, indices, np.ascontiguousarray(values))] if indices.size else []

    def _assign(self, call: str, value: Any, ufunc: np.ufunc | None, read_value: bool) -> Any:
        self.require_current(call)
        how = _change_of(self, ufunc)
        replica = sharing_replica(self._strategy)
        if replica is None:
            self.servers.change(self.location, self.cast(value), how)
        else:
            make = partial(self._contribution, call, value)
            change_together(replica, f"{call} of {self._what}", make, partial(self._aggregate, how))
        return self if read_value else None

    def _scatter(self, call: str, delta: Any) -> None:
        self.require_current(call)
        replica, how = sharing_replica(self._strategy), SCATTERS[call]
        if replica is None:
            self.servers.change_rows(self.row_changes(delta), how)
        else:
            make = partial(self._rows_contribution, call, delta)
            change_together(replica, f"{call} of {self._what}", make, partial(self._aggregate_rows, how))

    def _require_aggregation(self, call: str) -> None:
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"{call} of {self._what} with aggregation NONE by several replicas of a worker: choose how their "
                "values are combined, by Variable(..., aggregation='sum'), 'mean' or 'only_first_replica'"
            )

    def _contribution(self, call: str, value: Any) -> Any:
        self._require_aggregation(call)
        count = self._strategy.num_replicas_in_sync
        if self.aggregation is VariableAggregation.SUM and is_python_number(value):
            raise ValueError(
                f"{value!r} is assigned to {self._what} with aggregation SUM: it would count {count} times, once for "
                "each replica. Assign an array that this replica contributes"
            )
        return self.cast(value)

    def _aggregate(self, how: int, given: Sequence[Any]) -> None:
        """Change the variable by the aggregate of the replicas' values."""
        value = given[0]
        if self.aggregation is not VariableAggregation.ONLY_FIRST_REPLICA:
            op, ops = ReduceOp[self.aggregation.name], parts_of(self._strategy).cross_device_ops
            value = ops.all_reduce(op, Contributions(given), call=f"assignment to {self._what}")
        self.servers.change(self.location, self.cast(value), how)

    def _rows_contribution(self, call: str, delta: Any) -> tuple[Any, Any]:
        self._require_aggregation(call)
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
        """Require that the strategy is open, and no other one is current. Local."""
        entry = context_stack.innermost()
        if entry is None:
            parts_of(self._strategy).group.require_open(call)
        elif entry.strategy is not self._strategy:
            parts_of(self._strategy).group.require_open(call)
            parts_of(self._strategy).require_not_mixed(call)

    def __repr__(self) -> str:
        return f"<mpidist.Variable {self.name!r} {self.dtype.name}{list(self.shape)} on parameter server {self.server}>"


@final
class ShardedVariable(Assignable):
    """Variables on parameter servers that together are one array, cut along axis 0.

    `Variable(...)` makes one in the scope of a `ParameterServerStrategy` with a partitioner. A read is a snapshot of
    each shard, and not of all shards together.

    Args:
        variables: The shards, in order.
        name: The name of the whole.

    Raises:
        TypeError: If a shard is no variable on a parameter server.
        ValueError: If there is no shard, or if shards have different dtypes, or shapes that differ beyond axis 0.
    """

    def __init__(self, variables: Sequence[ServerVariable], name: str = "ShardedVariable") -> None:
        if isinstance(variables, ServerVariable) or not isinstance(variables, Sequence):
            raise TypeError(f"a ShardedVariable takes a list of variables, got {type(variables).__name__}")
        for variable in variables:
            if not isinstance(variable, ServerVariable):
                kind = type(variable).__name__
                raise TypeError(f"a ShardedVariable consists of variables on parameter servers, got {kind}")
        if not variables:
            raise ValueError("a ShardedVariable needs at least one variable")
        if len({variable.dtype for variable in variables}) > 1:
            raise ValueError(f"shards must have one dtype, got {[variable.dtype.name for variable in variables]}")
        if any(not variable.shape for variable in variables) or len({one.shape[1:] for one in variables}) > 1:
            shapes = [list(variable.shape) for variable in variables]
            raise ValueError(f"shards must have the same shape but for axis 0, got {shapes}")
        self._variables, self._name, first = list(variables), name, variables[0]
        self._suffix = first._suffix
        self._strategy, self._trainable = first.strategy, first.trainable
        self._synchronization, self._aggregation = first.synchronization, first.aggregation
        self._bounds = np.cumsum([0, *(variable.shape[0] for variable in variables)])
        shape = (int(self._bounds[-1]), *variables[0].shape[1:])
        self._like = np.broadcast_to(np.zeros((), variables[0].dtype), shape)  # its form, without its memory

    @property
    def variables(self) -> list[ServerVariable]:
        """The shards, in order."""
        return list(self._variables)

    def read_value(self) -> Any:
        """Read all shards from the servers, and return them as one new array."""
        self._variables[0].require_current("read_value")
        whole = np.empty(self.shape, self.dtype)
        read_together(self._variables, self.parts_of(whole))
        return whole

    def parts_of(self, whole: Array) -> list[Array]:
        """View a contiguous array of the variable's shape as an array for each shard."""
        return [whole[start:stop] for start, stop in pairwise(self._bounds)]

    def split(self, value: Any) -> list[Array]:
        """Return a value as an array for each shard."""
        return self.parts_of(_cast(self, value))

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """Read some rows, [k, ...], from the servers that have some of them. As `ServerVariable.sparse_read`."""
        require_no_effect("sparse_read", name=name)
        wanted = _row_numbers(self._what, indices, self.shape)
        rows = np.empty((wanted.size, *self.shape[1:]), self.dtype)
        for shard, places in self._by_shard(wanted):
            rows[places] = self._variables[shard].sparse_read(wanted[places] - self._bounds[shard])
        return rows

    def row_changes(self, value: Any) -> list[RowsChange]:
        """Return what `IndexedSlices` change in each shard. As `ServerVariable.row_changes`."""
        indices, values = checked_rows(value, self._like, self._what)
        return [
            change
            for shard, places in self._by_shard(indices)
            for change in self._variables[shard].changes_of_rows(indices[places] - self._bounds[shard], values[places])
        ]

    def _assign(self, call: str, value: Any, ufunc: np.ufunc | None, read_value: bool) -> Any:
        first = self._variables[0]
        first.require_current(call)
        if sharing_replica(self._strategy) is None:
            # All at once: none is changed if a server has an earlier error to tell.
            locations = [variable.location for variable in self._variables]
            first.servers.push(Push(locations, self.split(value), (), _change_of(self, ufunc), call))
            return self if read_value else None
        parts = [value] * len(self._variables) if is_python_number(value) else self.split(value)
        for variable, part in zip(self._variables, parts, strict=True):
            variable._assign(call, part, ufunc, False)
        return self if read_value else None

    def _scatter(self, call: str, delta: Any) -> None:
        first = self._variables[0]
        first.require_current(call)
        if sharing_replica(self._strategy) is None:
            first.servers.change_rows(self.row_changes(delta), SCATTERS[call])
            return
        indices, values = checked_rows(delta, self._like, self._what)
        places = dict(self._by_shard(indices))
        for shard, variable in enumerate(self._variables):  # also without rows, which another replica may have
            at = places.get(shard, np.empty(0, np.intp))
            variable._scatter(call, IndexedSlices(values[at], indices[at] - self._bounds[shard]))

    def _by_shard(self, indices: Array) -> Iterator[tuple[int, Array]]:
        """Yield each shard that has some of the rows, and the places of these rows in `indices`."""
        shards = np.searchsorted(self._bounds, indices, side="right") - 1
        for shard in np.unique(shards).tolist():
            yield shard, np.flatnonzero(shards == shard)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, (np.ndarray, ReadsAsArray)) and np.asarray(key).dtype != bool:
            raise TypeError(f"{self._what} is indexed by integers and slices; read rows by sparse_read(indices)")
        if isinstance(key, bool):  # a mask, to NumPy
            return self.read_value()[key]
        if isinstance(key, (int, np.integer)) and not -self.shape[0] <= key < self.shape[0]:
            raise IndexError(f"row {key} is out of bounds: {self._what} has {self.shape[0]} rows")
        if isinstance(key, slice) and key.step == 0:
            raise ValueError("slice step cannot be zero")
        if isinstance(key, (int, np.integer)):
            return self.sparse_read([int(key) % self.shape[0]])[0]
        return self.read_value()[key]

    def __repr__(self) -> str:
        where = [variable.server for variable in self._variables]
        return f"<mpidist.ShardedVariable {self._name!r} {self.dtype.name}{list(self.shape)} on servers {where}>"


def _change_of(variable: ServerVariable | ShardedVariable, ufunc: np.ufunc | None) -> int:
    """Return the `Change` that an assignment is."""
    if ufunc is np.subtract and variable.dtype.kind == "b":
        raise TypeError(f"{variable._what} is of dtype bool, of which nothing can be subtracted")
    return _ASSIGN[ufunc]


def read_together(variables: Sequence[ServerVariable], into: Sequence[Any]) -> None:
    """Read variables of one strategy into contiguous arrays, with one request to each server."""
    if variables:
        variables[0].servers.read([variable.location for variable in variables], into)


def sharing_replica(strategy: CurrentStrategy) -> context_stack.CurrentReplica | None:
    """Return the current replica in a strategy's `run`, if this worker has several."""
    replica = context_stack.current_replica()
    is_one_of_several = replica is not None and replica.strategy is strategy and strategy.num_replicas_in_sync > 1
    return replica if is_one_of_several else None


def change_together(
    replica: context_stack.CurrentReplica, call: str, make: Callable[[], Any], change: Callable[[Sequence[Any]], None]
) -> None:
    """Combine the results of `make` on this worker's replicas into one change."""
    argument, error = None, None
    try:
        argument = make()
    except Exception as problem:  # of any kind: the other replicas must learn of it
        error = problem

    def change_once(given: Sequence[Any], wrong: Exception | None) -> None:
        if wrong is not None:
            raise wrong
        change(given)

    replica.calls.write_together(call, change_once, argument, error)


def _cast(variable: ServerVariable | ShardedVariable, value: Any) -> Array:
    """Return a value as a contiguous array of a variable's shape and dtype, in host memory."""
    like = variable._like
    if type(value) is not np.ndarray or value.dtype != like.dtype:
        if isinstance(value, PerReplica) and len(value.values) > 1:
            raise variable._per_replica_error()
        value = local_component(value)
        if isinstance(value, ReadsAsArray):
            value = value.read_value()
        value = cast_for(like, value, variable._what)
    if value.shape != like.shape:
        if value.shape != ():
            shapes = f"shape {list(like.shape)}, and a value of shape {list(value.shape)}"
            raise ValueError(f"{variable._what} has {shapes} was assigned to it")
        value = np.broadcast_to(value, like.shape)
    elif type(value) is np.ndarray and value.flags.c_contiguous:
        return value
    contiguous: Array = np.ascontiguousarray(value).reshape(like.shape)
    return contiguous


def _row_numbers(what: str, indices: Any, shape: Sequence[int]) -> Array:
    """Return the requested rows of a variable, int64[k]. Local."""
    wanted = np.atleast_1d(host_indices(indices))
    is_whole = wanted.dtype.kind in "iu" or not wanted.size  # NumPy makes floats of an empty list
    if not is_whole or wanted.ndim != 1 or not shape:
        raise TypeError(f"rows of {what} are read by integers [k], got {indices!r}")
    for index in (wanted.min(), wanted.max()) if wanted.size else ():
        if not 0 <= index < shape[0]:
            raise IndexError(f"row {index} is out of bounds: {what} has rows 0 to {shape[0] - 1}")
    return wanted.astype(np.int64)


Variable.register(ServerVariable)
