"""The files that the ranks of a job write, one for each rank: where they are, and how they begin."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, final

from mpidist.cli.launching import RefusedError

__all__ = ["StrategyFiles", "find_newest", "list_files", "parse"]

T = TypeVar("T")


@final
@dataclass(frozen=True)
class StrategyFiles(Generic[T]):
    """The ranks of one strategy that have a file, by their rank in the strategy; `size` counts the others, too."""

    group: str
    size: int
    ranks: dict[int, T]

    @property
    def missing(self) -> list[int]:
        """The ranks without a file."""
        return [rank for rank in range(self.size) if rank not in self.ranks]


def find_newest(folder: Path, names: re.Pattern[str], example: str, advice: str) -> tuple[Path, int]:
    """Choose the folder of a job, the one given or the newest one in it, and count the others."""
    if not folder.exists():
        raise RefusedError(f"there is no folder {folder}: {advice}")
    if not folder.is_dir():
        raise RefusedError(f"{folder} is no folder; name its folder, {folder.parent}")
    if list_files(folder, names):
        return folder, 0
    found = {job: list_files(job, names) for job in folder.iterdir() if job.is_dir()}
    times = {job: max(path.stat().st_mtime for _, path in files) for job, files in found.items() if files}
    if not times:
        raise RefusedError(f"{folder} has no files {example}, and no folder that has")
    return max(times, key=lambda job: (times[job], job.name)), len(times) - 1


def list_files(folder: Path, names: re.Pattern[str]) -> list[tuple[int, Path]]:
    """Return the ranks and files of a folder, in order; the first group of `names` is the rank."""
    matches = ((names.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def parse(text: bytes, version: int) -> Any:
    """Read JSON that begins a file; a `ValueError` if another version of mpidist wrote it."""
    content = json.loads(text)
    if content["version"] != version:
        raise ValueError(f"it has version {content['version']}; this mpidist reads version {version}")
    return content
