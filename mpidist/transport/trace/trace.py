"""The trace of one rank: the calls of its flight recorder, and when the rank waited, appended to a file in pieces.

All ranks of a group begin a trace together, each with a file of its own, and end it together. A file has a line of
JSON for each piece. What was written survives the end of the process, whatever ends it; who reads the file leaves out a
line that was not finished.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

from mpidist.errors import UnavailableError
from mpidist.transport.failures import open_groups
from mpidist.transport.failures.flight_recorder import FlightRecorder
from mpidist.transport.mpi.library import Intracomm, numbers_in_world, ranks_in_world
from mpidist.transport.shared_errors import mark_shared
from mpidist.transport.trace.clocks import ClockSample, compare_clocks, name_clock
from mpidist.transport.waiting import observers

__all__ = ["TRACE_VERSION", "Gather", "Trace", "begin_trace", "end_trace"]

logger = logging.getLogger("mpidist.transport")

TRACE_VERSION: Final = 1
_CALLS_IN_A_PIECE: Final = 256  # a recorder keeps more
_NANOSECONDS_OF_A_PIECE: Final = 1_000_000_000
_MAX_OPEN_CALLS: Final = 64  # of the calls before, those that had not ended are written once more
_MAX_BYTES: Final = 64 << 20
_LEAST_WAIT: Final = 1000  # nanoseconds
_MAX_WAITS: Final = 4096  # in a piece: a server has one call

_now = time.monotonic_ns
_open: Final[list[Trace]] = []  # of this process
_of_job: Final[list[Path]] = []  # the folder of the trace of the whole job; at most one

Gather = Callable[[Any], list[Any]]


@final
class Trace:
    """Trace of one rank's calls in one strategy. The file is made here."""

    def __init__(self, path: Path, recorder: FlightRecorder) -> None:
        self.path, self.recorder = path, recorder
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        self._lock = threading.RLock()  # a background thread may write, and a handler of a signal
        self._entered: list[int] = []
        self._waits: list[int] = []
        self._num_bytes = self._text = self._due = 0
        self._next = self._count = recorder.count

    def begin(self, header: Mapping[str, Any], clocks: Sequence[ClockSample]) -> None:
        """Record from now on. Local."""
        now = _now()
        self._append({"version": TRACE_VERSION, **header, "time": now, "wall": time.time_ns() - now, "clocks": clocks})
        if not self.is_open:  # there is no space left
            return
        _open.append(self)
        self.recorder.after_begin = self._write_if_due
        observers.append(self._add_wait)

    def enter(self) -> None:
        """Record that this rank enters a call: its work from then until it joins the call is staging."""
        if self.is_open:
            self._entered.append(_now())

    def write(self) -> None:
        """Write the records since the last piece. Local."""
        with self._lock:
            if not self.is_open:
                return
            recorder, now = self.recorder, _now()
            rows, texts = recorder.rows_since(self._next), recorder.texts_since(self._text)
            waits, self._waits = self._waits, []
            entered, self._entered = self._entered, []
            self._count, self._due = recorder.count, now + _NANOSECONDS_OF_A_PIECE
            not_ended = [row[0] for row in rows if not row[-1]]
            self._next = max(min(not_ended, default=self._count), self._count - _MAX_OPEN_CALLS)
            self._text = max(texts, default=self._text)
            self._append({"time": now, "texts": texts, "calls": rows, "entered": entered, "waits": waits})
            if self._num_bytes > _MAX_BYTES:
                self._append({"full": now})
                self._stop(f"it has {_MAX_BYTES >> 20} MiB, and gets no more; trace a part of the program")

    def end(self, clocks: Sequence[ClockSample] = ()) -> None:
        """Write the rest, and the clocks where the ranks end together, and record no more. Local."""
        self.write()
        if self.is_open:
            self._append({"end": _now(), "clocks": clocks})
            self._stop()

    @property
    def is_open(self) -> bool:
        """Whether calls are recorded."""
        return self._file >= 0

    def discard(self) -> None:
        """Remove the file, in which nothing was recorded."""
        self._stop()
        self.path.unlink()

    def _add_wait(self, begun: int, ended: int) -> None:
        """Record that this rank has waited for others."""
        if ended - begun >= _LEAST_WAIT:
            self._waits += (begun, ended)
            if len(self._waits) >= 2 * _MAX_WAITS:
                self.write()

    def _write_if_due(self) -> None:
        if self.recorder.count >= self._count + _CALLS_IN_A_PIECE or _now() >= self._due:
            self.write()

    def _append(self, piece: Mapping[str, Any]) -> None:
        data = json.dumps(piece, separators=(",", ":")).encode() + b"\n"
        try:
            written = os.write(self._file, data) if self.is_open else len(data)
        except OSError as error:
            self._stop(f"it could not be written any more: {error.strerror}")
            return
        self._num_bytes += written
        if written < len(data):
            self._stop("there is no space left for it")

    def _stop(self, why: str = "") -> None:
        if why:
            logger.warning("the trace %s ends: %s", self.path, why)
        if self in _open:
            _open.remove(self)
            self.recorder.after_begin = None
            observers.remove(self._add_wait)
        os.close(self._file)
        self._file = -1


