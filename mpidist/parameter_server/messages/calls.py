"""Changes that belong to calls of functions: if a call is made again, its changes are not."""

from __future__ import annotations

from collections.abc import Generator
from typing import final

from mpidist.parameter_server.messages.connection import Connection

__all__ = ["Calls"]

Steps = Generator[bool, None, None]


@final
class Calls:
    """How many changes of each call a server has made.

    A worker that is lost may have made some changes of its call. The next worker makes them all again, in the same
    order, and the server drops as many as it has made.
    """

    def __init__(self) -> None:
        self._made: dict[int, int] = {}
        self._under_way: set[int] = set()

    def forget_before(self, oldest: int) -> None:
        """Forget the calls that will not be made again: those with lower numbers."""
        for number in [number for number in self._made if number < oldest]:
            del self._made[number]

    def make_once(self, connection: Connection, change: Steps) -> Steps:
        """Make a change of the connection's call, unless the change has been made. The caller answers afterwards."""
        call, place = connection.call, connection.num_changes
        connection.num_changes += 1
        while call in self._under_way:  # by a worker that is lost: that change may be completed, or not
            yield False
        if place < self._made.get(call, 0):
            yield from connection.drain()
            return
        self._under_way.add(call)
        try:
            yield from change
            self._made[call] = place + 1
        finally:
            self._under_way.discard(call)
