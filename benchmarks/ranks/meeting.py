"""The barrier before each step: counters in memory that all ranks of a group share, so it is the same for all."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

__all__ = ["Meeting"]

_LINE = 8  # numbers in a cache line: every rank's counter has one for itself
_SPINS = 2000


class Meeting:
    """A barrier of the ranks of one machine.

    A rank polls, and lets others run now and then: there may be fewer cores than ranks.

    Args:
        path: A file that all ranks of the group open.
        rank: This rank.
        size: How many ranks meet.
    """

    def __init__(self, path: Path, rank: int, size: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, 8 * _LINE * size)
        self._counters = memoryview(mmap.mmap(descriptor, 8 * _LINE * size)).cast("q")
        os.close(descriptor)
        self._mine, self._number = rank * _LINE, 0
        self._others = [other * _LINE for other in range(size) if other != rank]
        self._yields = size > len(os.sched_getaffinity(0))

    def wait(self, timeout_seconds: float = 600) -> None:
        """Return once every rank has come."""
        self._number += 1
        counters, number, spins = self._counters, self._number, 0
        counters[self._mine] = number
        for other in self._others:
            while counters[other] < number:
                spins += 1
                if self._yields or spins > _SPINS:
                    os.sched_yield()
                if spins % (50 * _SPINS) == 0:
                    timeout_seconds -= 0.1  # about; a rank that has died must not hold the others for ever
                    time.sleep(0.001)
                if timeout_seconds < 0:
                    raise TimeoutError("a rank did not come")