def begin_trace(
    comm: Intracomm | None,
    folder: Path,
    group: str,
    recorder: FlightRecorder,
    gather: Gather,
    is_of_job: bool = False,
) -> Trace:
    """Begin to record the calls of a group, in a new folder within a folder. Collective.

    `comm`: the ranks of the group; `None` for a group of one without MPI. `group`: its name, the same on all ranks.
    `gather` all-gathers an object, and may give up where a rank's file system does not answer. `is_of_job`: all groups
    of the job have one folder, and not each trace its own. If a rank cannot write, every rank raises.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    if is_of_job and _of_job:
        name = _of_job[0].name
    name = gather(name)[0]
    rank, size, world_rank = (0, 1, 0) if comm is None else (comm.rank, comm.size, numbers_in_world(comm)[comm.rank])
    path = folder / name / f"rank-{world_rank}-{group}.jsonl"
    trace, problem = None, ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        trace = Trace(path, recorder)
    except OSError as error:
        problem = f"rank {rank} ({socket.gethostname()}): {error.strerror}"
    try:
        problems = [one for one in gather(problem) if one]
        if trace is None or problems:
            needed = "give a folder that all ranks can write to"
            raise UnavailableError(f"no trace can be written to {folder}: {problems[0]}; {needed}")
    except BaseException as refusal:
        if trace is not None:
            trace.discard()
            with suppress(OSError):  # another rank's file is still there
                path.parent.rmdir()
        if comm is not None and isinstance(refusal, UnavailableError):
            mark_shared(refusal, ranks_in_world(comm))
        raise
    if is_of_job:
        _of_job[:] = [path.parent.absolute()]  # also after `os.chdir`
    clock = name_clock()
    seat = {"group": group, "rank": rank, "size": size, "world_rank": world_rank}
    header = {"trace": name, **seat, "host": socket.gethostname(), "clock": clock}
    trace.begin(header, compare_clocks(comm, clock))
    return trace


def end_trace(comm: Intracomm | None, trace: Trace) -> None:
    """End a trace on all ranks. Collective."""
    trace.end(compare_clocks(comm, name_clock()))


def _save() -> str:
    """Write the records of all open traces of this process; return how to read those of the whole job. Local."""
    for trace in tuple(_open):
        trace.write()
    return f"waits of the calls: python -m mpidist trace merge {os.path.relpath(_of_job[0])}" if _of_job else ""


def _leave_to_parent() -> None:
    """Keep a forked process from writing in files of its parent."""
    _of_job.clear()
    for trace in tuple(_open):
        trace._stop()


open_groups.savers.append(_save)
os.register_at_fork(after_in_child=_leave_to_parent)
