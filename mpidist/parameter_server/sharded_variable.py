"""A variable that is cut along its first axis, so that several servers hold it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, final

import numpy as np

from mpidist.parameter_server.messages.locations import RowsChange
from mpidist.parameter_server.rules import Rule
from mpidist.parameter_server.variable import ServerVariable, read_together, row_numbers
from mpidist.values import IndexedSlices, local_component
from mpidist.variables.array_protocol import ReadsAsArray
from mpidist.variables.assigning import Assignable, require_no_effect
from mpidist.variables.casting import cast_for
from mpidist.variables.sparse_updates import SparseUpdates, checked_rows

__all__ = ["ShardedVariable"]

Array = np.ndarray[Any, Any]


@final
class ShardedVariable(ReadsAsArray, Assignable, SparseUpdates):
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
        self._strategy, self._trainable = first.strategy, first.trainable
        self._synchronization, self._aggregation = first.synchronization, first.aggregation
        self._bounds = np.cumsum([0, *(variable.shape[0] for variable in variables)])
        shape = (int(self._bounds[-1]), *variables[0].shape[1:])
        self._like = np.broadcast_to(np.zeros((), variables[0].dtype), shape)  # its form, without its memory

    @property
    def variables(self) -> list[ServerVariable]:
        """The shards, in order."""
        return list(self._variables)

    @property
    def name(self) -> str:
        return self._name

    @property
    def shape(self) -> tuple[int, ...]:
        return self._like.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._variables[0].dtype

    def read_value(self) -> Any:
        """Ask the servers for all shards, and return them as one new array."""
        self._variables[0].require_current("read_value")
        whole = np.empty(self.shape, self.dtype)
        read_together(self._variables, self.parts_of(whole))
        return whole

    def parts_of(self, whole: Array) -> list[Array]:
        """View a contiguous array of the variable's shape as an array for each shard."""
        return [whole[start:stop] for start, stop in pairwise(self._bounds)]

    def split(self, value: Any) -> list[Array]:
        """Return a value as an array for each shard."""
        value = local_component(value)
        array = cast_for(self._like, value.read_value() if isinstance(value, ReadsAsArray) else value, self._what)
        if array.shape not in (self.shape, ()):
            shapes = f"shape {list(self.shape)}, and a value of shape {list(array.shape)}"
            raise ValueError(f"{self._what} has {shapes} was assigned to it")
        whole = np.ascontiguousarray(np.broadcast_to(array, self.shape))
        return self.parts_of(whole)

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """Ask for some rows, [k, ...]: only of the servers that have some of them. As `ServerVariable.sparse_read`."""
        require_no_effect("sparse_read", name=name)
        wanted = row_numbers(self._what, indices, self.shape)
        rows = np.empty((wanted.size, *self.shape[1:]), self.dtype)
        for shard, places in self._by_shard(wanted):
            rows[places] = self._variables[shard].sparse_read(wanted[places] - self._bounds[shard])
        return rows

    def change_by(self, value: Any, how: int | Rule) -> None:
        """Change the variable by an array or by `IndexedSlices`."""
        if isinstance(value, IndexedSlices):
            self._variables[0].servers.change_rows(self.row_changes(value), how)
        else:
            for variable, part in zip(self._variables, self.split(value), strict=True):
                variable.change_by(part, how)

    def row_changes(self, value: Any) -> list[RowsChange]:
        """Return what `IndexedSlices` change in each shard. As `ServerVariable.row_changes`."""
        indices, values = checked_rows(value, self._like, self._what)
        return [
            change
            for shard, places in self._by_shard(indices)
            for change in self._variables[shard].changes_of_rows(indices[places] - self._bounds[shard], values[places])
        ]

    def _assign(self, call: str, value: Any, ufunc: np.ufunc | None, read_value: bool) -> Any:
        for variable, part in zip(self._variables, self.split(value), strict=True):
            variable._assign(call, part, ufunc, False)
        return self if read_value else None

    def _scatter(self, call: str, delta: Any) -> None:
        indices, values = checked_rows(delta, self._like, self._what)
        for shard, places in self._by_shard(indices):
            rows = IndexedSlices(values[places], indices[places] - self._bounds[shard])
            getattr(self._variables[shard], call)(rows)

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
