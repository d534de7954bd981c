"""The flight recorders of a job, read from the files that its ranks wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from sys import intern
from typing import Any, Final, NamedTuple, final

from mpidist.transport.failures.flight_files import FILE_VERSION
from mpidist.transport.stacks import Frame, Stack

__all__ = ["Call", "FlightFile", "FlightFileError", "JobFlight", "RankFlight", "StrategyFlight", "find_job", "load_job"]

_FILE: Final = re.compile(r"rank-(\d+)\.json")
_NUMBERED: Final = 1 << 40  # calls from here on, and call 0, are not among those that all ranks count


class FlightFileError(Exception):
    """A folder without flight recorders, or a file that holds something else."""


@final
class Call(NamedTuple):
    """One call of a rank. Times in seconds since 1970; 0 for what has not happened."""

    sequence: int
    call: str
    details: str
    state: str
    begun: float
    agreed: float
    ended: float

    @property
    def is_numbered(self) -> bool:
        """Whether it is among the calls that all ranks count."""
        return 0 < self.sequence < _NUMBERED

    @property
    def name(self) -> str:
        """The call with its number, if it has one: `call 1041, all_reduce`."""
        return f"call {self.sequence}, {self.call}" if self.is_numbered else self.call


@final
class FlightFile(NamedTuple):
    """What a file says of its rank, beside the calls."""

    world_rank: int
    written_by: int
    host: str
    written: float
    reason: str
    stack: Stack


@final
class RankFlight(NamedTuple):
    """The calls of one rank in one strategy, oldest first, and the file that has them."""

    file: FlightFile
    process: str
    calls: list[Call]

    @property
    def last(self) -> Call | None:
        """The last call; `None` if there was none."""
        return self.calls[-1] if self.calls else None

    @property
    def number(self) -> int:
        """The number of the last call that has one; 0 if there was none."""
        return next((call.sequence for call in reversed(self.calls) if call.is_numbered), 0)


@final
class StrategyFlight(NamedTuple):
    """The ranks of one strategy that have a file, by their rank in the strategy; `size` counts the others, too."""

    group: str
    size: int
    ranks: dict[int, RankFlight]

    @property
    def missing(self) -> list[int]:
        """The ranks without a file."""
        return [rank for rank in range(self.size) if rank not in self.ranks]


@final
class JobFlight(NamedTuple):
    """The files of a job, by rank of the world, and its strategies."""

    folder: Path
    files: dict[int, FlightFile]
    strategies: list[StrategyFlight]


def find_job(folder: Path) -> Path:
    """Choose the folder of a job: the one given, or the newest one in it.

    Raises:
        FlightFileError: If neither has files.
    """
    if not folder.is_dir():
        raise FlightFileError(
            f"there is no folder {folder}: ranks write files there when a call fails, when a program crashes, or at a "
            "signal (MPIDIST_FLIGHT_SIGNAL, else SIGUSR1). Name the folder if it is another one, as with "
            "MPIDIST_FLIGHT_DIR"
        )
    if any(_files_in(folder)):
        return folder
    jobs = {job: [path.stat().st_mtime for path in _files_in(job)] for job in folder.iterdir() if job.is_dir()}
    times = {job: max(found) for job, found in jobs.items() if found}
    if not times:
        raise FlightFileError(f"{folder} has no files rank-N.json, and no folder of a job that has")
    return max(times, key=lambda job: (times[job], job.name))


def load_job(folder: Path) -> JobFlight:
    """Read the files of a job.

    Raises:
        FlightFileError: If one cannot be understood.
    """
    files: dict[int, FlightFile] = {}
    strategies: dict[str, StrategyFlight] = {}
    for path in sorted(_files_in(folder), key=_rank_in):
        try:
            content = json.loads(path.read_bytes())
            file = _file(content, _rank_in(path))
            for group in content["groups"]:
                _add_group(strategies, group, file)
        except (OSError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise FlightFileError(f"{path} cannot be understood: {type(error).__name__}: {error}") from error
        files[file.world_rank] = file
    return JobFlight(folder, files, sorted(strategies.values(), key=lambda strategy: (-strategy.size, strategy.group)))


def _files_in(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if _FILE.fullmatch(path.name))


def _rank_in(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _file(content: dict[str, Any], rank: int) -> FlightFile:
    version, world_rank = content["version"], content["world_rank"]
    if version != FILE_VERSION:
        raise ValueError(f"it has version {version}; this mpidist reads version {FILE_VERSION}")
    if world_rank != rank:
        raise ValueError(f"it says that it is of rank {world_rank}")
    frames, problem = content["stack"]
    stack = Stack(tuple(Frame(*frame) for frame in frames), problem)
    return FlightFile(rank, content["written_by"], content["host"], float(content["time"]), content["reason"], stack)


def _add_group(strategies: dict[str, StrategyFlight], content: dict[str, Any], file: FlightFile) -> None:
    group, rank, size = content["group"], int(content["rank"]), int(content["size"])
    strategy = strategies.setdefault(group, StrategyFlight(group, size, {}))
    if strategy.size != size:
        raise ValueError(f"{group} has {size} ranks, but {strategy.size} in other files")
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size} ranks")
    if rank in strategy.ranks:
        raise ValueError(f"rank {rank} of {group} is in another file, too")
    strategy.ranks[rank] = RankFlight(file, content["process"], [_call(*row) for row in content["calls"]])


def _call(sequence: int, call: str, details: str, state: str, *times: float) -> Call:
    begun, agreed, ended = map(float, times)
    # Equal texts once in memory: a large job has millions of calls.
    return Call(int(sequence), intern(call), intern(details), intern(state), begun, agreed, ended)
