"""What the ranks of a node are doing, for all of them to see."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Final, NamedTuple, final

import numpy as np

from mpidist.errors import UnavailableError
from mpidist.transport.communicator import Array
from mpidist.transport.failures.flight_recorder import FLIGHT_BYTES, FlightEntry, FlightRecorder, entries_in, last_in
from mpidist.transport.failures.process_state import GONE, STOPPED, UNKNOWN, Process
from mpidist.transport.mpi import Intracomm
from mpidist.transport.shared_memory import SharedWindow

__all__ = ["RESET", "StatusBoard", "Status", "name_call"]

RESET: Final = 1 << 40  # the number of a reset: later than all calls before it
_PROCESS_AT: Final = 8  # after the recorder's count: pid, begin and namespace of the process


def name_call(call: str, sequence: int) -> str:
    """Name a call with its number, if it is one of those that are numbered."""
    return f"{call} (call {sequence})" if 0 < sequence < RESET else call


@final
class Status(NamedTuple):
    """What a rank was doing when it, or a rank of its node, looked.

    Attributes:
        rank: The rank, in its group.
        last: The call that it began last; `None` if it made none.
        seconds: Since when the state of that call holds: how long it waits, moves data, or has been done.
        process: Whether its process is `"running"`, `"stopped"`, `"gone"` or `"unknown"`.
        pid: The number of its process.
    """

    rank: int
    last: FlightEntry | None
    seconds: float
    process: str
    pid: int

    @property
    def is_able(self) -> bool:
        """Whether its process can do anything."""
        return self.process not in (GONE, STOPPED)

    @property
    def is_resetting(self) -> bool:
        """Whether it waits in a reset."""
        return self.last is not None and self.last.sequence >= RESET and self.last.state == "waiting"

    def is_waiting_in(self, sequence: int) -> bool:
        """Whether it has come to a call, and does not know yet that the others have."""
        return self.last is not None and self.last.sequence == sequence and self.last.state == "waiting"

    def has_joined(self, sequence: int) -> bool:
        """Whether it has come to a call, or to a reset, and can still do its part."""
        at = 0 if self.last is None else self.last.sequence
        return self.is_able and at >= sequence and (at >= RESET) == (sequence >= RESET)

    def __str__(self) -> str:
        last = self.last
        if last is None:
            text = "has made no call yet"
        else:
            name = name_call(last.call, last.sequence)
            text = {
                "waiting": f"waits in {name}, for {self.seconds:.1f} s",
                "moving": f"is in the middle of {name}, for {self.seconds:.1f} s",
                "done": f"finished {name} {self.seconds:.1f} s ago and has made no call since",
                "failed": f"had an error in {name} {self.seconds:.1f} s ago and has made no call since",
            }[last.state]
        if self.process == GONE:
            return f"its process {self.pid} is gone: it was killed, or ended without a word; it {_past(text)}"
        if self.process == STOPPED:
            return f"its process {self.pid} is stopped, by a signal or a debugger; it {text}"
        return text


def _past(text: str) -> str:
    return text.replace("waits in", "was waiting in").replace("is in the", "was in the").replace("has made", "made")


@final
class StatusBoard:
    """The flight recorders of a node's ranks, in memory that all of them read. Making it is collective.

    Where ranks cannot share memory, a rank sees itself alone.

    Args:
        comm: The ranks of the node; `None` for a node of this rank alone.
        ranks: The numbers that they have in their group.

    Attributes:
        recorder: This rank's own.
        ranks: The ranks that can be seen from here.
    """

    def __init__(self, comm: Intracomm | None, ranks: Sequence[int]) -> None:
        own = 0 if comm is None else comm.Get_rank()
        self.ranks = tuple(ranks)
        try:
            self._window = SharedWindow(comm, FLIGHT_BYTES)
        except UnavailableError:
            self.ranks = (ranks[own],)
            self._window, own = SharedWindow(None, FLIGHT_BYTES), 0
        self._parts: list[Array] = self._window.parts
        self.rank = self.ranks[own]
        self._process = Process.own()
        self._parts[own][_PROCESS_AT : _PROCESS_AT + 24] = np.frombuffer(struct.pack("=3q", *self._process), np.uint8)
        self.recorder = FlightRecorder(self._parts[own])

    def free(self) -> None:
        """Give back the memory. Local; no rank may look at the board any more."""
        self._window.discard()

    def gone(self) -> tuple[int, ...]:
        """List the ranks of this node whose processes are gone. Local."""
        processes = zip(self.ranks, self._processes(), strict=True)
        return tuple(rank for rank, process in processes if process.pid and process.state(self._process) == GONE)

    def status(self, rank: int) -> Status:
        """Say what a rank of this node is doing. Local."""
        place = self.ranks.index(rank)
        last, process = last_in(self._parts[place]), self._processes()[place]
        since = 0 if last is None else max(last.begun, last.agreed, abs(last.ended))
        state = process.state(self._process) if process.pid else UNKNOWN
        return Status(rank, last, (time.monotonic_ns() - since) / 1e9, state, process.pid)

    def statuses(self) -> dict[int, Status]:
        """Say what all ranks of this node are doing. Local."""
        return {rank: self.status(rank) for rank in self.ranks}

    def entries(self, rank: int) -> list[FlightEntry]:
        """List the last calls of a rank of this node. Local."""
        return entries_in(self._parts[self.ranks.index(rank)])

    def _processes(self) -> list[Process]:
        return [Process(*struct.unpack_from("=3q", memory, _PROCESS_AT)) for memory in self._parts]
