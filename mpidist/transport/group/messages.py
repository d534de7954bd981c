"""Messages from one rank to another, and from every rank to every other, in host memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, final

import numpy as np

from mpidist.errors import DeadlineExceededError, InvalidArgumentError
from mpidist.transport.communicator import Array
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.mpi.communicator import MAX_CHUNK_BYTES, MpiCommunicator
from mpidist.transport.mpi.library import load_mpi
from mpidist.transport.shared_errors import mark_shared
from mpidist.transport.text import count_text
from mpidist.transport.waiting import never_free, poll, poll_or_keep

__all__ = ["Message", "Messages"]

_ALL_TO_ALL = 0  # the tag of all-to-all; those of single messages are greater


@final
class Message:
    """A message to or from one rank that is under way.

    Args:
        name: What the rank does, for people: "recv from rank 1, tag 0".
        requests: MPI's requests of its pieces.
        buffer: Its bytes [n], which nobody may change until it is done.
    """

    def __init__(
        self,
        group: SyncGroup,
        comm: MpiCommunicator,
        name: str,
        requests: list[Any],
        buffer: Array,
        is_receive: bool,
    ) -> None:
        self._group, self._comm, self._name = group, comm, name
        self._requests, self._buffer, self._is_receive = requests, buffer, is_receive
        self._statuses = [load_mpi().Status() for _ in requests]
        self._is_done = False
        self._error: Exception | None = None

    @property
    def source(self) -> int:
        """The rank that has sent the message, once a receive is done."""
        rank: int = self._statuses[0].Get_source()
        return rank

    def is_over(self) -> bool:
        """Whether MPI needs the memory no more; an error is kept for `is_done`. Local."""
        try:
            return self.is_done()
        except Exception as error:
            self._error = error
            return True

    def is_done(self) -> bool:
        """Whether the message is sent or received; raises if it has a wrong length, or is lost. Advances it. Local."""
        if self._error is not None:
            raise self._error
        if not self._is_done:
            mpi = load_mpi()
            try:
                # one by one: of several, MPI does not say which error which has
                self._is_done = all(map(mpi.Request.Test, self._requests, self._statuses))
            except mpi.Exception as error:
                if error.Get_error_class() != mpi.ERR_TRUNCATE:
                    self._comm.raise_loss(error)
                self._is_done = True
                raise self._kept(self._length_error("more than")) from error
            if self._is_done and self._is_receive:
                received = sum(status.Get_count(mpi.BYTE) for status in self._statuses)
                if received != self._buffer.nbytes:
                    raise self._kept(self._length_error(f"{received:,} of"))
        return self._is_done

    def wait(self, timeout_seconds: float | None) -> None:
        """Wait until the message is sent or received, advancing started calls; a missed deadline breaks the group."""
        if self.is_done():
            return
        group, since = self._group, time.monotonic()
        group.enter(self._name)
        group.agreement.await_message(self._name)

        def check() -> None:
            group.advance()
            group.agreement.check_peers()
            if timeout_seconds and time.monotonic() - since >= timeout_seconds:
                what = "sent it" if self._is_receive else "received it"
                raise DeadlineExceededError(
                    f"{self._name} on rank {group.topology.rank} waited {timeout_seconds:g} s, and no rank has "
                    f"{what}. Every send needs a receive with the same tag, and ranks must not all send first"
                )

        try:
            poll(self.is_done, check)
        except InvalidArgumentError:
            raise
        except BaseException as error:
            never_free((self,))
            group.break_off(error)
            raise
        finally:
            group.agreement.await_message("")

    def _kept(self, error: Exception) -> Exception:
        self._error = error
        return error

    def _length_error(self, found: str) -> InvalidArgumentError:
        needed = count_text(self._buffer.nbytes, "byte")
        rank = self._group.topology.rank
        return InvalidArgumentError(
            f"{self._name} on rank {rank}: the message has {found} the {needed} that are to be received; send and "
            "receive arrays of the same shape and dtype"
        )


@final
class Messages:
    """The messages of a group, in a communicator of their own. Making it is collective."""

    def __init__(self, group: SyncGroup) -> None:
        self._group = group
        self._comm: MpiCommunicator | None = None
        self._under_way: list[Message] = []  # whose memory MPI may still use, even if the program drops them
        if group.membership is not None and group.topology.size > 1:
            self._comm = MpiCommunicator(group.membership.comm.Dup(), "messages")

    def send(self, name: str, buffer: Array, to: int, tag: int) -> Message:
        """Start to send bytes [n] to a rank. Local. `name`: as in `Message`."""
        comm = self._connected(name, to, tag)
        requests = comm.send(buffer, to, tag + 1)
        return self._started(Message(self._group, comm, name, requests, buffer, is_receive=False))

    def receive(self, name: str, buffer: Array, source: int | None, tag: int) -> Message:
        """Start to receive bytes [n] of one rank, or, at most `MAX_CHUNK_BYTES`, of any rank (`None`). Local."""
        comm = self._connected(name, source or 0, tag)
        if source is None and buffer.nbytes > MAX_CHUNK_BYTES:
            raise InvalidArgumentError(
                f"{name}: {buffer.nbytes:,} bytes from any rank; needed at most {MAX_CHUNK_BYTES:,}, or one rank"
            )
        of_mpi = load_mpi().ANY_SOURCE if source is None else source
        requests = comm.receive(buffer, of_mpi, tag + 1)
        return self._started(Message(self._group, comm, name, requests, buffer, is_receive=True))

    def compare_sizes(self, call: str, outgoing: Sequence[Array], incoming: Sequence[Array]) -> None:
        """Compare the bytes that each rank sends to each with the room there; raise on all ranks if they differ."""
        agreement, (rank, size) = self._group.agreement, (self._group.topology.rank, self._group.topology.size)
        table = np.empty((size, 2, size), np.int64)
        table[rank] = [[one.size for one in parts] for parts in (outgoing, incoming)]
        self._group.levels.world.all_gather(table.reshape(-1))
        for source, target in np.argwhere(table[:, 0] != table[:, 1].T):
            error = InvalidArgumentError(
                f"{call}: rank {source} sends {table[source, 0, target]} bytes to rank {target}, which has room for "
                f"{table[target, 1, source]}"
            )
            mark_shared(error, agreement.ranks)  # all ranks have the same table
            raise error

    def all_to_all(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> None:
        """Send bytes [n] to every rank, and receive as many bytes as each sends. Collective.

        `incoming` is apart from `outgoing`; but this rank's own may be the same array.
        """
        rank, comm = self._group.topology.rank, self._comm
        if incoming[rank] is not outgoing[rank]:
            incoming[rank][...] = outgoing[rank]
        if comm is None:
            return
        requests: list[Any] = []
        try:
            for start, parts in ((comm.receive, incoming), (comm.send, outgoing)):
                for other in (one for one in comm.others if parts[one].nbytes):
                    requests += start(parts[other], other, _ALL_TO_ALL)
        except BaseException:  # Ctrl-C
            never_free((requests, outgoing, incoming))
            raise
        check = self._group.agreement.check_peers
        poll_or_keep(partial(comm.test_all, requests), check, (requests, outgoing, incoming))

    def free(self) -> None:
        """Free the communicator, unless the group has failed or messages are under way. Collective."""
        if self._comm is None:
            return
        left = [message for message in self._under_way if not message.is_over()]
        if left or self._group.agreement.broken is not None:
            never_free((left, self._comm))
        else:
            self._comm.free()
        self._comm = None

    def _connected(self, name: str, other: int, tag: int) -> MpiCommunicator:
        self._group.enter(name)
        if self._comm is None:
            raise InvalidArgumentError(f"{name} in a group of one rank: there is no other rank")
        bound: Any = self._comm.comm.Get_attr(load_mpi().TAG_UB)  # of tag + 1, which is sent
        if not (0 <= other < self._comm.size and 0 <= tag < bound):
            raise InvalidArgumentError(f"{name} needs 0 <= rank < {self._comm.size}, and 0 <= tag < {bound}")
        return self._comm

    def _started(self, message: Message) -> Message:
        self._under_way = [*(one for one in self._under_way if not one.is_over()), message]
        return message
