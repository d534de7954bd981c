"""Requests of a rank that is worker and server in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from mpidist.parameter_server.messages.protocol import Header, Op, from_json
from mpidist.parameter_server.store import Store
from mpidist.parameter_server.transfers import change_rows
from mpidist.transport.arrays import bytes_of

__all__ = ["LocalChannel"]

Array = np.ndarray[Any, Any]


@final
class LocalChannel:
    """A `Channel` without messages: `start` carries out what other workers or the time of an answer do not matter for.

    Its errors are those of the server's code itself.
    """

    rank, number, broken = 0, 0, None

    def __init__(self) -> None:
        self._store = Store()
        self._lists: dict[int, list[int]] = {}
        self._values: list[Array] = []  # that were read last

    def start(
        self,
        call: str,
        op: int,
        variables: int = 0,
        data: Sequence[Array] = (),
        rows: int = 0,
        change: int = 0,
        numbers: tuple[float, ...] = (),
    ) -> None:
        """Carry out a request. Arguments are those of `Channel.start`."""
        store = self._store
        if op == Op.ALLOCATE:
            store.allocate(variables, data[1])
        elif op == Op.NAME_LIST:
            self._lists[variables], self._values = data[0].tolist(), [np.full(data[0].size, -1)]
        elif op == Op.NAME_RULE:
            self.number = store.number_of_rule(from_json(data[0]))
        elif op == Op.CHANGE_ROWS:
            joined = np.concatenate([bytes_of(array) for array in data])
            for _ in change_rows(store, Header(op, 0, 0, rows, change, joined.size, numbers), joined):
                pass  # nobody else has a turn
        elif op in (Op.READ, Op.READ_ROWS, Op.CHANGE):
            found = [store.variables[key] for key in self._lists.get(variables, [variables])]
            if op == Op.CHANGE:
                for stored, value in zip(found, data, strict=True):
                    store.begin(stored, change)
                    store.change(stored, change, 0, value.reshape(-1).copy(), numbers)
            else:
                self._values = [stored.value[data[0]] if data else stored.value for stored in found]

    def finish(self, more_seconds: float = 0.0) -> None:
        """Do nothing: the request is carried out."""

    def data(self, arrays: Sequence[Array], places: tuple[int, ...] = ()) -> None:
        """Put what was read into arrays."""
        for array, value in zip(arrays, self._values, strict=True):
            array[...] = value

    def leave(self, why: str) -> bool:
        """Do nothing: nobody waits for this worker."""
        return True

    def close(self) -> None:
        """Forget the variables."""
        self._store.variables.clear()
