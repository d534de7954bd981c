"""Flight recorders on disk: a file per rank, written when a call fails, a program crashes, or on request."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from mpidist.errors import DeadlineExceededError, PeerFailedError
from mpidist.transport.failures.flight_recorder import FlightEntry
from mpidist.transport.stacks import Stack

__all__ = ["FILE_VERSION", "FLIGHT_FOLDER", "GroupFlight", "chosen_folder", "flight_folder", "write_flight"]

FILE_VERSION: Final = 1
FLIGHT_FOLDER: Final = "mpidist-flight"
_MOMENT_SECONDS: Final = 10.0  # a rank's own file that is not older than this is not replaced
_STARTS: Final = ("SLURM_RESTART_COUNT", "MPIDIST_RESTARTS")  # how often Slurm and `mpidist run` have started it again


@final
class GroupFlight(NamedTuple):
    """The calls of one rank in one group. `process`: `"running"`, `"stopped"`, `"gone"` or `"unknown"`."""

    group: str
    rank: int
    size: int
    process: str
    pid: int
    entries: Sequence[FlightEntry]


def chosen_folder(environ: Mapping[str, str]) -> str | None:
    """Return the folder that holds the folders of jobs, by `MPIDIST_FLIGHT_DIR`; `None` for "off"."""
    text = environ.get("MPIDIST_FLIGHT_DIR", "").strip()
    return None if text.lower() == "off" else os.path.expanduser(text) or FLIGHT_FOLDER


def flight_folder(environ: Mapping[str, str], token: str) -> Path | None:
    """Choose the folder of a job's files, in `chosen_folder`, by the job's name, else `token`.

    Each attempt of one job has a folder: files of an earlier one would be taken for those of other ranks.
    """
    job, starts = environ.get("SLURM_JOB_ID"), [environ.get(name) or "0" for name in _STARTS]
    name = "-".join([job, *starts] if {*starts} != {"0"} else [job]) if job else token
    parent = chosen_folder(environ)
    try:
        return None if parent is None else Path(parent).absolute() / name
    except FileNotFoundError:  # the current folder is gone
        return None


def write_flight(
    folder: Path,
    world_rank: int,
    reason: str,
    groups: Sequence[GroupFlight],
    stack: Stack,
    written_by: int,
    end: BaseException | None = None,
) -> None:
    """Write the file of a rank, in place of an earlier one, in the folder, which is created if it does not exist.

    `written_by` is another rank of the node where the rank itself cannot write. `end`: what ends the rank's program;
    the rank leaves by an exception of its own, unless that follows from another rank's end.
    """
    wall = time.time() - time.monotonic()  # recorders have the monotonic clock of the node
    flights = [_group(flight, wall) for flight in groups]
    told: dict[str, Any] = {
        "version": FILE_VERSION,
        "world_rank": world_rank,
        "written_by": written_by,
        "host": socket.gethostname(),
        "time": time.time(),
        "reason": reason,
        "left": end is not None and not isinstance(end, (PeerFailedError, DeadlineExceededError)),
        "groups": flights,
        "stack": (stack.frames, stack.problem),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{world_rank}.json"
    follows = end is not None and any(flight.entries and flight.entries[-1].state == "failed" for flight in groups)
    if (written_by != world_rank or follows) and _has_just_written(path, world_rank):
        return  # the rank's own file says more than a neighbour's would, or the end of a program whose call failed
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(told))
    partial.replace(path)  # readers find a whole file


def _has_just_written(path: Path, rank: int) -> bool:
    """Whether a rank has written its own file, a moment ago."""
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return bool(told["written_by"] == rank and time.time() - told["time"] < _MOMENT_SECONDS)


def _group(flight: GroupFlight, wall: float) -> dict[str, Any]:
    calls = [
        [entry.sequence, entry.call, entry.details, entry.state, *(round(_wall(at, wall), 6) for at in entry[3:6])]
        for entry in flight.entries
    ]
    return {
        "group": flight.group,
        "rank": flight.rank,
        "size": flight.size,
        "process": flight.process,
        "calls": calls,
    }


def _wall(nanoseconds: int, wall: float) -> float:
    return abs(nanoseconds) / 1e9 + wall if nanoseconds else 0.0
