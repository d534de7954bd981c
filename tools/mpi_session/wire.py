"""The events which the ranks write and the outer session reads: a file per rank, a JSON line per event."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

Event = dict[str, Any]


@dataclass
class Orders:
    """What the outer session tells the ranks of one launch."""

    ranks: list[int]
    grace: float
    num_lanes: int = 0
    lane: int = 0
    maxfail: int = 0
    done: list[str] = field(default_factory=list)

    def write(self, directory: Path) -> None:
        """Write the orders into the folder of a launch."""
        (directory / "orders.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, directory: Path) -> Orders:
        """Read the orders from the folder of a launch."""
        return cls(**json.loads((directory / "orders.json").read_text()))


def note_exit(directory: Path, pid: int, status: int) -> None:
    """Add a line to the list of the rank processes that have ended, the first first."""
    with (directory / "exits").open("a") as file:
        file.write(f"{pid} {status}\n")


def exits(directory: Path) -> list[tuple[int, int]]:
    """Return (process id, exit status or minus signal) of the rank processes that have ended, in order."""
    path = directory / "exits"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(pid), int(status)) for pid, status in map(str.split, lines)]


class Writer:
    """Appends one rank's events to its file."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._file = (directory / f"rank{rank}.jsonl").open("w", buffering=1)

    def send(self, event: str, **data: Any) -> None:
        """Write one event as one line."""
        self._file.write(json.dumps({"event": event, **data}, default=str) + "\n")


class Reader:
    """Reads the events of all ranks as they come."""

    def __init__(self, directory: Path, size: int) -> None:
        self._paths = [directory / f"rank{rank}.jsonl" for rank in range(size)]
        self._files: dict[int, BinaryIO] = {}
        self._begun = [b""] * size

    def new_events(self) -> Iterator[tuple[int, Event]]:
        """Yield (rank, event) for all that was written since the last call."""
        for rank, path in enumerate(self._paths):
            if rank not in self._files:
                if not path.exists():
                    continue
                self._files[rank] = path.open("rb")
            *lines, self._begun[rank] = (self._begun[rank] + self._files[rank].read()).split(b"\n")
            for line in lines:
                yield rank, json.loads(line)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
