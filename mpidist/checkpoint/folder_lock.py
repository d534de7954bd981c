"""The lock of a folder of checkpoints: a file that names the process which writes there, and refuses all others.

The file is made by an exclusive open, which is atomic on network file systems, too. Its owner shows that it lives by a
new time of the file now and then. So the lock of a process that is gone is recognised from the same machine at once,
and from another one by a time that does not change.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import socket
import time
from contextlib import suppress
from functools import cache
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile
from threading import RLock, Thread
from typing import Final, NamedTuple, final

from mpidist.transport.failures.status_board import GONE, RUNNING, UNKNOWN, Process
from mpidist.transport.trace.clocks import name_clock

__all__ = ["FolderLock", "release_all"]

logger = logging.getLogger("mpidist.checkpoint")

_BEAT_SECONDS: Final = 15.0  # between two signs of life
_GONE_SECONDS: Final = 120.0  # without one, a process of another machine counts as gone
_UNNAMED_SECONDS: Final = 5.0  # after which a file that names no owner counts as left by a process that was killed
_POLL_SECONDS: Final = 0.2
_JOBS: Final = {"SLURM_JOB_ID": "Slurm", "PBS_JOBID": "PBS", "LSB_JOBID": "LSF", "FLUX_JOB_ID": "Flux"}


@final
class _Owner(NamedTuple):
    """The process that holds a lock, as the file names it: `job`, `host` and `since` for people, `token` a random name.

    `boot` is the random name that the machine's kernel got when it was started; `host` where it is unknown.
    """

    job: str
    host: str
    boot: str
    process: Process
    since: str
    token: str

    @classmethod
    def own(cls) -> _Owner:
        """Describe the calling process."""
        jobs = [f"{system} job {os.environ[name]}" for name, system in _JOBS.items() if os.environ.get(name)]
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls("".join(jobs[:1]), socket.gethostname(), name_clock(), Process.own(), since, secrets.token_hex(8))

    @classmethod
    def parse(cls, text: bytes) -> _Owner | None:
        """Read an owner; `None` from a file that its owner has not written yet, or that is damaged."""
        try:
            fields = json.loads(text)
            return cls(**{**fields, "process": Process(*fields["process"])})
        except (ValueError, TypeError, KeyError):
            return None

    def __str__(self) -> str:
        parts = [self.job, f"host {self.host}", f"process {self.process.pid}", f"since {self.since}"]
        return ", ".join(part for part in parts if part)

    @property
    def state(self) -> str:
        """The state of the process: that of `Process.state`, `UNKNOWN` on other machines."""
        return self.process.state(Process.own()) if self.boot == name_clock() else UNKNOWN


@final
class FolderLock:
    """A lock of this process. `hold` makes one.

    It remembers what this process saved: the numbers in `written`, the last place in the order of saves, and whether it
    `has_warned` of lower numbers. `is_new` until leftovers of earlier owners are cleaned up.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last_order, self.written = 0, set[int]()
        self.has_warned, self.is_new = False, True
        self._owner = _Owner.own()
        self._file: FileIO | None = None
        self._num_holders = 0

    @classmethod
    def hold(cls, path: Path) -> FolderLock:
        """Hold a lock until `release`, perhaps several times. Raises `OSError` if another process holds it."""
        with _mutex:
            lock = _held.setdefault(path, cls(path)).held_again()
        try:
            lock.require()
        except BaseException:
            lock.release()
            raise
        _start_beating()
        return lock

    def held_again(self) -> FolderLock:
        """Hold a lock that is held until another `release`."""
        with _mutex:
            self._num_holders += 1
        return self

    def require(self) -> None:
        """Take the lock, if this process does not have it, or not any more. An `OSError` names another owner."""
        while not self._is_own() and not self._make():
            found = _look(self.path)
            if found is not None and _is_gone(self.path, found):
                _take_away(self.path, found)
                self.is_new = True

    def release(self) -> None:
        """Give up one hold; the last one removes the file."""
        with _mutex:
            self._num_holders -= 1
            if self._num_holders == 0:
                _held.pop(self.path, None)
                self._remove()

    def beat(self) -> None:
        """Show that this process lives."""
        with _mutex, suppress(OSError):  # the file was removed on another machine, or its server does not answer
            if self._file is not None:
                os.utime(self._file.fileno())

    def remove_leftovers(self) -> None:
        """Remove what processes have left that were killed while they took a lock over."""
        for path in self.path.parent.iterdir():
            if path.name.startswith(f"{self.path.name}."):
                path.unlink(missing_ok=True)

    def _is_own(self) -> bool:
        found = _look(self.path)
        return found is not None and found[0] == self._owner

    def _make(self) -> bool:
        """Make the file, unless there is one."""
        try:
            file = self.path.open("xb", buffering=0)
        except FileExistsError:
            return False
        with _mutex:
            self._close()
            self._file = file
        try:
            file.write(json.dumps(self._owner._asdict()).encode())
            os.fsync(file)
        except OSError:
            self.path.unlink()
            raise
        return True

    def _remove(self) -> None:
        with suppress(OSError):  # the folder is gone, or can no longer be written: a later job finds out
            if self._is_own():
                self.path.unlink()
        self._close()

    def _close(self) -> None:
        with _mutex:
            if self._file is not None:
                self._file.close()
            self._file = None


