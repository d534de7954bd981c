"""How a server answers reads: what goes in messages, and what the workers of its node copy where it lies."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, final

from mpidist.parameter_server.messages import Connection, Lane, Piece, is_read_in_place, plan_messages
from mpidist.parameter_server.store import Stored

__all__ = ["VariableList", "send_variables"]

Steps = Generator[bool, None, None]


@final
class VariableList:
    """Variables that a worker reads and changes together.

    Args:
        variables: The variables.
        is_near: Whether the worker is one of this node, which shares memory with the server.

    Attributes:
        variables: As given.
        is_near: As given.
        sizes: The bytes of each.
        total: Their sum.
        reads: In what messages they are read.
    """

    def __init__(self, variables: Sequence[Stored], is_near: bool) -> None:
        self.variables, self.is_near = list(variables), is_near
        self.sizes = tuple(stored.value.nbytes for stored in variables)
        self.total = sum(self.sizes)
        self.reads = plan_messages(self.sizes, self.places if is_near else ())

    @property
    def places(self) -> tuple[int, ...]:
        """Where each variable lies in the server's part of the node's shared memory."""
        return tuple(stored.place for stored in self.variables)

    def bytes_of(self, pieces: Sequence[Piece]) -> list[Any]:
        """Return the bytes of pieces."""
        if len(pieces) == 1:
            item, start, stop = pieces[0]
            return [self.variables[item].bytes[start:stop]]
        return [self.variables[item].bytes for item, _, _ in pieces]


def send_variables(connection: Connection, wanted: VariableList) -> Steps:
    """Send the values of variables, each a snapshot.

    What fits into a message is copied in one step, and no change of it is half made between steps. A larger one, and
    one that the worker reads where it lies, keeps a turn until the worker has all of it.
    """
    lane, turns = connection.lane, _Turns(connection.lane)
    try:
        for pieces in wanted.reads:
            item, start, stop = pieces[0]
            stored, size = wanted.variables[item], wanted.sizes[item]
            is_in_place = wanted.is_near and is_read_in_place(size, stored.place)
            is_in_turn = is_in_place or stop - start < size
            if is_in_turn and start == 0:
                yield from turns.enter(stored)
            if is_in_place and lane is not None:
                while not lane.can_send():
                    yield turns.let_go()
                turns.lend(lane.send(0))
                yield True
                continue
            yield from connection.send(wanted.bytes_of(pieces))
            if is_in_turn and stop == size:
                turns.leave_last()
        while turns.held:
            yield turns.let_go()
    finally:  # also if the worker is lost meanwhile
        turns.leave_all()


@final
class _Held:
    """A turn of a variable that is being read.

    Attributes:
        stored: The variable.
        turn: The turn.
        number: What the lane counts once the worker has copied the variable, if it copies from where it lies.
    """

    __slots__ = ("number", "stored", "turn")

    def __init__(self, stored: Stored) -> None:
        self.stored, self.turn = stored, stored.enter(writes=False)
        self.number: int | None = None


@final
class _Turns:
    """The turns of one read.

    Attributes:
        held: Those that have not ended.
    """

    def __init__(self, lane: Lane | None) -> None:
        self._lane = lane
        self.held: deque[_Held] = deque()

    def enter(self, stored: Stored) -> Steps:
        """Wait for a turn of a variable."""
        one = _Held(stored)
        self.held.append(one)
        while not stored.may_go(one.turn):
            yield self.let_go()

    def lend(self, number: int) -> None:
        """Let the last turn end when the worker has copied the variable."""
        self.held[-1].number = number

    def let_go(self) -> bool:
        """End the turns of what the worker has copied. Returns whether there was one."""
        lane, before = self._lane, len(self.held)
        while self.held and lane is not None:
            number = self.held[0].number
            if number is None or number > lane.num_taken():
                break
            self._leave(self.held.popleft())
        return len(self.held) < before

    def leave_last(self) -> None:
        """End the last turn."""
        self._leave(self.held.pop())

    def leave_all(self) -> None:
        """End all turns."""
        while self.held:
            self.leave_last()

    def _leave(self, one: _Held) -> None:
        one.stored.leave(one.turn)
