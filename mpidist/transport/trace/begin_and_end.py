"""All ranks of a group begin a trace together, each with a file of its own, and end it together."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from mpidist.errors import UnavailableError
from mpidist.transport.failures import open_groups
from mpidist.transport.failures.flight_recorder import FlightRecorder
from mpidist.transport.mpi.library import Intracomm, numbers_in_world, ranks_in_world
from mpidist.transport.shared_errors import mark_shared
from mpidist.transport.trace.clocks import compare_clocks, name_clock
from mpidist.transport.trace.trace import Trace, write_all

__all__ = ["Gather", "begin_trace", "end_trace"]

Gather = Callable[[Any], list[Any]]

_of_job: Final[list[Path]] = []  # the folder of the trace of the whole job; at most one


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
    write_all()
    return f"waits of the calls: python -m mpidist trace merge {os.path.relpath(_of_job[0])}" if _of_job else ""


open_groups.savers.append(_save)
os.register_at_fork(after_in_child=_of_job.clear)
