"""The flight recorders of a job, read from the files that its ranks wrote."""

from __future__ import annotations

import re
from pathlib import Path
from sys import intern
from typing import Any, Final, NamedTuple, TypeAlias, final

from mpidist.cli.job_files import StrategyFiles, find_newest, list_files, parse
from mpidist.cli.launching import RefusedError
from mpidist.transport.failures.flight_files import FILE_VERSION
from mpidist.transport.failures.status_board import RESET
from mpidist.transport.stacks import Frame, Stack

__all__ = ["Call", "FlightFile", "JobFlight", "RankFlight", "StrategyFlight", "load_job"]

_FILES: Final = re.compile(r"rank-(\d+)\.json")
_ADVICE: Final = (
    "ranks write files there when a call fails, when a program crashes, or at a signal (MPIDIST_FLIGHT_SIGNAL, else "
    "SIGUSR1). Name the folder if it is another one, as with MPIDIST_FLIGHT_DIR"
)


@final
class Call(NamedTuple):
    """One call of a rank. Times in seconds since 1970; 0 for an event that has not happened."""

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
        return 0 < self.sequence < RESET

    @property
    def name(self) -> str:
        """The call with its number, if it has one: `call 1041, all_reduce`."""
        return f"call {self.sequence}, {self.call}" if self.is_numbered else self.call


@final
class FlightFile(NamedTuple):
    """Content of a rank's file, without the calls. `has_left`: an exception of its own, the `reason`, ended it."""

    world_rank: int
    written_by: int
    host: str
    written: float
    reason: str
    stack: Stack
    has_left: bool


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


StrategyFlight: TypeAlias = StrategyFiles[RankFlight]


@final
class JobFlight(NamedTuple):
    """The files of a job, by rank of the world, and its strategies; `damaged` describes files that are left out."""

    folder: Path
    files: dict[int, FlightFile]
    strategies: list[StrategyFlight]
    damaged: dict[int, str]


def load_job(named: Path) -> JobFlight:
    """Read the files of a job, the newest one in a folder of several; leave out those that cannot be understood."""
    folder, _ = find_newest(named, _FILES, "rank-N.json", _ADVICE)
    files, damaged = dict[int, FlightFile](), dict[int, str]()
    strategies: dict[str, StrategyFlight] = {}
    for rank, path in list_files(folder, _FILES):
        try:
            content = parse(path.read_bytes(), FILE_VERSION)
            if content["world_rank"] != rank:
                raise ValueError(f"it belongs to rank {content['world_rank']}")
            frames, problem = content["stack"]
            stack = Stack(tuple(Frame(str(path), int(line), str(name)) for path, line, name in frames), str(problem))
            written, reason = float(content["time"]), str(content["reason"])
            told = content["written_by"], str(content["host"]), written, reason, stack
            file = FlightFile(rank, *told, content.get("left", False))
            groups = [_group(group, file, strategies) for group in content["groups"]]
        except (OSError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            damaged[rank] = f"{path} cannot be understood: {type(error).__name__}: {error}"
            continue
        files[rank] = file
        for one in groups:
            strategies.setdefault(one.group, one).ranks.update(one.ranks)
    if not files:
        raise RefusedError(next(iter(damaged.values())))
    found = sorted(strategies.values(), key=lambda strategy: (-strategy.size, strategy.group))
    return JobFlight(folder, files, found, damaged)


def _group(content: dict[str, Any], file: FlightFile, others: dict[str, StrategyFlight]) -> StrategyFlight:
    """Return the part of a strategy that a file has, if it fits the parts of `others`."""
    group, rank, size = str(content["group"]), int(content["rank"]), int(content["size"])
    flight = RankFlight(file, content["process"], [_call(*row) for row in content["calls"]])
    strategy = StrategyFiles(group, size, {rank: flight})
    if others.get(group, strategy).size != size:
        raise ValueError(f"{group} has {size} ranks, but {others[group].size} in other files")
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size} ranks")
    if group in others and rank in others[group].ranks:
        raise ValueError(f"rank {rank} of {group} is in another file, too")
    return strategy


def _call(sequence: int, call: str, details: str, state: str, *times: float) -> Call:
    begun, agreed, ended = map(float, times)
    # Equal texts once in memory: a large job has millions of calls.
    return Call(int(sequence), intern(call), intern(details), intern(state), begun, agreed, ended)
