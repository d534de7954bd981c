"""The servers, as a worker uses them that pushes together with the other workers of its node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np

from mpidist.parameter_server.messages import Change, Location, Push, RowsChange
from mpidist.parameter_server.node_pushes import NodePushes
from mpidist.parameter_server.rules import Rule
from mpidist.parameter_server.servers import Servers
from mpidist.transport import is_shared

__all__ = ["NodeServers"]

Array = np.ndarray[Any, Any]


@final
class NodeServers(Servers):
    """The servers, beside pushes that the workers of the node make together: any request comes after the last of them.

    Args:
        servers: The servers, as this worker alone uses them.
        pushes: This worker's part in the pushes.
    """

    def __init__(self, servers: Servers, pushes: NodePushes) -> None:
        self.num_servers = servers.num_servers
        self._alone, self._pushes = servers, pushes

    @property
    def broken(self) -> Exception | None:
        return self._alone.broken or self._pushes.broken

    @property
    def _settled(self) -> Servers:
        self._pushes.settle()
        return self._alone

    def begin_use(self, call: str) -> None:
        self._alone.begin_use(call)

    def allocate(self, location: Location, value: Array) -> None:
        self._settled.allocate(location, value)

    def read(self, locations: Sequence[Location], into: Sequence[Array] = ()) -> Sequence[Array]:
        return self._settled.read(locations, into)

    def read_rows(self, location: Location, indices: Array) -> Array:
        return self._settled.read_rows(location, indices)

    def change(self, locations: Sequence[Location], values: Sequence[Array], how: int | Rule) -> None:
        self._settled.change(locations, values, how)

    def change_rows(self, changes: Sequence[RowsChange], how: int | Rule) -> None:
        self._settled.change_rows(changes, how)

    def push(self, make: Callable[[], Push]) -> None:
        def make_sum() -> Push:
            push = make()
            if push.how == Change.ASSIGN:
                raise ValueError(
                    'push(update="assign") with aggregate_in_node=True: what the workers of a node push is summed, and '
                    "a sum is not assigned; call variable.assign(value), which is each worker's own"
                )
            return push

        self._pushes.push(make_sum, self._send)

    def _send(self, push: Push) -> None:
        self._alone.push(lambda: push)
        self._alone.flush()

    def meet(self, call: str, fields: Mapping[str, str], error: Exception | None = None, chief: bool = False) -> None:
        try:
            self._pushes.settle()
        except Exception as problem:  # of any kind: the other workers must learn of it
            error = error or problem
        self._pushes.rest()
        try:
            self._alone.meet(call, fields, error, chief)
        except BaseException as problem:
            self._pushes.go_on(None if is_shared(problem) else problem)
            raise
        self._pushes.go_on(None)

    def missing_steps(self, call: str) -> Exception | None:
        return self._alone.missing_steps(call)

    def step_done(self) -> None:
        self._settled.step_done()

    def begin_call(self, number: int, oldest: int) -> None:
        self._settled.begin_call(number, oldest)

    def flush(self) -> None:
        self._settled.flush()

    def close(self, error: BaseException | None) -> Exception | None:
        failure = None
        try:
            if error is None:
                self._pushes.settle()
        except BaseException as problem:  # a push that failed is told here, too: then no server waits for this worker
            failure = error = problem
        self._pushes.end()
        missing = self._alone.close(error)
        if failure is not None:
            raise failure
        return missing
