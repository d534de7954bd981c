"""How a server sends variables and changes them, step by step, while other workers have their turns.

A worker of the node copies variables from shared memory; all else goes in messages. A step ends after each message.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from typing import Any, final

import numpy as np

from mpidist.parameter_server.messages.ends import Connection
from mpidist.parameter_server.messages.protocol import CHUNK_BYTES, Header, Piece, is_read_in_place, plan_messages
from mpidist.parameter_server.store import Store, Stored, Turn

__all__ = ["Changing", "VariableList", "change_rows", "make_once", "send_variables"]

Array = np.ndarray[Any, Any]
Steps = Generator[bool, None, None]


@final
class VariableList:
    """Variables that a worker reads and changes together, their sizes in bytes, and in what messages they are read.

    `is_near` is whether the worker is one of this node, which shares memory with the server.
    """

    def __init__(self, variables: Sequence[Stored], is_near: bool) -> None:
        self.variables, self.is_near = list(variables), is_near
        self.sizes = tuple(stored.value.nbytes for stored in variables)
        self.total = sum(self.sizes)
        self.reads = plan_messages(self.sizes, self.places if is_near else ())

    @property
    def places(self) -> tuple[int, ...]:
        """Place of each variable in the server's part of the node's shared memory."""
        return tuple(stored.place for stored in self.variables)

    def bytes_of(self, pieces: Sequence[Piece]) -> list[Any]:
        """Return the bytes of the pieces of a message."""
        if len(pieces) > 1:  # each is a whole item
            return [self.variables[item].bytes for item, _, _ in pieces]
        item, start, stop = pieces[0]
        return [self.variables[item].bytes[start:stop]]


def send_variables(connection: Connection, wanted: VariableList) -> Steps:
    """Send the values of variables, each a snapshot.

    What is copied into a message is copied in one step, and no change of it is half made between steps. Another one,
    which is larger, or which MPI or the worker reads where it lies, keeps a turn until the worker has all of it.
    """
    lane, held = connection.lane, deque[Turn]()

    def release_copied() -> bool:
        before = len(held)
        while held and lane is not None and held[0].number is not None and held[0].number <= lane.num_taken():
            turn = held.popleft()
            turn.stored.leave(turn)
        return len(held) < before

    try:
        for pieces in wanted.reads:
            item, start, stop = pieces[0]
            stored, size = wanted.variables[item], wanted.sizes[item]
            is_in_place = wanted.is_near and is_read_in_place(size, stored.place)
            is_sent_from_there = lane is None and len(pieces) == 1
            is_in_turn = is_in_place or is_sent_from_there or stop - start < size
            if is_in_turn and start == 0:
                held.append(stored.enter(writes=False))
                while not stored.may_go(held[-1]):
                    yield release_copied()
            if is_in_place and lane is not None:
                while not lane.can_send():
                    yield release_copied()
                held[-1].number = lane.send(0)
                yield True
                continue
            yield from connection.send(wanted.bytes_of(pieces))
            if is_in_turn and stop == size:
                stored.leave(held.pop())
        while held:
            yield release_copied()
    finally:  # also if the worker is lost meanwhile
        for turn in held:
            turn.stored.leave(turn)


@final
class Changing:
    """One request that changes variables.

    What fits into a message changes its variable in one step. The chunks of a larger array are added one by one, while
    the next ones arrive, and nobody else has a turn of the variable before the last one. Where the cluster goes on
    without workers that are lost (`may_be_lost`), a server first collects all data of a request, so that it makes all
    changes or none. For rules that need the whole array, it collects that array.
    """

    def __init__(self, connection: Connection, store: Store, header: Header, may_be_lost: bool) -> None:
        self._connection, self._store, self._header = connection, store, header
        self._may_be_lost = may_be_lost
        self._turn: Turn | None = None
        self._has_begun = False  # in that turn
        self._error: Exception | None = None

    def run(self, wanted: VariableList) -> Steps:
        """Change the variables by the data that arrives. Raises the first error, once all data was received."""
        yield from self._run_collected(wanted) if self._may_be_lost else self._run_as_data_comes(wanted)
        if self._error is not None:
            raise self._error

    def _run_collected(self, wanted: VariableList) -> Steps:
        starts = [0, *itertools.accumulate(wanted.sizes)]
        everything = self._connection.whole(wanted.total)
        for pieces, data in self._connection.receive(wanted.sizes):
            at = 0
            for item, start, stop in pieces:
                everything[starts[item] + start : starts[item] + stop] = data[at : at + stop - start]
                at += stop - start
            yield bool(pieces)
        self._connection.is_making = True
        for stored, start, size in zip(wanted.variables, starts, wanted.sizes, strict=False):
            if size:
                yield from self._change_whole(stored, everything[start : start + size])

    def _run_as_data_comes(self, wanted: VariableList) -> Steps:
        try:
            for pieces, data in self._connection.receive(wanted.sizes):
                at = 0
                for piece in pieces:
                    stored, part = wanted.variables[piece.item], data[at : at + piece.stop - piece.start]
                    at += part.size
                    yield from self._take_in(stored, piece, part)
                yield bool(pieces)
        finally:  # also if the worker is lost meanwhile
            self._leave()

    def _take_in(self, stored: Stored, piece: Piece, part: Array) -> Iterable[bool]:
        """Change a variable by a part of the data, or collect it."""
        size = stored.bytes.size
        if part.size == size:
            return self._change_whole(stored, part)
        if self._store.is_elementwise(self._header.change):
            return self._change_part(stored, piece, part)
        whole = self._connection.whole(size)
        whole[piece.start : piece.stop] = part
        return self._change_whole(stored, whole) if piece.stop == size else ()

    def _change_whole(self, stored: Stored, whole: Array) -> Iterable[bool]:
        """Change a variable by data that is all there."""
        if whole.size > CHUNK_BYTES or stored.queue:
            return self._change_in_turn(stored, whole)
        self._store.begin(stored, self._header.change)
        self._change(stored, 0, whole)  # in one step, as most: they are small, and nobody else has a turn
        return ()

    def _change_in_turn(self, stored: Stored, whole: Array) -> Steps:
        """Change a variable chunk by chunk, so that other workers have their turns at other variables."""
        step = CHUNK_BYTES if self._store.is_elementwise(self._header.change) else whole.size
        starts = iter(range(0, whole.size, step))
        try:
            yield from self._enter(stored)
            for start in starts:
                self._change(stored, start, whole[start : start + step])
                yield True
        finally:
            if self._has_begun:  # the rest, if the worker is lost between two chunks
                for start in starts:
                    self._change(stored, start, whole[start : start + step])
            self._leave()

    def _change_part(self, stored: Stored, piece: Piece, part: Array) -> Steps:
        """Change a part of a variable, in a turn that lasts from the first part to the last one."""
        if piece.start == 0:
            yield from self._enter(stored)
        self._change(stored, piece.start, part)
        if piece.stop == stored.bytes.size:
            self._leave()

    def _change(self, stored: Stored, start: int, part: Array) -> None:
        dtype, header = stored.value.dtype, self._header
        try:
            self._store.change(stored, header.change, start // dtype.itemsize, part.view(dtype), header.numbers)
        except Exception as error:  # of any kind: the rest of the data must be received nevertheless
            self._error = self._error or error

    def _enter(self, stored: Stored) -> Steps:
        turn, self._has_begun = stored.enter(writes=True), False
        self._turn = turn
        while not stored.may_go(turn):
            yield False
        self._store.begin(stored, self._header.change)
        self._has_begun = True

    def _leave(self) -> None:
        if self._turn is not None:
            self._turn.stored.leave(self._turn)
            self._turn = None


def change_rows(store: Store, header: Header, data: Array) -> Steps:
    """Change some rows of variables, `header.rows` many, each variable in one step. Raises the first error at the end.

    `data` has their keys, then how many rows of each, then the indices and the values of each.
    """
    at = 16 * header.rows
    changes = []
    for key, count in data[:at].view(np.int64).reshape(2, header.rows).T.tolist():
        stored = store.variables[key]
        indices = data[at : at + 8 * count].view(np.int64)
        at += indices.nbytes
        shape = (count, *stored.value.shape[1:])
        nbytes = math.prod(shape) * stored.value.itemsize
        changes.append((stored, indices, data[at : at + nbytes].view(stored.value.dtype).reshape(shape)))
        at += nbytes
    error = None
    for stored, indices, values in changes:
        turn = stored.enter(writes=True)
        try:
            while not stored.may_go(turn):
                yield False
            store.begin(stored, header.change)
            store.change_rows(stored, header.change, indices, values, header.numbers)
        except Exception as problem:  # of a rule: the other variables are changed
            error = error or problem
        finally:  # also if the worker is lost meanwhile
            stored.leave(turn)
    if error is not None:
        raise error


def make_once(store: Store, connection: Connection, change: Steps) -> Steps:
    """Make a change of the connection's call, unless the change has been made. The caller answers afterwards.

    A worker that is lost may have made some changes of its call. The next worker makes them all again, in the same
    order, and the server drops as many as it has made; one that failed is an error again, and changes nothing more.
    What the lost worker has sent may also arrive when the other one is done.
    """
    call, place = connection.call, connection.num_changes
    connection.num_changes += 1
    while call in store.under_way:  # by a worker that is lost: that change may be completed, or not
        yield False
    made = store.made.setdefault(call, {}) if call >= store.oldest else None
    if made is None or place in made:
        yield from connection.drain()
        problem = None if made is None else made[place]
        if problem is not None:
            raise problem
        return
    store.under_way.add(call)
    try:
        yield from change
        made[place] = None
    except Exception as error:  # of any kind: the worker may be lost before it reports the error
        if connection.is_making:
            made[place] = error
        raise
    finally:
        store.under_way.discard(call)
