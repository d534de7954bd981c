"""A server's end of the messages from and to one worker."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any, final

import numpy as np

from mpidist.parameter_server.messages.lane import Lane
from mpidist.parameter_server.messages.protocol import (
    ANSWER,
    CHUNK_BYTES,
    DATA,
    HEADER_BYTES,
    INLINE_BYTES,
    MESSAGE_BYTES,
    REQUEST,
    WHOLE_NUMBERS,
    Header,
    Outcome,
    Piece,
    join_bytes,
    plan_messages,
)
from mpidist.transport.mpi.library import Intracomm, load_mpi
from mpidist.transport.waiting import never_free

__all__ = ["Connection"]

Array = np.ndarray[Any, Any]
Plan = Sequence[tuple[Piece, ...]]
Received = Iterator[tuple[tuple[Piece, ...], Array]]


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
