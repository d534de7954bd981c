"""Status board of a node: the state of each of its ranks, in memory that all of them read."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, final

import numpy as np

from mpidist.errors import UnavailableError
from mpidist.transport.communicator import Array
from mpidist.transport.failures.flight_recorder import FLIGHT_BYTES, FlightEntry, FlightRecorder, entries_in, last_in
from mpidist.transport.mpi.child_process import read_stat
from mpidist.transport.mpi.library import Intracomm
from mpidist.transport.node_memory.window import SharedWindow
from mpidist.transport.stacks import read_stacks

__all__ = ["GONE", "RESET", "RUNNING", "STOPPED", "UNKNOWN", "Process", "StatusBoard", "Status", "name_call"]

RUNNING: Final = "running"
STOPPED: Final = "stopped"
GONE: Final = "gone"
UNKNOWN: Final = "unknown"

_STATES: Final = {"T": STOPPED, "t": STOPPED, "Z": GONE, "X": GONE, "x": GONE}

RESET: Final = 1 << 40  # the sequence number of a reset, which is higher than those of all calls
_PROCESS_BYTES: Final = 32  # of each rank, behind the recorder of the node's first rank: `Process`, and `_FOUND_ALIVE`
_FOUND_ALIVE: Final = 3  # the place of the time at which any rank found the process alive, or of `_FOUND_GONE`
_CHECKED_NS: Final = 200_000_000  # for how long a process counts as alive that one rank of the node has found alive
_FOUND_GONE: Final = -1


@final
class Process(NamedTuple):
    """The identity of a process, which a later process with the same id does not have.

    It is read from /proc, as MPI does not report which processes are alive.

    Attributes:
        begun: When the process began, in ticks since the machine was started.
        namespace: The namespace of process ids: each container has its own. 0 where it is unknown.
    """

    pid: int
    begun: int
    namespace: int

    @classmethod
    def own(cls) -> Process:
        """Describe the calling process."""
        pid = os.getpid()
        try:
            return cls(pid, read_stat(pid)[3], os.stat("/proc/self/ns/pid").st_ino)
        except OSError:  # no /proc, or not all of it
            return cls(pid, 0, 0)

    def state(self, seen_from: Process) -> str:
        """Return `RUNNING` (or asleep), `STOPPED` (by a signal or a debugger), `GONE`, or `UNKNOWN` if out of sight."""
        if not self.namespace or self.namespace != seen_from.namespace:
            return UNKNOWN
        try:
            _, state, _, begun = read_stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return GONE
        except OSError:
            return UNKNOWN
        return _STATES.get(state, RUNNING) if begun == self.begun else GONE


def name_call(call: str, sequence: int) -> str:
    """Name a call with its number, if the call has one."""
    return f"{call} (call {sequence})" if 0 < sequence < RESET else call


@final
class Status(NamedTuple):
    """What a rank was doing at the moment when its status was read, by itself or by another rank of its node.

    Attributes:
        last: The rank's last call; `None` if it made none.
        seconds: For how long that call has been in its state: waiting, moving data, started, done or failed.
        process: The state of the rank's process: `"running"`, `"stopped"`, `"gone"` or `"unknown"`.
        where: Where it is in its program, as a clause; "" where that was not requested, or is unknown.
    """

    rank: int
    last: FlightEntry | None
    seconds: float
    process: str
    pid: int
    where: str = ""

    @property
    def is_able(self) -> bool:
        """Whether the rank's process is neither gone nor stopped."""
        return self.process not in (GONE, STOPPED)

    def is_in(self, sequence: int, state: str) -> bool:
        """Whether a call is the rank's last one, and in this `FlightEntry.state`."""
        return self.last is not None and (self.last.sequence, self.last.state) == (sequence, state)

    def has_joined(self, sequence: int) -> bool:
        """Whether the rank has joined a call, or a later one, and its process can still do its part."""
        at = 0 if self.last is None else self.last.sequence
        return self.is_able and at >= sequence and (at >= RESET) == (sequence >= RESET)

    def __str__(self) -> str:
        last = self.last
        if last is None:
            text = "has made no call yet"
        else:
            name = name_call(last.call, last.sequence)
            if not last.sequence and last.details:
                name += f" ({last.details})"
            text = {
                "waiting": f"waits in {name}, for {self.seconds:.1f} s",
                "started": f"started {name} {self.seconds:.1f} s ago, and has not called wait() or another call since",
                "moving": f"is in the middle of {name}, for {self.seconds:.1f} s",
                "done": f"finished {name} {self.seconds:.1f} s ago and has made no call since",
                "failed": f"had an error in {name} {self.seconds:.1f} s ago and has made no call since",
            }[last.state]
        if self.process == GONE:
            return f"its process {self.pid} is gone: it was killed, or ended without a word; it {_past(text)}"
        if self.process == STOPPED:
            return f"its process {self.pid} is stopped, by a signal or a debugger; it {text}"
        return f"{text}; {self.where}" if self.where else text


