"""Both ends of the messages between a worker and a server: a `Channel` sends requests, a `Connection` answers them.

The chief of a coordinator sends calls to the other workers in the same way. No two ranks have both a server's channel
and a chief's, so the tags are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, final

import numpy as np

from mpidist.errors import DeadlineExceededError, InvalidArgumentError, PeerFailedError, UnavailableError
from mpidist.parameter_server.messages.lane import Lane
from mpidist.parameter_server.messages.protocol import (
    ANSWER,
    CHUNK_BYTES,
    DATA,
    HEADER,
    HEADER_BYTES,
    INLINE_BYTES,
    MAX_NUMBERS,
    MESSAGE_BYTES,
    NO_PLACE,
    REQUEST,
    SERVE_CALL,
    WHOLE_NUMBERS,
    WINDOW,
    Header,
    Op,
    Outcome,
    Piece,
    is_read_in_place,
    join_bytes,
    plan_messages,
    plan_stream,
)
from mpidist.transport.arrays import bytes_of
from mpidist.transport.group.service_group import ServiceGroup
from mpidist.transport.mpi.library import Intracomm, cancel, is_process_failure, load_mpi
from mpidist.transport.shared_errors import repeat_of
from mpidist.transport.text import first_line
from mpidist.transport.waiting import never_free, poll

__all__ = ["Channel", "Connection", "one_error"]

Array = np.ndarray[Any, Any]
Received = Iterator[tuple[tuple[Piece, ...], Array]]

_NO_NUMBERS = (0.0,) * MAX_NUMBERS
_UINT8 = np.dtype(np.uint8)
# The worker does something else meanwhile; nobody answers the last one.
_ANSWERED_LATER = frozenset((Op.CHANGE, Op.CHANGE_ROWS, Op.STEP, Op.CALL, Op.LEAVE))
_ANSWERED_WITH_DATA = frozenset((Op.READ, Op.READ_ROWS, Op.NAME_LIST))
_SENT_AT_ONCE = _ANSWERED_LATER | {Op.READ, Op.READ_ROWS}  # behind what is not answered
_SLOTS = WINDOW + 1  # memory for requests: one more to leave with
_SPINS = 50  # tests before a wait is recorded: most small requests are answered within 10 us
_ENDED = -1  # in the place of an entry of the flight recorder
GRACE_SECONDS = 10.0  # that an answer may take, on a busy machine, after a server has found that other workers are late


@final
class Channel:
    """The requests of this worker to one server, which answers them in order.

    `start` sends a request and does not wait for its answer; `finish` waits for all answers. Changes and reads are sent
    behind changes that are not answered yet, `WINDOW` requests at most: see `make_room`. Other requests first wait
    for all answers. The error of a change is raised by the next `make_room` that finds its answer, or by `finish`.
    `broken` is why the server cannot be used any more, or `None`.

    The chief of a coordinator has channels to workers, and not `is_server`: it starts calls, and looks for their
    results with `receive`, which waits for nothing. What it means that such a rank is lost, the chief knows.
    """

    def __init__(self, group: ServiceGroup, rank: int, name: str, lane: Lane | None = None, is_server: bool = True):
        mpi = load_mpi()
        self._lane, self._is_server = lane, is_server
        self.rank, self.name = rank, name
        self._what = f"a request to {name}"
        self._entry = _ENDED  # of the last request, in the flight recorder
        self.broken: Exception | None = None
        self._group, self._comm, self._byte = group, group.comm, mpi.BYTE
        self._requests = _messages(_SLOTS)  # each is used again once it was answered
        self._sends: list[Any] = [mpi.REQUEST_NULL] * _SLOTS  # of these
        self._answer = np.zeros(MESSAGE_BYTES, np.uint8)
        self._outcome = self._answer.data.cast("q")
        self._scratch = np.empty(0, np.uint8)
        self._incoming = self._comm.Recv_init([self._answer, mpi.BYTE], rank, ANSWER)
        self._awaits_data = False  # of the last request, which an interrupt may have kept from taking it
        self._data = np.empty(0, np.uint8)  # of an answer that is arriving
        self._arriving: Sequence[Any] = ()  # the messages of these
        self._call_sends: Sequence[Any] = ()  # of the data of `Op.CALL`
        self._sequence = self._answered = 0  # the numbers of the last request, and of the last one that was answered
        self._calls = [""] * _SLOTS  # the names of the requests
        self._errors: list[Exception] = []  # of requests, which nobody was told
        self._test_all: Callable[[Any], bool] = mpi.Request.Testall

    def enter(self, call: str) -> None:
        """Check that this thread may make a call. Local."""
        self._group.enter(call)

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
        """Send a request of contiguous arrays. Returns when their memory can be used again; that of `Op.CALL` never.

        `call` names the request for people; all others are as in `Header`. `make_room` comes before changes and reads:
        of all servers of a call, so that no server gets its part if the call ends with the error of an earlier change.
        """
        if op not in _SENT_AT_ONCE:
            self.finish()
        try:
            self._entry = self._group.recorder.begin(0, call, self.name)
            self._awaits_data = op in _ANSWERED_WITH_DATA
            self._sequence = sequence = self._sequence + 1
            slot = sequence % _SLOTS
            self._calls[slot] = call
            message, memory = self._requests[slot]
            nbytes = sum([array.nbytes for array in data])
            WHOLE_NUMBERS.pack_into(memory, 0, op, sequence, variables, rows, change, nbytes)
            if numbers:
                numbers = (*numbers, *_NO_NUMBERS[len(numbers) :])
                HEADER.pack_into(memory, 0, op, sequence, variables, rows, change, nbytes, *numbers)
            end = HEADER_BYTES
            if nbytes <= INLINE_BYTES:
                for array in data:
                    start, end = end, end + array.nbytes
                    message[start:end] = array.reshape(-1).view(_UINT8)
            if sequence - self._answered == 1:
                self._incoming.Start()
            self._sends[slot].Test()  # which frees it: the server has the request, as it has answered
            self._sends[slot] = self._comm.Isend([message, end, self._byte], self.rank, REQUEST)
            if nbytes > INLINE_BYTES:
                self._send_data(call, op, data)
            if op in _ANSWERED_LATER:
                self._group.recorder.end(self._entry)
                self._entry = _ENDED
        except BaseException as error:
            self._break(call, error)
            raise

    def make_room(self) -> None:
        """Make room for two more requests, as of a push, and raise the errors that have arrived."""
        self.finish(most=WINDOW - 2)

    def finish(
        self, more_seconds: float = 0.0, arrays: Sequence[Array] = (), places: tuple[int, ...] = (), most: int = 0
    ) -> None:
        """Wait until `most` answers are missing, put the data of the last one into arrays, and raise the first error.

        `more_seconds` is how much longer than its deadline an answer may take: `GRACE_SECONDS` where the server itself
        notices that other workers are late. The contiguous `arrays` are filled also if an earlier request has failed;
        `places`, of an answer to READ, are those of the variables in the memory that is shared with the server.
        """
        self._group.enter(self._what)
        if self._awaits_data and not arrays and self.broken is None:  # the next read would take what is left
            self._break(self._calls[self._sequence % _SLOTS], KeyboardInterrupt())
        if self.broken is not None:
            raise repeat_of(self.broken)
        self._awaits_data = False
        try:
            while self._answered < self._sequence:
                if not self._incoming.Test():
                    if self._sequence - self._answered <= most:
                        break
                    self._wait_for_answer(more_seconds)
                self._answered += 1
                if self._outcome[0] != Outcome.OK:
                    self._errors.append(self._error_of(self._calls[self._answered % _SLOTS]))
                if self._answered < self._sequence:
                    self._incoming.Start()
            if arrays and self._outcome[0] == Outcome.OK:
                self._take_data(arrays, places)
        except BaseException as error:
            self._break(self._oldest_call, error)
            raise
        if self._entry != _ENDED:
            self._group.recorder.end(self._entry)
            self._entry = _ENDED
        if self._errors:
            errors, self._errors = self._errors, []
            raise one_error(errors)

    def has_answer(self) -> bool:
        """Whether the next answer has come, or the beginning of it."""
        return self._answered < self._sequence and bool(self._incoming.Test())

    def receive(self) -> tuple[int, Array] | None:
        """Return the next answer, its `Outcome` and data of any size, or `None` while some of it has not come."""
        if not self.has_answer():
            return None
        outcome, nbytes = self._outcome[0], self._outcome[5]
        if nbytes <= INLINE_BYTES:
            self._data = self._answer[HEADER_BYTES : HEADER_BYTES + nbytes].copy()
        elif not self._arriving:
            self._data = np.empty(nbytes, np.uint8)
            self._arriving = [self._comm.Irecv([one, self._byte], self.rank, DATA) for one in _chunks(self._data)]
        if not self._test_all(self._arriving):
            return None
        self._test_all(self._call_sends)  # which frees their memory
        data, self._data, self._arriving = self._data, np.empty(0, np.uint8), ()
        self._answered += 1
        if self._answered < self._sequence:
            self._incoming.Start()
        return outcome, data

    @property
    def number(self) -> int:
        """The number in the last answer: `rows` of its header."""
        return int(self._outcome[3])

    @property
    def _oldest_call(self) -> str:
        """The name of the request whose answer is awaited, or was taken last."""
        return self._calls[min(self._answered + 1, self._sequence) % _SLOTS]

    def leave(self, why: str) -> bool:
        """Notify the server that this worker sends no more requests; no reply comes. Returns whether it could."""
        if self.broken is None:
            text = why[:1000].encode(errors="backslashreplace")  # of a file's name, perhaps
            self.start("leave", Op.LEAVE, data=[np.frombuffer(text[:INLINE_BYTES], np.uint8)])
        return self.broken is None

    def close(self) -> None:
        """Give back what MPI holds for this channel. Local."""
        if self.broken is not None:
            return  # MPI may still write an answer
        if not cancel([self._incoming]):
            self.abandon()  # this worker leaves, as others are lost, too
            return
        self._scratch = np.empty(0, np.uint8)
        self.broken = RuntimeError(f"a request to {self.name} on a closed strategy: it was closed, make a new one")
        if not self._test_all([*self._sends, *self._call_sends]):
            never_free((self._sends, self._requests, self._call_sends))

    def abandon(self, why: Exception | None = None) -> None:
        """Leave pending messages to MPI. `why`: the cause of the failure. Local."""
        self.broken, self._answered = why or RuntimeError(f"a request to {self.name}, which was left"), self._sequence
        never_free((self._sends, self._requests, self._answer, self._incoming, self._arriving, self._call_sends))

    def _send_data(self, call: str, op: int, data: Sequence[Array]) -> None:
        if op == Op.CALL:
            self._call_sends = _send_chunks(self._comm, self.rank, data[0], self._call_sends)
            return
        lane, num = self._lane, self._sequence - self._answered  # the server answers earlier requests first
        sends: list[Any] = []
        sizes = tuple(array.nbytes for array in data)
        for pieces in plan_messages(sizes) if op == Op.CHANGE else plan_stream(sizes):
            parts = [
                data[item] if stop - start == data[item].nbytes else bytes_of(data[item])[start:stop]
                for item, start, stop in pieces
            ]
            if lane is not None:
                if not lane.can_send():
                    self._wait(call, lane.can_send, 0.0, num_requests=num)
                lane.send_arrays(parts)
                continue
            memory = bytes_of(parts[0]) if len(parts) == 1 else join_bytes(parts, self._buffer())
            sends.append(self._comm.Isend([memory, self._byte], self.rank, DATA))
            if len(parts) > 1:  # the buffer is one
                self._wait(call, partial(self._test_all, sends), 0.0, (sends, data), num)
        if lane is None:
            self._wait(call, partial(self._test_all, sends), 0.0, (sends, data), num)

    def _wait_for_answer(self, more_seconds: float) -> None:
        for _ in range(_SPINS):
            if self._incoming.Test():
                return
        call = self._oldest_call
        if self._entry == _ENDED:
            self._entry = self._group.recorder.begin(0, f"the wait for the end of the {call}", self.name)
        self._wait(call, self._incoming.Test, more_seconds)

    def _take_data(self, arrays: Sequence[Array], places: tuple[int, ...]) -> None:
        if self._outcome[5] > INLINE_BYTES:
            self._receive_data(arrays, places or (self.number,) if self._lane is not None else ())
            return
        at = HEADER_BYTES
        for array in arrays:
            array.reshape(-1).view(_UINT8)[...] = self._answer[at : at + array.nbytes]
            at += array.nbytes

    def _receive_data(self, arrays: Sequence[Array], places: tuple[int, ...]) -> None:
        lane = self._lane
        for pieces in plan_messages(tuple(array.nbytes for array in arrays), places):
            item, start, stop = pieces[0]  # of several, each is a whole item
            parts = [bytes_of(arrays[piece.item]) for piece in pieces]
            if len(parts) == 1:
                parts = [parts[0][start:stop]]
            if lane is None:
                memory = parts[0] if len(parts) == 1 else self._buffer()[: sum(part.size for part in parts)]
                request = self._comm.Irecv([memory, self._byte], self.rank, DATA)
                self._wait("a read", request.Test, 0.0, (request, memory))
                if len(parts) > 1:
                    _split_bytes(memory, parts)
                continue
            if not lane.can_take():
                self._wait("a read", lane.can_take, 0.0)
            place = places[item] if places else NO_PLACE
            if is_read_in_place(parts[0].size, place):
                parts[0][...] = lane.server_memory[place : place + parts[0].size]
            else:
                _split_bytes(lane.sent_slot(), parts)
            lane.take()

    def _buffer(self) -> Array:
        if not self._scratch.size:
            self._scratch = np.empty(CHUNK_BYTES, np.uint8)
        return self._scratch

    def _wait(
        self,
        call: str,
        test: Callable[[], bool],
        more_seconds: float,
        memory: Sequence[Any] = (),
        num_requests: int = 1,
    ) -> None:
        group, timeout = self._group, self._group.timeout_seconds
        limit = timeout * num_requests + more_seconds if timeout and more_seconds < math.inf else None
        group.begin_wait(f"{call} at {self.name}", (self.rank,), limit, SERVE_CALL if more_seconds else None)
        try:
            poll(test, group.watchdog.check_peers)
        except BaseException:
            never_free(tuple(memory))
            raise

    def _break(self, call: str, error: BaseException) -> None:
        """Note that a request was broken off: an answer to it would be taken for that of the next one.

        Raises:
            UnavailableError: If it was because the server is lost.
        """
        self.abandon(UnavailableError(f"{call} at {self.name} was interrupted"))
        if not self._is_server:
            return
        if is_process_failure(error):
            error = PeerFailedError(f"{call}: MPI has found that the process of rank {self.rank} has failed")
        elif not isinstance(error, (DeadlineExceededError, PeerFailedError)):
            return
        elif self._group.awaited.is_ended_by_program:
            self.broken = error
            return
        self._group.awaited.lost.setdefault(self.rank, first_line(error))  # for the other workers, if this one leaves
        lost = UnavailableError(
            f"{self.name} is lost, with the variables on it: {error}. Start the job again, from a checkpoint"
        )
        vars(lost).update(vars(error))  # which rank prints the whole of it
        self.broken = lost
        raise lost from error

    def _error_of(self, call: str) -> Exception:
        """Return the error with which the server has answered."""
        header = Header.read(self._answer)
        text = self._answer[HEADER_BYTES : HEADER_BYTES + header.nbytes].tobytes().decode(errors="replace")
        if header.op == Outcome.REFUSED:
            return InvalidArgumentError(text)
        if header.op == Outcome.TOO_LATE:
            return DeadlineExceededError(f"{call} of rank {self._comm.rank} cannot complete: {text}")
        return RuntimeError(f"{call} failed on {text}")


@final
class Connection:
    """The messages of one worker, whose requests are answered one after the other. All methods are local.

    Attributes:
        message, memory, sequence: The last request, also as plain memory, and its number.
        lists: Lists of variables that the worker has numbered, and single ones by key, in the server's own form.
        steps: What answers the request, if that takes several steps.
        is_making: Whether all data of a change is here, and the change is made: then it is made whole.
        call, num_changes: The call of a coordinator's that changes belong to, 0 for none; and how many have come.
    """

    def __init__(self, comm: Intracomm, rank: int, worker: int, lane: Lane | None = None) -> None:
        mpi = load_mpi()
        self.worker, self.lane = worker, lane
        self.sequence = 0
        self.lists: dict[int, Any] = {}
        self.steps: Generator[bool, None, None] | None = None
        self.has_ended = self.is_making = False
        self.call = self.num_changes = 0
        self._comm, self.rank, self._byte, self._status = comm, rank, mpi.BYTE, mpi.Status()
        messages = _messages(2)  # the next one comes while one is handled
        self._requests = [(comm.Recv_init([one, mpi.BYTE], rank, REQUEST), one, memory) for one, memory in messages]
        self._at, (self._incoming, self.message, self.memory) = 0, self._requests[0]
        self._replies = _messages(WINDOW)
        self._buffers: list[Array] = []
        self._whole = np.empty(0, np.uint8)
        self._nbytes = 0  # of data of the request
        self._data: Iterator[Array | None] = iter(())  # what of it has not been received
        self._sends: list[Any] = [mpi.REQUEST_NULL] * WINDOW  # of these
        self._data_sends: Sequence[Any] = ()
        self._is_abandoned = False
        for request, _, _ in self._requests:
            request.Start()

    def listen(self) -> None:
        """Go on to the next request."""
        self.is_making = False
        self._incoming.Start()
        self._at = 1 - self._at
        self._incoming, self.message, self.memory = self._requests[self._at]

    def has_request(self) -> bool:
        """Whether the request has come."""
        has_come: bool = self._incoming.Test()
        return has_come

    def begin_steps(self) -> Header:
        """Prepare to receive the data of the request, and return its header."""
        header = Header.read(self.memory)
        self._nbytes, self._data = header.nbytes, self._messages_of_data()
        return header

    def answer(self, outcome: int, data: Array | None = None, nbytes: int = 0, rows: int = 0) -> None:
        """Answer the request: with `data` behind the header, or with `nbytes` that follow in messages of their own."""
        slot, size = self.sequence % WINDOW, 0
        reply, memory = self._replies[slot]
        while not self._sends[slot].Test():  # the worker has it already, as it has made `WINDOW` requests since
            pass
        if data is not None:
            size = nbytes = data.size
            reply[HEADER_BYTES : HEADER_BYTES + size] = data
        WHOLE_NUMBERS.pack_into(memory, 0, outcome, self.sequence, 0, rows, 0, nbytes)
        self._sends[slot] = self._comm.Isend([reply, HEADER_BYTES + size, self._byte], self.rank, ANSWER)

    def answer_text(self, outcome: int, text: str) -> None:
        """Answer with a text, which is cut where it is too long."""
        self.answer(outcome, np.frombuffer(text.encode(errors="backslashreplace")[:INLINE_BYTES], np.uint8))

    def answer_all(self, data: Array) -> Generator[bool, None, None]:
        """Answer with bytes, however many. Without a lane, the first step sends all, and the rest may be left out."""
        if data.size <= INLINE_BYTES:
            self.answer(Outcome.OK, data)
            return
        self.answer(Outcome.OK, nbytes=data.size, rows=NO_PLACE)
        if self.lane is None:
            self._data_sends = _send_chunks(self._comm, self.rank, data, self._data_sends)
            while not all(sent.Test() for sent in self._data_sends):
                yield False
            return
        for one in _chunks(data):
            yield from self.send([one])

    def send(self, parts: Sequence[Array]) -> Generator[bool, None, None]:
        """Send one message of data, of several parts, and yield until their memory can be used again."""
        lane = self.lane
        if lane is not None:
            while not lane.can_send():
                yield False
            lane.send_arrays(parts)
            yield True
            return
        data = parts[0] if len(parts) == 1 else join_bytes(parts, self._buffer(0))
        request = self._comm.Isend([data, self._byte], self.rank, DATA)
        while not request.Test():
            yield False
        yield True

    def receive(self, sizes: tuple[int, ...]) -> Received:
        """Yield the data of the request, message by message; without pieces while there is nothing yet.

        While a message is used, the next one arrives. `sizes` are the bytes of each item of the data.
        """
        if self._nbytes != sum(sizes):
            raise ValueError(f"a request came with {self._nbytes} bytes of data, and needs {sum(sizes)}")
        for pieces in plan_messages(sizes):
            while (data := next(self._data)) is None:
                yield (), self.message
            yield pieces, data
        next(self._data, None)  # which gives back the last slot of a lane

    def receive_all(self) -> Generator[bool, None, Array]:
        """Receive the data of the request, as one array that belongs to the caller."""
        memory, at = np.empty(self._nbytes, np.uint8), 0
        for data in self._data:
            if data is not None:
                memory[at : at + data.size] = data
                at += data.size
            yield data is not None
        return memory

    def drain(self) -> Generator[bool, None, None]:
        """Receive the rest of the request's data, and drop it."""
        for data in self._data:
            yield data is not None

    def whole(self, nbytes: int) -> Array:
        """Return memory in which data can be collected that comes in several messages: the same at every call."""
        if self._whole.size < nbytes:
            self._whole = np.empty(nbytes, np.uint8)
        return self._whole[:nbytes]

    def abandon(self) -> None:
        """Give up a worker that is lost: drop its request, and leave pending messages to MPI. Local."""
        if self.steps is not None:
            self.steps.close()
            self.steps, self._data = None, iter(())
        never_free((self._requests, self._replies, self._buffers, self._sends, self._data_sends))
        self.has_ended = self._is_abandoned = True

    def close(self) -> None:
        """Give back what MPI holds for this connection, and the variables."""
        self.lists = {}
        if self._is_abandoned:
            return
        if not cancel(request for request, _, _ in self._requests):
            self.abandon()  # the error of the lost worker is on its way already
            return
        self._buffers, self._whole = [], np.empty(0, np.uint8)
        if not all(sent.Test() for sent in [*self._sends, *self._data_sends]):
            never_free((self._sends, self._replies, self._data_sends))

    def _messages_of_data(self) -> Iterator[Array | None]:
        """Yield the data of the request, message by message, or `None` while the next one has not come."""
        nbytes, received = self._nbytes, 0
        if nbytes <= INLINE_BYTES:
            yield self.message[HEADER_BYTES : HEADER_BYTES + nbytes]
            return
        if (lane := self.lane) is not None:
            while received < nbytes:
                while not lane.can_take():
                    yield None
                data = lane.sent_slot()
                received += data.size
                yield data
                lane.take()
            return
        request, at = self._receive_into(self._buffer(0)), 0
        while received < nbytes:
            while not request.Test(self._status):
                yield None
            data = self._buffer(at)[: self._status.Get_count(self._byte)]
            received, at = received + data.size, 1 - at
            if received < nbytes:
                request = self._receive_into(self._buffer(at))
            yield data

    def _buffer(self, number: int) -> Array:
        """Return memory for one message of data: that of one of two buffers."""
        if not self._buffers:
            self._buffers = [np.empty(CHUNK_BYTES, np.uint8) for _ in range(2)]
        return self._buffers[number]

    def _receive_into(self, memory: Array) -> Any:
        return self._comm.Irecv([memory, self._byte], self.rank, DATA)


