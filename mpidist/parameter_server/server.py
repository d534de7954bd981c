"""A parameter server: one loop that answers the requests of all workers in turn, without a thread."""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final, final

import numpy as np

from mpidist.parameter_server.membership import Membership
from mpidist.parameter_server.messages.ends import Connection
from mpidist.parameter_server.messages.lane import Lane
from mpidist.parameter_server.messages.protocol import (
    HEADER_BYTES,
    IN_PLACE_BYTES,
    INLINE_BYTES,
    SERVE_CALL,
    WHOLE_NUMBERS,
    Change,
    Header,
    Op,
    Outcome,
    Step,
    from_json,
)
from mpidist.parameter_server.store import Store, Stored
from mpidist.parameter_server.transfers import Changing, VariableList, change_rows, make_once, send_variables
from mpidist.transport.arrays import bytes_of
from mpidist.transport.group.service_group import ServiceGroup
from mpidist.transport.half import dtype_named
from mpidist.transport.shared_errors import repeat_of
from mpidist.transport.stacks import Stack
from mpidist.transport.text import text_of
from mpidist.transport.waiting import poll

__all__ = ["ParameterServer"]

logger = logging.getLogger("mpidist.parameter_server")

_CHECK_SECONDS: Final = 0.01  # between two looks at what other ranks tell
_RECORD_SECONDS: Final = 0.1  # between two entries in the flight recorder

Array = np.ndarray[Any, Any]
Steps = Generator[bool, None, None]  # what a request that takes a while does between others: whether it got on