def _past(text: str) -> str:
    text = text.replace("waits in", "was waiting in").replace("is in the", "was in the")
    return text.replace("has made", "made").replace("has not called", "did not call")


@final
class StatusBoard:
    """The flight recorders of a node's ranks, in memory that all of them read. The constructor is collective.

    If the ranks cannot share memory, each has a board of its own, with that rank alone; so has one without `comm`.
    """

    def __init__(self, comm: Intracomm | None, ranks: Sequence[int]) -> None:
        own = 0 if comm is None else comm.Get_rank()
        self.ranks = tuple(ranks)
        try:
            self._window = SharedWindow(comm, FLIGHT_BYTES + _PROCESS_BYTES * len(self.ranks))
        except UnavailableError:
            self.ranks = (ranks[own],)
            self._window, own = SharedWindow(None, FLIGHT_BYTES + _PROCESS_BYTES), 0
        self._parts: list[Array] = [part[:FLIGHT_BYTES] for part in self._window.parts]
        self._processes: Array = self._window.parts[0][FLIGHT_BYTES:].view(np.int64).reshape(len(self.ranks), -1)
        self.rank, self._own = self.ranks[own], own
        self._process = Process.own()
        self._processes[own, :_FOUND_ALIVE] = self._process
        self.recorder = FlightRecorder(self._parts[own])

    def free(self) -> None:
        """Free the memory. Local; no rank may read the board any more."""
        self._window.discard()

    def gone(self) -> tuple[int, ...]:
        """List the ranks of this node whose processes are gone. Local; reads the state of each."""
        return tuple(rank for place, rank in enumerate(self.ranks) if self._state(place) == GONE)

    def found_gone(self) -> tuple[int, ...]:
        """List the ranks of this node that any of them has found gone; a rank calls it again and again while it waits.

        Local. A call reads the state of one process at most: that of the next rank that neither calls this nor was
        found alive lately. So the ranks that wait share the reading, and for each it costs the same, however many there
        are.
        """
        now, found = time.monotonic_ns(), self._processes[:, _FOUND_ALIVE]
        found[self._own] = now
        is_visible = self._processes[:, 2] == self._process.namespace
        due = np.flatnonzero(is_visible & (found != _FOUND_GONE) & (abs(now - found) > _CHECKED_NS))
        if due.size:
            place = due[np.searchsorted(due, self._own) % due.size]
            found[place] = now  # before the reading, so that other ranks read other processes meanwhile
            if self._state(place) == GONE:
                found[place] = _FOUND_GONE
        return tuple(self.ranks[place] for place in np.flatnonzero(found == _FOUND_GONE))

    def status(self, rank: int) -> Status:
        """Return the status of a rank of this node. Local."""
        place = self.ranks.index(rank)
        last = last_in(self._parts[place])
        since = 0 if last is None else max(last.begun, last.agreed, abs(last.ended))
        if last is not None and last.state == "started":
            since = last.begun
        seconds = (time.monotonic_ns() - since) / 1e9
        return Status(rank, last, seconds, self._state(place), int(self._processes[place, 0]))

    def statuses(self) -> dict[int, Status]:
        """Return the status of each rank of this node. Local."""
        return {rank: self.status(rank) for rank in self.ranks}

    def located(self, statuses: Mapping[int, Status], **limit: float) -> dict[int, Status]:
        """Add to the statuses of ranks of this node where these are in their programs. Local; see `read_stacks`."""
        pids = {
            rank: one.pid
            for rank, one in statuses.items()
            if rank in self.ranks and one.process == RUNNING and not one.where
        }
        stacks = read_stacks(pids.values(), **limit)
        where = {rank: str(stacks.get(pid, "")) for rank, pid in pids.items()}
        return {rank: status._replace(where=where.get(rank, status.where)) for rank, status in statuses.items()}

    def entries(self, rank: int) -> list[FlightEntry]:
        """List the last calls of a rank of this node. Local."""
        return entries_in(self._parts[self.ranks.index(rank)])

    def _state(self, place: int) -> str:
        return Process(*self._processes[place, :_FOUND_ALIVE].tolist()).state(seen_from=self._process)
