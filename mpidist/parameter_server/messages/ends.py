"""Both ends of the messages between a worker and a server: a `Channel` sends requests, a `Connection` answers them."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn, final

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
    Header,
    Op,
    Outcome,
    Piece,
    is_read_in_place,
    join_bytes,
    plan_messages,
    plan_stream,
    to_json,
)
from mpidist.transport.arrays import bytes_of
from mpidist.transport.group.service_group import ServiceGroup
from mpidist.transport.mpi.library import Intracomm, is_process_failure, load_mpi
from mpidist.transport.shared_errors import repeat_of
from mpidist.transport.text import first_line
from mpidist.transport.waiting import never_free, poll

__all__ = ["Channel", "Connection"]

Array = np.ndarray[Any, Any]
Plan = Sequence[tuple[Piece, ...]]
Received = Iterator[tuple[tuple[Piece, ...], Array]]

_NO_NUMBERS = (0.0,) * MAX_NUMBERS
_UINT8 = np.dtype(np.uint8)
_ANSWERED_LATER = frozenset((Op.CHANGE, Op.CHANGE_ROWS, Op.STEP))  # the worker does something else meanwhile
_ENDED = -1  # in the place of an entry of the flight recorder
GRACE_SECONDS = 10.0  # that an answer may take, on a busy machine, after a server has found that other workers are late


@final
class Channel:
    """The requests of this worker to one server, one at a time.

    `start` sends a request and does not wait for its answer; `finish` does. An error of a request that nobody has
    finished is raised by the next one. `broken` is why the server cannot be used any more, or `None`.
    """

    def __init__(self, group: ServiceGroup, rank: int, name: str, lane: Lane | None = None) -> None:
        mpi = load_mpi()
        self._lane = lane
        self.rank, self.name = rank, name
        self._what = f"a request to {name}"
        self._entry = _ENDED  # of the request under way, in the flight recorder
        self.broken: Exception | None = None
        self._group, self._comm, self._byte = group, group.comm, mpi.BYTE
        self._request = np.zeros(MESSAGE_BYTES, np.uint8)
        self._answer = np.zeros(MESSAGE_BYTES, np.uint8)
        self._outcome = self._answer.data.cast("q")
        self._request_memory = self._request.data
        self._scratch = np.empty(0, np.uint8)
        self._incoming = self._comm.Recv_init([self._answer, mpi.BYTE], rank, ANSWER)
        self._sequence = 0
        self._pending = ""  # the name of the request whose answer was not read
        self._sends: list[Any] = []
        self._test_all: Callable[[Any], bool] = mpi.Request.Testall

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
        """Send a request of contiguous arrays. Returns when their memory can be used again.

        `call` names the request for people; all others are as in `Header`.
        """
        self.finish()
        try:
            self._entry = self._group.recorder.begin(0, call, self.name)
            self._sequence += 1
            message, nbytes = self._request, sum([array.nbytes for array in data])
            WHOLE_NUMBERS.pack_into(self._request_memory, 0, op, self._sequence, variables, rows, change, nbytes)
            if numbers:
                numbers = (*numbers, *_NO_NUMBERS[len(numbers) :])
                HEADER.pack_into(message.data, 0, op, self._sequence, variables, rows, change, nbytes, *numbers)
            end = HEADER_BYTES
            if nbytes <= INLINE_BYTES:
                for array in data:
                    start, end = end, end + array.nbytes
                    message[start:end] = array.reshape(-1).view(_UINT8)
            self._incoming.Start()
            self._pending = call
            self._sends = [self._comm.Isend([message, end, self._byte], self.rank, REQUEST)]
            if nbytes > INLINE_BYTES:
                sizes = tuple(array.nbytes for array in data)
                self._send_data(call, data, plan_messages(sizes) if op == Op.CHANGE else plan_stream(sizes))
            if op in _ANSWERED_LATER:
                self._group.recorder.end(self._entry)
                self._entry = _ENDED
        except BaseException as error:
            self._break(call, error)
            raise

    def finish(self, more_seconds: float = 0.0) -> None:
        """Wait for the answer of the request that was started last, unless it was read already, and raise its error.

        `more_seconds` is how much longer than its deadline the answer may take: `GRACE_SECONDS` where the server itself
        notices that other workers are late.
        """
        self._group.enter(self._what)
        if self.broken is not None:
            raise repeat_of(self.broken)
        call = self._pending
        if not call:
            return
        try:
            if not self._incoming.Test():
                if self._entry == _ENDED:
                    self._entry = self._group.recorder.begin(0, f"the wait for the end of the {call}", self.name)
                self._wait(call, self._incoming.Test, more_seconds)
        except BaseException as error:
            self._break(call, error)
            raise
        self._pending = ""
        if self._entry != _ENDED:
            self._group.recorder.end(self._entry)
            self._entry = _ENDED
        if self._outcome[0] != Outcome.OK:
            self._raise(call)

    @property
    def number(self) -> int:
        """The number in the last answer: `rows` of its header."""
        return int(self._outcome[3])

    def data(self, arrays: Sequence[Array], places: tuple[int, ...] = ()) -> None:
        """Put the data of the last answer into contiguous arrays, which it fills.

        `places`: of an answer to READ, where the variables lie in the memory that is shared with the server.
        """
        at = HEADER_BYTES
        if self._outcome[5] <= INLINE_BYTES:
            for array in arrays:
                array.reshape(-1).view(_UINT8)[...] = self._answer[at : at + array.nbytes]
                at += array.nbytes
            return
        try:
            self._receive_data(arrays, places if self._lane is not None else ())
        except BaseException as error:
            self._break("a read", error)
            raise

    def leave(self, why: str) -> bool:
        """Tell the server that this worker makes no request any more; nobody answers. Returns whether it could."""
        if self.broken is not None:
            return False
        self._sequence += 1
        data = to_json(why[:1000])
        message = self._request = np.zeros(MESSAGE_BYTES, np.uint8)  # the last one may be under way
        HEADER.pack_into(message.data, 0, Op.LEAVE, self._sequence, 0, 0, 0, data.size, *_NO_NUMBERS)
        end = HEADER_BYTES + data.size
        message[HEADER_BYTES:end] = data
        never_free((message, self._comm.Isend([message, end, self._byte], self.rank, REQUEST)))
        return True

    def close(self) -> None:
        """Give back what MPI holds for this channel. Local."""
        if self.broken is not None:
            return  # MPI may still write an answer
        if self._pending:
            self._incoming.Cancel()
            self._incoming.Wait()
        self._incoming.Free()
        self._scratch = np.empty(0, np.uint8)
        self.broken = RuntimeError(f"a request to {self.name} on a closed strategy: it was closed, make a new one")
        if not self._test_all(self._sends):
            never_free((self._sends, self._request))

    def _send_data(self, call: str, data: Sequence[Array], plan: Iterable[tuple[Piece, ...]]) -> None:
        lane = self._lane
        for pieces in plan:
            parts = [
                data[item] if stop - start == data[item].nbytes else bytes_of(data[item])[start:stop]
                for item, start, stop in pieces
            ]
            if lane is not None:
                if not lane.can_send():
                    self._wait(call, lane.can_send, 0.0)
                lane.send(join_bytes(parts, lane.slot()).size)
                continue
            memory = bytes_of(parts[0]) if len(parts) == 1 else join_bytes(parts, self._buffer())
            self._sends.append(self._comm.Isend([memory, self._byte], self.rank, DATA))
            if len(parts) > 1:  # the buffer is one
                self._wait(call, partial(self._test_all, self._sends), 0.0, data)
        if lane is None:
            self._wait(call, partial(self._test_all, self._sends), 0.0, data)

    def _receive_data(self, arrays: Sequence[Array], places: tuple[int, ...]) -> None:
        lane = self._lane
        for pieces in plan_messages(tuple(array.nbytes for array in arrays), places):
            parts = [bytes_of(arrays[item])[start:stop] for item, start, stop in pieces]
            if lane is None:
                memory = parts[0] if len(parts) == 1 else self._buffer()[: sum(part.size for part in parts)]
                request = self._comm.Irecv([memory, self._byte], self.rank, DATA)
                self._wait("a read", request.Test, 0.0, (request, memory))
                if len(parts) > 1:
                    _split_bytes(memory, parts)
                continue
            if not lane.can_take():
                self._wait("a read", lane.can_take, 0.0)
            place = places[pieces[0].item] if places else NO_PLACE
            if is_read_in_place(parts[0].size, place):
                parts[0][...] = lane.server_memory[place : place + parts[0].size]
            else:
                _split_bytes(lane.sent_slot(), parts)
            lane.take()

    def _buffer(self) -> Array:
        if not self._scratch.size:
            self._scratch = np.empty(CHUNK_BYTES, np.uint8)
        return self._scratch

    def _wait(self, call: str, test: Callable[[], bool], more_seconds: float, memory: Sequence[Any] = ()) -> None:
        group, timeout = self._group, self._group.timeout_seconds
        limit = timeout + more_seconds if timeout and more_seconds < math.inf else None
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
        never_free((self._sends, self._request, self._answer, self._incoming))
        self._pending = ""
        if is_process_failure(error):
            error = PeerFailedError(f"{call}: MPI has found that the process of rank {self.rank} has failed")
        elif not isinstance(error, (DeadlineExceededError, PeerFailedError)):
            self.broken = UnavailableError(f"{call} at {self.name} was interrupted")
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

    def _raise(self, call: str) -> NoReturn:
        header = Header.read(self._answer)
        text = self._answer[HEADER_BYTES : HEADER_BYTES + header.nbytes].tobytes().decode(errors="replace")
        if header.op == Outcome.REFUSED:
            raise InvalidArgumentError(text)
        if header.op == Outcome.TOO_LATE:
            raise DeadlineExceededError(f"{call} of rank {self._comm.rank} cannot complete: {text}")
        raise RuntimeError(f"{call} failed on {text}")


@final
class Connection:
    """The messages of one worker, which has one request under way at a time. All methods are local.

    Attributes:
        message, sequence: The last request, and its number.
        lists: Lists of variables that the worker has numbered, in the server's own form.
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
        self.message = np.zeros(MESSAGE_BYTES, np.uint8)
        self._reply = np.zeros(MESSAGE_BYTES, np.uint8)
        self._reply_memory = self._reply.data
        self._buffers: list[Array] = []
        self._whole = np.empty(0, np.uint8)
        self._received = 0  # bytes of the data of this request
        self._sent: Any = None
        self._incoming = comm.Recv_init([self.message, mpi.BYTE], rank, REQUEST)
        self._is_listening = self._is_abandoned = False
        self.listen()

    def listen(self) -> None:
        """Make ready for the next request."""
        self._received = 0
        self._is_listening = True
        self._incoming.Start()

    def has_request(self) -> bool:
        """Whether a request has come that is not begun."""
        if self._incoming.Test():
            self._is_listening = False
            return True
        return False

    def answer(self, outcome: int, data: Array | None = None, nbytes: int = 0, rows: int = 0) -> None:
        """Answer the request: with `data` behind the header, or with `nbytes` that follow in messages of their own."""
        sent, size = self._sent, 0
        while sent is not None and not sent.Test():  # the worker has it already, as it has made another request
            pass
        if data is not None:
            size = nbytes = data.size
            self._reply[HEADER_BYTES : HEADER_BYTES + size] = data
        WHOLE_NUMBERS.pack_into(self._reply_memory, 0, outcome, self.sequence, 0, rows, 0, nbytes)
        self._sent = self._comm.Isend([self._reply, HEADER_BYTES + size, self._byte], self.rank, ANSWER)

    def answer_text(self, outcome: int, text: str) -> None:
        """Answer with a text, which is cut where it is too long."""
        self.answer(outcome, np.frombuffer(text.encode()[:INLINE_BYTES], np.uint8))

    def answer_all(self, data: Array) -> Generator[bool, None, None]:
        """Answer with bytes, however many."""
        if data.size <= INLINE_BYTES:
            self.answer(Outcome.OK, data)
            return
        self.answer(Outcome.OK, nbytes=data.size)
        for ((_, start, stop),) in plan_messages((data.size,)):
            yield from self.send([data[start:stop]])

    def send(self, parts: Sequence[Array]) -> Generator[bool, None, None]:
        """Send one message of data, of several parts, and yield until their memory can be used again."""
        lane = self.lane
        if lane is not None:
            while not lane.can_send():
                yield False
            lane.send(join_bytes(parts, lane.slot()).size)
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
        nbytes = Header.read(self.message).nbytes
        if nbytes != sum(sizes):
            raise ValueError(f"a request came with {nbytes} bytes of data, and needs {sum(sizes)}")
        if nbytes <= INLINE_BYTES:
            pieces = tuple(Piece(item, 0, size) for item, size in enumerate(sizes) if size)
            yield pieces, self.message[HEADER_BYTES : HEADER_BYTES + nbytes]
        elif self.lane is not None:
            yield from self._receive_from_lane(self.lane, plan_messages(sizes))
        else:
            yield from self._receive_messages(plan_messages(sizes))

    def receive_all(self) -> Generator[bool, None, Array]:
        """Receive the data of the request, as one array that belongs to the caller."""
        nbytes = Header.read(self.message).nbytes
        data = np.empty(nbytes, np.uint8)
        at = 0
        for pieces, part in self.receive((nbytes,)):
            if not pieces:
                yield False
                continue
            data[at : at + part.size] = part
            at += part.size
            yield True
        return data

    def drain(self) -> Generator[bool, None, None]:
        """Receive what is left of the data of the request, and drop the data."""
        nbytes, lane = Header.read(self.message).nbytes, self.lane
        while nbytes > INLINE_BYTES and self._received < nbytes:
            if lane is not None:
                while not lane.can_take():
                    yield False
                self._received += lane.sent_slot().size
                lane.take()
                continue
            request = self._receive_into(self._buffer(0))
            while not request.Test(self._status):
                yield False
            self._received += self._status.Get_count(self._byte)

    def whole(self, nbytes: int) -> Array:
        """Return memory in which data can be collected that comes in several messages: the same at every call."""
        if self._whole.size < nbytes:
            self._whole = np.empty(nbytes, np.uint8)
        return self._whole[:nbytes]

    def abandon(self) -> None:
        """Give up a worker that is lost: drop its request, and leave to MPI what is under way. Local."""
        if self.steps is not None:
            self.steps.close()
            self.steps = None
        never_free((self.message, self._reply, self._buffers, self._incoming, self._sent))
        self.has_ended = self._is_abandoned = True

    def close(self) -> None:
        """Give back what MPI holds for this connection."""
        if self._is_abandoned:
            return
        if self._is_listening:
            self._incoming.Cancel()
            self._incoming.Wait()
        self._incoming.Free()
        self._buffers, self._whole = [], np.empty(0, np.uint8)
        if self._sent is not None and not self._sent.Test():
            never_free((self._sent, self._reply))

    def _receive_from_lane(self, lane: Lane, plan: Plan) -> Received:
        for pieces in plan:
            while not lane.can_take():
                yield (), self.message
            data = lane.sent_slot()
            self._received += data.size
            try:
                yield pieces, data
            finally:
                lane.take()

    def _receive_messages(self, plan: Plan) -> Received:
        lengths = [sum(piece.stop - piece.start for piece in pieces) for pieces in plan]
        request = self._receive_into(self._buffer(0)[: lengths[0]])
        for at, pieces in enumerate(plan):
            while not request.Test():
                yield (), self.message
            self._received += lengths[at]
            if at + 1 < len(plan):
                request = self._receive_into(self._buffer((at + 1) % 2)[: lengths[at + 1]])
            yield pieces, self._buffer(at % 2)[: lengths[at]]

    def _buffer(self, number: int) -> Array:
        """Return memory for one message of data: that of one of two buffers."""
        if not self._buffers:
            self._buffers = [np.empty(CHUNK_BYTES, np.uint8) for _ in range(2)]
        return self._buffers[number]

    def _receive_into(self, memory: Array) -> Any:
        return self._comm.Irecv([memory, self._byte], self.rank, DATA)


def _split_bytes(memory: Array, parts: Sequence[Array]) -> None:
    """Copy bytes that lie one behind the other into several places."""
    at = 0
    for part in parts:
        part[...] = memory[at : at + part.size]
        at += part.size
