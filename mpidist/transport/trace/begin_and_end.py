"""All ranks of a group begin a trace together, each with a file of its own, and end it together."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, final

from mpidist.errors import UnavailableError
from mpidist.transport.failures import FlightRecorder
from mpidist.transport.mpi import Intracomm, ranks_in_world
from mpidist.transport.shared_errors import mark_shared
from mpidist.transport.trace.clocks import compare_clocks, name_clock
from mpidist.transport.trace.trace import Trace

__all__ = ["Seat", "begin_trace", "end_trace"]

_names: Final[list[str]] = []  # of the trace of the whole job; at most one


@final
class Seat(NamedTuple):
    """Where a rank is.

    Attributes:
        group: The name of the group, the same on all its ranks.
        rank: The rank in the group.
        size: How many ranks the group has.
        world_rank: The rank in the world.
    """

    group: str
    rank: int
    size: int
    world_rank: int


def begin_trace(
    comm: Intracomm | None, folder: Path, seat: Seat, recorder: FlightRecorder, is_of_job: bool = False
) -> Trace:
    """Begin to record the calls of a group, in a new folder within a folder. Collective.

    Args:
        comm: The ranks; `None` for this one alone.
        folder: Where the new folder is made.
        seat: This rank.
        recorder: The flight recorder of this rank.
        is_of_job: Whether all groups of the job have one folder, and not each trace its own.

    Raises:
        UnavailableError: If a rank cannot write there. On every rank.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    if is_of_job and _names:
        name = _names[0]
    name = name if comm is None else comm.bcast(name, 0)
    if is_of_job:
        _names[:] = [name]
    path = folder / name / f"rank-{seat.world_rank}-{seat.group}.jsonl"
    trace, problem = None, ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        trace = Trace(path, recorder)
    except OSError as error:
        problem = f"rank {seat.rank} ({socket.gethostname()}): {error.strerror}"
    problems = [one for one in _all_gather(comm, problem) if one]
    if trace is None or problems:
        if trace is not None:
            trace.discard()
            with suppress(OSError):  # another rank's file is still there
                path.parent.rmdir()
        refusal = UnavailableError(
            f"no trace can be written to {folder}: {problems[0]}; give a folder that all ranks can write to"
        )
        if comm is not None:
            mark_shared(refusal, ranks_in_world(comm))
        raise refusal
    clock = name_clock()
    header = {"trace": name, **seat._asdict(), "host": socket.gethostname(), "clock": clock}
    trace.begin(header, compare_clocks(comm, clock))
    return trace


def end_trace(comm: Intracomm | None, trace: Trace) -> None:
    """End a trace on all ranks. Collective."""
    trace.end(compare_clocks(comm, name_clock()))


def _all_gather(comm: Intracomm | None, text: str) -> Sequence[str]:
    return [text] if comm is None else comm.allgather(text)
