"""On which server a new variable lives, and how the workers agree on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final, final

import numpy as np

from mpidist.context_stack import CurrentStrategy
from mpidist.parameter_server.client import Location, ParameterClient
from mpidist.parameter_server.partitioners import num_shards_of
from mpidist.parameter_server.variable import ServerVariable, ShardedVariable
from mpidist.transport import arrays
from mpidist.transport.communicator import shard_bounds
from mpidist.transport.half import dtype_named
from mpidist.variables.casting import initial_array, require_mean
from mpidist.variables.placement import VariablePlacement
from mpidist.variables.rules import VariableAggregation, VariableSynchronization, chosen_synchronization

__all__ = ["PLACEMENTS", "OnServers"]

PLACEMENTS: Final = ("round_robin", "bytes")


@final
class OnServers(VariablePlacement):
    """Variables live on servers: in turn, or always on the server that holds the fewest bytes.

    Without `servers`, on a rank that is a server, no variable can be made. `is_chief` says whether this worker's values
    count, `devices` names the device of each server.
    """

    def __init__(
        self,
        servers: ParameterClient | None,
        is_chief: bool,
        partitioner: Callable[..., Any] | None = None,
        placement: str = "round_robin",
        devices: Sequence[str] = (),
    ) -> None:
        self.devices = tuple(devices)
        self._servers, self._is_chief, self._partitioner, self._placement = servers, is_chief, partitioner, placement
        self._nbytes = [0] * (1 if servers is None else servers.num_servers)
        self._num_placed = 0  # in turn, so without those that were put beside another one
        self._num_arrays = 0
        self._num_unnamed = 0
        self._beside: list[int] = []

    @contextmanager
    def colocated_with(self, var: Any) -> Iterator[None]:
        """Put variables that are made in the `with` body on the server of another one."""
        self._beside.append((var.variables[0] if isinstance(var, ShardedVariable) else var).server)
        try:
            yield
        finally:
            self._beside.pop()

    def make(self, strategy: CurrentStrategy, *args: Any, **kwargs: Any) -> Any:
        """Make a variable: see `Variable`. Collective over the workers."""
        if self._servers is None:
            raise RuntimeError(
                f"rank {strategy.topology.rank} of the parameter servers makes a variable: a server only serves; "
                "write `if strategy.is_ps: strategy.serve()` before the work of the workers"
            )
        self._servers.begin_use("Variable")
        error, fields, name = None, {}, ""
        rules: dict[str, Any] = {}
        state = self._num_placed, list(self._nbytes), self._num_unnamed
        locations: list[Location] = []
        try:
            value, name, rules = self._describe(*args, **kwargs)
            count = num_shards_of(self._partitioner, value.shape, value.dtype)
            locations = self._locate(value, name, count)
            fields = {
                "name": name,
                "value": f"{value.dtype.name}{list(value.shape)}",
                "servers": str([location.server for location in locations]),
                "synchronization": str(rules["synchronization"]),
                "aggregation": str(rules["aggregation"]),
            }
            if self._is_chief:
                for location, part in zip(locations, _parts(value, count), strict=True):
                    self._servers.allocate(location, part)
        except Exception as problem:  # also of `initial_value`: the other workers must learn of it
            error = problem
        try:
            self._servers.meet("Variable", fields, error, chief=True)
        except BaseException:
            self._num_placed, self._nbytes, self._num_unnamed = state
            raise
        self._num_arrays += len(locations)
        made = [ServerVariable(strategy, self._servers, location, **rules) for location in locations]
        return made[0] if len(made) == 1 else ShardedVariable(made, name)

    def _describe(
        self,
        initial_value: Any,
        *,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        synchronization: Any = "AUTO",
        aggregation: Any = "NONE",
    ) -> tuple[np.ndarray[Any, Any], str, dict[str, Any]]:
        """Return the initial value, the name and the rules of a variable, from the arguments of `Variable`."""
        if name is None:
            name = f"variable_{self._num_unnamed}" if self._num_unnamed else "variable"
            self._num_unnamed += 1
        what = f"variable {name!r}"
        given = initial_value() if callable(initial_value) else initial_value
        array = arrays.on_host(initial_array(given, dtype, what))
        if not _is_known_by_name(array.dtype):
            raise TypeError(f"{what} cannot be on a parameter server: it is of dtype {array.dtype}, and needs numbers")
        when, how = chosen_synchronization(synchronization), VariableAggregation(aggregation)
        if how is VariableAggregation.MEAN:
            require_mean(array.dtype, what)
        is_trainable = when is VariableSynchronization.ON_WRITE if trainable is None else bool(trainable)
        return array, name, {"trainable": is_trainable, "synchronization": when, "aggregation": how}

    def _locate(self, value: np.ndarray[Any, Any], name: str, count: int) -> list[Location]:
        """Choose a server for each shard."""
        locations = []
        for number, part in enumerate(_parts(value, count)):
            if self._beside:
                server = self._beside[-1]
            elif self._placement == "bytes":
                server = self._nbytes.index(min(self._nbytes))
            else:
                server = self._num_placed % len(self._nbytes)
                self._num_placed += 1
            self._nbytes[server] += part.nbytes
            part_name = name if count == 1 else f"{name}/part_{number}"
            key = self._num_arrays + number
            locations.append(Location(server, key, part.shape, part.dtype, part_name))
        return locations


def _is_known_by_name(dtype: np.dtype[Any]) -> bool:
    """Whether a server, to which the name of a dtype is sent, can make arrays of it: not of texts, records, objects."""
    try:
        return not dtype.hasobject and dtype_named(dtype.name) == dtype
    except TypeError:
        return False


def _parts(value: np.ndarray[Any, Any], count: int) -> list[np.ndarray[Any, Any]]:
    """Cut an array along axis 0: longer parts come first, and lengths differ by at most one."""
    if count == 1:
        return [value]
    bounds = shard_bounds(len(value), count)
    return [value[start:stop] for start, stop in pairwise(bounds)]
