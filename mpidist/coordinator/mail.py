"""Messages of any length between the chief and a worker, which both sides poll."""

from __future__ import annotations

import struct
from typing import Any, Final, final

import numpy as np

from mpidist.transport.group.service_group import ServiceGroup
from mpidist.transport.mpi.library import load_mpi
from mpidist.transport.waiting import never_free

__all__ = ["Kind", "Letter", "Mail"]

_TAG: Final = 11  # a tag that no server and no request uses
_HEADER: Final = struct.Struct("=qqq")
_NOTHING: Final = np.empty(0, np.uint8)

Array = np.ndarray[Any, Any]
# A kind, the number of the call that it is about, which older calls will not be made again, and the data.
Letter = tuple[int, int, int, Array]


@final
class Kind:
    """What a letter is about."""

    CALL: Final = 0  # chief to worker: call a function
    END: Final = 1  # chief to worker: no function follows
    RESULT: Final = 2  # worker to chief: what a function has returned, or raised
    LEFT: Final = 3  # worker to chief: this worker calls no function any more; its last letter


@final
class Mail:
    """The letters of this rank to and from another one. All methods are local.

    Where MPI says that the process of the other rank has failed, nothing is sent and received any more: the group's
    `awaited.lost` says so, or an error does, if the group does not go on without the other rank.

    Args:
        group: The workers and servers.
        rank: The other rank. Also an attribute.
    """

    def __init__(self, group: ServiceGroup, rank: int) -> None:
        mpi = load_mpi()
        self.rank = rank
        self._group, self._has_failed = group, False
        self._comm, self._byte, self._status = group.comm, mpi.BYTE, mpi.Status()
        self._sends: list[tuple[Any, Array]] = []
        self._incoming: tuple[Any, Array] | None = None

    def send(self, kind: int, number: int = 0, oldest: int = 0, data: Array = _NOTHING) -> None:
        """Send a letter, and do not wait.

        Args:
            kind: A `Kind`.
            number: The number of the call that it is about.
            oldest: Of a call: those with lower numbers will not be made again.
            data: What else belongs to it.
        """
        if self._has_failed:
            return
        letter = np.concatenate([np.frombuffer(_HEADER.pack(kind, number, oldest), np.uint8), data])
        try:
            self._sends.append((self._comm.Isend([letter, self._byte], self.rank, _TAG), letter))
        except load_mpi().Exception as error:
            self._fail(error)

    def has_sent_all(self) -> bool:
        """Whether MPI has done with the memory of all letters. MPI sends large ones while they are tested."""
        try:
            self._sends = [send for send in self._sends if not send[0].Test()]
        except load_mpi().Exception as error:
            self._fail(error)
        return not self._sends

    def receive(self) -> Letter | None:
        """Return the next letter, if there is one."""
        self.has_sent_all()
        try:
            return None if self._has_failed else self._receive()
        except load_mpi().Exception as error:
            self._fail(error)
            return None

    def _receive(self) -> Letter | None:
        if self._incoming is None:
            message = self._comm.Improbe(self.rank, _TAG, self._status)
            if message is None:
                return None
            data = np.empty(self._status.Get_count(self._byte), np.uint8)
            self._incoming = message.Irecv([data, self._byte]), data
        request, data = self._incoming
        if not request.Test():
            return None
        self._incoming = None
        kind, number, oldest = _HEADER.unpack_from(data.data)
        return kind, number, oldest, data[_HEADER.size :]

    def abandon(self) -> None:
        """Keep what MPI may still read and write."""
        if self._sends or self._incoming:
            never_free((self._sends, self._incoming))

    def _fail(self, error: Exception) -> None:
        """Note that the process of the other rank has failed, if an error of MPI's comes of that.

        Raises:
            PeerFailedError: If the group does not go on without the other rank.
        """
        if not self._group.shows_loss(error, self.rank):
            raise error
        self._has_failed = True
        self.abandon()
        self._sends, self._incoming = [], None
        self._group.lose(self.rank)