def _chunks(data: Array) -> list[Array]:
    """Cut data into messages, as `plan_messages` does with one item."""
    return [data[start : start + CHUNK_BYTES] for start in range(0, data.size, CHUNK_BYTES)]


def _send_chunks(comm: Intracomm, rank: int, data: Array, earlier: Sequence[Any]) -> Sequence[Any]:
    """Send data, and do not wait. `earlier`: chunks already sent to this rank, and received."""
    if not all(sent.Test() for sent in earlier):
        never_free(tuple(earlier))
    return [comm.Isend([one, load_mpi().BYTE], rank, DATA) for one in _chunks(data)]


def _split_bytes(memory: Array, parts: Sequence[Array]) -> None:
    """Copy bytes that lie one behind the other into several places."""
    at = 0
    for part in parts:
        part[...] = memory[at : at + part.size]
        at += part.size


def _messages(count: int) -> list[tuple[Array, memoryview]]:
    """Make memory for messages."""
    return [(message, message.data) for message in np.zeros((count, MESSAGE_BYTES), np.uint8)]


def one_error(errors: Sequence[Exception]) -> Exception:
    """Return the first of some errors, with the others added to its text."""
    first, *others = errors
    if others:
        first.args = (f"{first}\n  so did {len(others)} more, the last one: {others[-1]}",)
    return first
