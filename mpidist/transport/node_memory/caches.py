"""The last-level cache of this rank's processors."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["shared_cache"]

_PROCESSORS: Final = Path("/sys/devices/system/cpu")


def shared_cache(processors: Iterable[int] | None = None, folder: Path = _PROCESSORS) -> str:
    """Name the last-level cache of the processors that this process may run on; "" if they share none, or unknown.

    The name is the system's list of the processors with that cache. `folder`: that of the system's files.
    """
    with suppress(OSError, ValueError):  # a system that does not show its caches
        own = os.sched_getaffinity(0) if processors is None else {*processors}
        caches = (folder / f"cpu{min(own)}" / "cache").glob("index*")
        last = max(caches, key=lambda cache: int((cache / "level").read_text()))
        name = (last / "shared_cpu_list").read_text().strip()
        if own <= _numbers(name):
            return name
    return ""


def _numbers(text: str) -> set[int]:
    """Return the numbers of a list such as `0-3,8`."""
    ranges = [part.partition("-") for part in text.split(",")]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}
