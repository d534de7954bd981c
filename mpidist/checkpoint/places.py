"""Where a checkpoint is saved: rank 0 locks the place, chooses the number, and makes the folder that is written."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from mpidist.checkpoint.files import clean_up, make_unfinished, publish, remove
from mpidist.checkpoint.folder_lock import FolderLock
from mpidist.checkpoint.numbered import NumberedCheckpoints, Retention

__all__ = ["Chosen", "NumberedPlace", "OnePlace", "SavePlace"]

_unfinished: Final[set[Path]] = set()  # the folders that this process writes


@final
class Chosen(NamedTuple):
    """What rank 0 has chosen for a save, for all ranks.

    Attributes:
        number: The number of the checkpoint; `None` if it has none.
        folder: The name of the folder that is written, beside the place.
        about: What the manifest says of the save.
    """

    number: int | None
    folder: str
    about: dict[str, Any]


class SavePlace(ABC):
    """The place of one save. What is private is rank 0's.

    Attributes:
        path_text: What ranks compare, for people.
    """

    path_text: str
    _lock: FolderLock | None = None
    _folder: Path | None = None
    _replaces = False

    @abstractmethod
    def path(self, number: int | None) -> Path:
        """Return the place, as this rank sees it now, whatever the current folder will be."""

    @abstractmethod
    def choose(self) -> Chosen:
        """Lock the place, and make the folder that is written. On rank 0.

        Raises:
            OSError: If another job writes there, or the folder cannot be made.
        """

    def finish(self, number: int | None) -> None:  # noqa: B027
        """Do what comes after a save. On rank 0, before `release`."""

    @final
    def publish(self, place: Path, about: dict[str, Any], parts: list[str]) -> None:
        """Move the folder to the place, if the lock is still this process's. On rank 0."""
        assert self._lock is not None
        assert self._folder is not None
        self._lock.require()
        publish(self._folder, place, about, parts, self._replaces)

    @final
    def discard(self) -> None:
        """Remove the folder that is written, if there is one: the disk may be full. Of no effect on other ranks."""
        if self._folder is not None:
            with suppress(OSError):  # the error of the save says more
                remove(self._folder)

    @final
    def release(self) -> None:
        """Release the lock. Of no effect on other ranks."""
        if self._folder is not None:
            _unfinished.discard(self._folder)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @final
    def _take(self, lock_path: Path, names: str) -> FolderLock:
        """Hold the lock, and clean up what earlier owners have left."""
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        lock = self._lock = FolderLock.hold(lock_path)
        if lock.is_new:
            lock.remove_leftovers()
            clean_up(lock_path.parent, names, _unfinished)
            lock.is_new = False
        return lock

    @final
    def _make_folder(self, place: Path) -> str:
        self._replaces = place.exists()
        self._folder = make_unfinished(place)
        _unfinished.add(self._folder)
        return self._folder.name


@final
class OnePlace(SavePlace):
    """A path that the program has chosen.

    Args:
        path: The path.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.path_text = path, str(path)

    def path(self, number: int | None) -> Path:
        """See `SavePlace`."""
        return self._path.resolve()

    def choose(self) -> Chosen:
        """See `SavePlace`."""
        place = self.path(None)
        self._take(place.with_name(f".{place.name}.lock"), re.escape(place.name))
        return Chosen(None, self._make_folder(place), {})


@final
class NumberedPlace(SavePlace):
    """A number in a folder of numbered checkpoints.

    Args:
        checkpoints: Those in the folder; its path is absolute.
        number: The number; `None` for one more than the largest.
        retention: Which checkpoints are kept.
        path_text: As in `SavePlace`.
        keep_lock: Called on rank 0 when the lock is held.
    """

    def __init__(
        self,
        checkpoints: NumberedCheckpoints,
        number: int | None,
        retention: Retention,
        path_text: str,
        keep_lock: Callable[[Path], None],
    ) -> None:
        self._checkpoints, self._number, self._retention = checkpoints, number, retention
        self.path_text, self._keep_lock = path_text, keep_lock

    def path(self, number: int | None) -> Path:
        """See `SavePlace`."""
        assert number is not None
        return self._checkpoints.place(number).resolve()

    def choose(self) -> Chosen:
        """See `SavePlace`."""
        checkpoints = self._checkpoints
        lock = self._take(checkpoints.lock_path, checkpoints.names)
        self._keep_lock(lock.path)
        number, order = checkpoints.choose(self._number, lock)
        return Chosen(number, self._make_folder(self.path(number)), {"number": number, "order": order})

    def finish(self, number: int | None) -> None:
        """See `SavePlace`."""
        assert number is not None
        self._checkpoints.remove_old(number, self._retention)