_held: Final[dict[Path, FolderLock]] = {}
_mutex: Final = RLock()


# The file of a lock, at one time: its owner, if that can be told, and the time of the file in nanoseconds.
_Found = tuple[_Owner | None, int]


def _look(path: Path) -> _Found | None:
    """Read the file of a lock; `None` if there is none. Opening it makes network file systems query their server."""
    try:
        with path.open("rb") as file:
            return _Owner.parse(file.read()), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _is_gone(path: Path, first: _Found) -> bool:
    """Whether the owner of a lock is gone, and the file is still the owner's; raises `OSError` if the owner lives.

    Waits for a sign of life where nothing else can tell.
    """
    owner, changed = first
    state = UNKNOWN if owner is None else owner.state
    limit = _UNNAMED_SECONDS if owner is None else _GONE_SECONDS
    left = limit - _age(path, changed) if state == UNKNOWN else 0.0
    if owner is not None and left > 0:
        logger.warning("mpidist: waits at most %.0f s for a sign of life of another job (%s)", left, owner)
    until = time.monotonic() + left
    while state == UNKNOWN and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
        found = _look(path)
        if found is None or found[0] != owner:
            return False
        state = UNKNOWN if found == first else RUNNING
    if state not in (UNKNOWN, GONE):
        raise OSError(
            f"another job ({owner}) writes to this folder, {str(path.parent)!r}, so nothing was saved: end that job, "
            f"or save to another folder. If it is over, remove {str(path)!r}"
        )
    who = "that was killed while it made it" if owner is None else f"({owner}), which is gone"
    logger.warning("mpidist: takes over the lock %s of another job %s", path, who)
    return True


def _age(path: Path, changed: int) -> float:
    """Return how old the file of a lock is, in seconds of the clock of its file system."""
    with TemporaryFile(dir=path.parent) as probe:
        return (os.fstat(probe.fileno()).st_mtime_ns - changed) / 1e9


def _take_away(path: Path, found: _Found) -> None:
    """Remove the file of a lock whose owner is gone: at most one process does so, and removes no other lock."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        path.rename(aside)
    except FileNotFoundError:  # another process was faster
        return
    moved = _look(aside)
    if moved is not None and moved[0] != found[0]:  # a lock that another process has made meanwhile
        with suppress(FileNotFoundError):  # then its owner finds that the lock is gone
            aside.rename(path)
    else:
        aside.unlink(missing_ok=True)


@cache
def _start_beating() -> None:
    """Start the thread that shows that this process lives, once."""
    Thread(target=_beat, name="mpidist.lock", daemon=True).start()


def _beat() -> None:
    while True:
        time.sleep(_BEAT_SECONDS)
        for lock in tuple(_held.values()):
            lock.beat()


@atexit.register
def release_all() -> None:
    """Release all locks, as this process ends."""
    while _held:
        _held.popitem()[1]._remove()


def _forget() -> None:
    """Leave all locks to the parent of a process that was forked."""
    _held.clear()
    _start_beating.cache_clear()


os.register_at_fork(after_in_child=_forget)
