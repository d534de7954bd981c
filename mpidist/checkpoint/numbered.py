"""Numbered checkpoints in a folder, in the order in which they were saved."""

from __future__ import annotations

import logging
import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple, final

from mpidist.checkpoint.files import MANIFEST, existing, find, read_manifest, withdraw
from mpidist.checkpoint.folder_lock import FolderLock
from mpidist.errors import DataLossError

__all__ = ["MAX_DIGITS", "NumberedCheckpoints", "Retention"]

logger = logging.getLogger("mpidist.checkpoint")

MAX_DIGITS: Final = 18  # of a number


@final
class Retention(NamedTuple):
    """Which checkpoints are not removed when they are old.

    Attributes:
        max_to_keep: How many that were saved last are not old; `None` for all.
        every_n_steps: Those whose number is a multiple of it stay; `None` for none.
        every_n_hours: Of old ones the first stays, and each that was saved so many hours after the one before that
            stays; `None` for none.
    """

    max_to_keep: int | None
    every_n_steps: int | None = None
    every_n_hours: float | None = None

    def stays(self, number: int) -> bool:
        """Whether a checkpoint stays for its number."""
        return self.every_n_steps is not None and number % self.every_n_steps == 0


@final
class NumberedCheckpoints:
    """The checkpoints with one name in a folder.

    Args:
        directory: The folder.
        name: How their names begin.

    Attributes:
        directory: As given.
        names: Their names: a regular expression.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self._name = directory, name
        self.names = rf"{re.escape(name)}-(0|[1-9]\d{{0,{MAX_DIGITS - 1}}})"

    @property
    def lock_path(self) -> Path:
        """The file of the folder's lock."""
        return self.directory / f".{self._name}.lock"

    def place(self, number: int) -> Path:
        """Return where a checkpoint is."""
        return self.directory / f"{self._name}-{number}"

    def orders(self) -> dict[int, int]:
        """Return which save each checkpoint was, by number, that which was saved last at the end. Local.

        The manifest says it. One that cannot be read stands behind that of the number before it; those of the first
        format, which do not say it, stand before all others, by their numbers.
        """
        keys, before = [], 0
        for number in sorted(int(name.rpartition("-")[2]) for name in find(self.directory, self.names)):
            order = _order_of(existing(self.place(number)))
            before = before if order is None else order
            keys.append((before, number))
        return {number: order for order, number in sorted(keys)}

    def numbers(self) -> list[int]:
        """Return the numbers of the checkpoints, that which was saved last at the end. Local."""
        return list(self.orders())

    def choose(self, given: int | None, lock: FolderLock) -> tuple[int, int]:
        """Choose the number of the next checkpoint, and which save it is. Warns once of larger numbers of other runs.

        Args:
            given: The number, if the program has chosen it.
            lock: The lock of the folder, which this process holds.

        Raises:
            ValueError: If there is no larger number.
        """
        orders = self.orders()
        number = max(orders, default=0) + 1 if given is None else given
        if number >= 10**MAX_DIGITS:
            raise ValueError(f"{self.directory} has no number left for {self._name}: pass one")
        larger = [other for other in orders if other > number and other not in lock.written]
        if larger and not lock.has_warned:
            lock.has_warned = True
            logger.warning(
                "mpidist: %s is saved below %s, which this run has not saved: from now on the one that was saved last "
                "is the newest, whatever its number",
                self.place(number),
                self.place(max(larger)).name,
            )
        lock.last_order = max([lock.last_order, *orders.values()]) + 1
        lock.written.add(number)
        return number, lock.last_order

    def remove_old(self, newest: int, retention: Retention) -> None:
        """Remove the checkpoints that were saved first, if there are too many; never one of them.

        Args:
            newest: The number of the one that was saved now.
            retention: Which ones stay.
        """
        if retention.max_to_keep is None:
            return
        numbers = self.numbers()
        others = [number for number in numbers if number != newest and not retention.stays(number)]
        old = set(others[: max(len(others) + 1 - retention.max_to_keep, 0)])
        last_hours = -math.inf
        for number in numbers:
            hours = _saved_seconds(self.place(number)) / 3600
            if number in old and not (retention.every_n_hours and hours - last_hours >= retention.every_n_hours):
                withdraw(self.place(number))
            else:
                last_hours = hours


def _saved_seconds(place: Path) -> float:
    """Return when a checkpoint was saved, in seconds since 1970; 0 if its manifest is missing."""
    try:
        return (place / MANIFEST).stat().st_mtime
    except OSError:
        return 0.0


def _order_of(place: Path) -> int | None:
    """Return which save a checkpoint was; 0 if its format does not say it; `None` if it cannot be read."""
    try:
        about = (place / MANIFEST).stat()
        return _read_order(place, about.st_ino, about.st_mtime_ns)
    except (OSError, DataLossError):
        return None


@lru_cache(4096)
def _read_order(place: Path, inode: int, changed: int) -> int:
    """Read a manifest, unless the file has been read before."""
    order: int = read_manifest(place).get("order", 0)
    return order