@final
class ParameterServer:
    """The server of one rank. `lanes` are the memory that it shares with the workers of its node, by rank.

    A request that can be answered at once is. Any other one is a generator, which goes one step whenever it is its
    worker's turn: so no worker waits for more than one chunk of each other worker.
    """

    def __init__(
        self, group: ServiceGroup, membership: Membership, name: str, lanes: Mapping[int, Lane] | None = None
    ) -> None:
        self.store = Store()
        self.num_requests, self.was_broken_off = 0, False
        self._group, self.workers, self._name = group, membership, name
        self._connections = [
            Connection(group.comm, rank, worker, (lanes or {}).get(rank))
            for worker, rank in enumerate(membership.ranks)
        ]
        self._open = self._connections  # of workers that have not ended
        self._last: Connection | None = None  # whose request was answered last
        self._next_record, self._num_recorded = 0.0, 0
        self._answers: dict[int, Callable[[Connection, Header], Steps | None]] = {
            Op.READ: self._read,
            Op.CHANGE: self._change,
            Op.READ_ROWS: self._read_rows,
            Op.CHANGE_ROWS: self._change_rows,
            Op.ALLOCATE: self._allocate,
            Op.NAME_LIST: self._name_list,
            Op.NAME_RULE: self._name_rule,
            Op.MEET: self._meet,
            Op.STEP: self._step,
            Op.DONE: self._end,
            Op.LEAVE: self._end,
            Op.CALL: self._begin_call,
        }

    @property
    def has_ended(self) -> bool:
        """Whether all workers have ended their parts."""
        return not self._open

    def serve(self) -> None:
        """Answer requests until all workers have ended their parts. Naps while there are none."""
        if self.has_ended:
            return
        if self.was_broken_off:
            raise RuntimeError(f"{SERVE_CALL} of {self._name} was broken off by an exception: its variables are gone")
        self._group.enter(SERVE_CALL)
        if self._group.watchdog.broken is not None:
            raise repeat_of(self._group.watchdog.broken)
        ranks = self.workers.live_ranks
        self._group.begin_wait(f"{SERVE_CALL} of {self._name}", ranks, math.inf)  # an idle server is no stall
        next_check, recorder = 0.0, self._group.recorder
        recorder.begin(0, SERVE_CALL, self._name)
        recorder.agree()
        try:
            while not self.has_ended:
                poll(self._advance, self._check_peers)
                if time.monotonic() >= next_check:  # also where there is always something to do
                    self._check_peers()
                    next_check = time.monotonic() + _CHECK_SECONDS
            recorder.end()
        finally:
            recorder.fail()
            self.was_broken_off = not self.has_ended
            for connection in self._connections:
                connection.close()
            self.store.variables.clear()

    def _check_peers(self) -> None:
        self._group.watchdog.check_peers()
        self._record(time.monotonic())
        self.workers.drop_lost(self._connections, self._advance)
        self._forget_ended()

    def _forget_ended(self) -> None:
        self._open = [connection for connection in self._open if not connection.has_ended]

    def _record(self, now: float) -> None:
        """Record now and then that the server polls, and the number of requests that it has answered."""
        if now < self._next_record:
            return
        self._next_record, recorder, last = now + _RECORD_SECONDS, self._group.recorder, self._last
        recorder.agree()  # the time tells workers how long the server has been in a user's rule
        if last is not None and self.num_requests > self._num_recorded:
            self._num_recorded = self.num_requests
            who = f"worker {last.worker}, rank {last.rank}"
            recorder.replace_details(f"{self._name}: {self.num_requests} requests, the last one of {who}")

    def _advance(self, only: Connection | None = None) -> bool:
        """Give every worker one turn, or one of them. Returns whether anything got on, or nothing is left to do."""
        got_on = False
        for connection in self._open if only is None else (only,):
            try:
                if connection.steps is None:
                    if not connection.has_request():
                        continue
                    got_on = True
                    self._begin(connection)
                else:
                    got_on |= next(connection.steps)
            except StopIteration:
                got_on = True
                self._finish(connection)
            except Exception as error:
                self._group.lose(connection.rank, error)
                self.workers.drop(connection)
                self._forget_ended()
        return got_on or not self._open

    def _begin(self, connection: Connection) -> None:
        op, sequence, key, _, change, nbytes = WHOLE_NUMBERS.unpack_from(connection.memory)
        if sequence != connection.sequence + 1:
            text = f"{self._name} got request {sequence} of worker {connection.worker} after {connection.sequence}"
            raise RuntimeError(f"{text}: requests were lost")
        connection.sequence = sequence
        stored = self.store.variables.get(key)
        if (
            stored is not None
            and not connection.call
            and not stored.queue
            and change <= Change.SUB
            and stored.value.nbytes <= INLINE_BYTES
            and self._is_answered_at_once(connection, op, stored, change, nbytes)
        ):
            self._finish(connection)
        else:
            connection.steps = self._guarded(connection, connection.begin_steps())

    def _is_answered_at_once(self, connection: Connection, op: int, stored: Stored, change: int, nbytes: int) -> bool:
        """Answer a small request of one variable, as most are, without a generator. Returns whether it was one."""
        if op == Op.CHANGE and nbytes == stored.value.nbytes:
            delta = np.frombuffer(connection.memory, stored.value.dtype, stored.flat.size, HEADER_BYTES)
            try:
                self.store.change(stored, change, 0, delta, ())
                connection.answer(Outcome.OK)
            except Exception as error:  # of any kind: a worker's mistake must not end the server
                connection.answer_text(Outcome.FAILED, f"{self._name}: {text_of(error)}")
            return True
        if op == Op.READ and not nbytes and self.workers.may_read(connection.worker):
            connection.answer(Outcome.OK, stored.bytes)
            return True
        return False

    def _finish(self, connection: Connection) -> None:
        self.num_requests += 1
        self._last = connection
        connection.steps = None
        if connection.has_ended:
            self._forget_ended()
        else:
            connection.listen()

    def _guarded(self, connection: Connection, header: Header) -> Steps:
        """Answer a request; with the error's text, if there is one."""
        try:
            steps = self._answers[header.op](connection, header)
            if steps is None:
                return
            if header.op not in (Op.CHANGE, Op.CHANGE_ROWS):
                yield from steps
                return
            yield from make_once(self.store, connection, steps) if connection.call else steps
            connection.answer(Outcome.OK)  # once the change is counted: the worker may be lost
        except Exception as error:  # of any kind: a worker's mistake must not end the server
            yield from connection.drain()
            connection.answer_text(Outcome.FAILED, f"{self._name}: {text_of(error)}{_place_text(error)}")

    def _list_of(self, connection: Connection, key: int) -> VariableList:
        found: VariableList | None = connection.lists.get(key)
        if found is None:  # one variable
            found = connection.lists[key] = VariableList([self.store.variables[key]], connection.lane is not None)
        return found

    def _read(self, connection: Connection, header: Header) -> Steps:
        late = yield from self.workers.wait_to_read(connection.worker)
        if late is not None:
            connection.answer_text(*late)
            return
        wanted = self._list_of(connection, header.variables)
        if wanted.total <= INLINE_BYTES:
            parts = [stored.bytes for stored in wanted.variables]
            connection.answer(Outcome.OK, np.concatenate(parts))
            return
        connection.answer(Outcome.OK, nbytes=wanted.total, rows=wanted.variables[0].place)
        yield from send_variables(connection, wanted)

    def _change(self, connection: Connection, header: Header) -> Steps:
        wanted = self._list_of(connection, header.variables)
        yield from Changing(connection, self.store, header, self._group.may_miss_ranks).run(wanted)

    def _read_rows(self, connection: Connection, header: Header) -> Steps:
        request = yield from connection.receive_all()
        late = yield from self.workers.wait_to_read(connection.worker)
        if late is not None:
            connection.answer_text(*late)
            return
        stored = self.store.variables[header.variables]
        turn = stored.enter(writes=False)
        try:
            while not stored.may_go(turn):
                yield False
            rows = stored.value[request.view(np.int64)]
        finally:  # also if the worker is lost meanwhile
            stored.leave(turn)
        yield from connection.answer_all(bytes_of(np.ascontiguousarray(rows)))

    def _change_rows(self, connection: Connection, header: Header) -> Steps:
        data = yield from connection.receive_all()
        connection.is_making = True
        yield from change_rows(self.store, header, data)

    def _allocate(self, connection: Connection, header: Header) -> Steps:
        data = yield from connection.receive_all()
        end = header.rows  # of the description
        shape, dtype = from_json(data[:end])
        value = data[end:].view(dtype_named(dtype)).reshape(shape)
        arena = self._group.arena
        place = arena.take(value.nbytes) if arena is not None and value.nbytes >= IN_PLACE_BYTES else None
        if arena is None or place is None:
            self.store.allocate(header.variables, value)
        else:
            self.store.allocate(header.variables, value, arena.own[place : place + value.nbytes], place)
        connection.answer(Outcome.OK)

    def _name_list(self, connection: Connection, header: Header) -> Steps:
        data = yield from connection.receive_all()
        variables = [self.store.variables[key] for key in data.view(np.int64).tolist()]
        named = VariableList(variables, connection.lane is not None)
        connection.lists[header.variables] = named
        yield from connection.answer_all(np.array(named.places, np.int64).view(np.uint8))

    def _name_rule(self, connection: Connection, header: Header) -> Steps:
        data = yield from connection.receive_all()
        connection.answer(Outcome.OK, rows=self.store.number_of_rule(from_json(data)))

    def _meet(self, connection: Connection, header: Header) -> Steps:
        fields = from_json((yield from connection.receive_all()))
        answer = yield from self.workers.meet(connection.worker, fields.pop("call"), fields, bool(header.rows))
        connection.answer_text(*answer)

    def _step(self, connection: Connection, header: Header) -> None:
        """Count a step; or note that the worker waits for others, or has done so: see `Step`."""
        worker, workers = connection.worker, self.workers
        if header.rows == Step.DONE:
            workers.steps[worker] += 1
        elif header.rows == Step.WAITS:
            workers.resting.add(worker)
        elif header.rows == Step.GOES_ON:
            workers.resting.discard(worker)
        elif worker in workers.resting:  # the first that tells: whoever rests does so in the call that is over
            workers.resting.clear()
        connection.answer(Outcome.OK)

    def _begin_call(self, connection: Connection, header: Header) -> None:
        """Note whose the changes that follow are."""
        connection.call, connection.num_changes = header.variables, 0
        if header.variables:
            self.store.end_calls(header.rows)
        connection.answer(Outcome.OK)

    def _end(self, connection: Connection, header: Header) -> Steps:
        """End a worker's part; with `DONE`, reply once all workers have ended theirs, with the outcome."""
        data = yield from connection.receive_all()
        worker, workers = connection.worker, self.workers
        if header.op == Op.LEAVE:
            why = data.tobytes().decode(errors="replace")
            workers.end(worker, why)
            logger.warning("mpidist: worker %d (rank %d) has left: %s", worker, workers.ranks[worker], why)
        else:
            workers.end(worker)
            yield from workers.wait_for_ends() if header.rows else ()
            connection.answer(Outcome.OK, rows=not workers.left)
        connection.has_ended = True


def _place_text(error: Exception) -> str:
    """Write the line of the program's rule that raised an error; nothing if no such function did."""
    stack = Stack.of_walk(list(traceback.walk_tb(error.__traceback__))[::-1])
    return "" if stack.is_inside else f" (at {stack.place})"
