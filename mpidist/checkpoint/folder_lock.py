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
from pathlib import Path
from tempfile import TemporaryFile
from threading import RLock, Thread
from typing import Final, NamedTuple, final

from mpidist.transport.failures.process_state import GONE, RUNNING, UNKNOWN, Process

__all__ = ["FolderLock", "release_all"]

logger = logging.getLogger("mpidist.checkpoint")

_BEAT_SECONDS: Final = 15.0  # between two signs of life
_GONE_SECONDS: Final = 120.0  # without one, a process of another machine counts as gone
_UNNAMED_SECONDS: Final = 5.0  # after which a file that names no owner counts as left by a process that was killed
_POLL_SECONDS: Final = 0.2
_JOBS: Final = {"SLURM_JOB_ID": "Slurm", "PBS_JOBID": "PBS", "LSB_JOBID": "LSF", "FLUX_JOB_ID": "Flux"}


@final
class _Owner(NamedTuple):
    """The process that holds a lock, as the file names it.

    Attributes:
        job: The job of a batch system, for people; "" if there is none.
        host: The name of its machine.
        boot: The random name that the machine's kernel got when it was started; "" where it is unknown.
        process: The process.
        since: When it took the lock, for people.
        token: A random name of the lock.
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
        return cls("".join(jobs[:1]), socket.gethostname(), _boot(), Process.own(), since, secrets.token_hex(8))

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
        if not self.boot or self.boot != _boot():
            return UNKNOWN
        return self.process.state(Process.own())


@final
class FolderLock:
    """A lock of this process. `hold` makes one.

    Attributes:
        path: The file.
        last_order: The number in the order of saves of what this process has saved last; 0 before.
        written: The numbers of the checkpoints that this process has saved.
        has_warned: Whether this process has warned of a number below those that are there.
        is_new: Whether this process has not cleaned up yet what earlier owners have left.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last_order, self.written = 0, set[int]()
        self.has_warned, self.is_new = False, True
        self._owner = _Owner.own()
        self._handle = -1
        self._num_holders = 0

    @classmethod
    def hold(cls, path: Path) -> FolderLock:
        """Hold a lock until `release`; a process may hold it several times.

        Raises:
            OSError: If another process holds it, or the file cannot be written.
        """
        with _mutex:
            lock = _held.setdefault(path, cls(path))
            lock._num_holders += 1
        try:
            lock.require()
        except BaseException:
            lock.release()
            raise
        _start_beating()
        return lock

    def require(self) -> None:
        """Take the lock, if this process does not have it, or not any more.

        Raises:
            OSError: If another process holds it, or the file cannot be written.
        """
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
            os.utime(self._handle)

    def remove_leftovers(self) -> None:
        """Remove what processes have left that were killed while they took a lock over."""
        for path in self.path.parent.iterdir():
            if path.name.startswith(f"{self.path.name}."):
                path.unlink(missing_ok=True)

    def _is_own(self) -> bool:
        found = _look(self.path)
        return found is not None and found.owner == self._owner

    def _make(self) -> bool:
        """Make the file, unless there is one."""
        try:
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return False
        with _mutex:
            self._close()
            self._handle = handle
        try:
            os.write(handle, json.dumps(self._owner._asdict()).encode())
            os.fsync(handle)
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
            handle, self._handle = self._handle, -1
            if handle >= 0:
                os.close(handle)


_held: Final[dict[Path, FolderLock]] = {}
_mutex: Final = RLock()
_beating: Final[list[Thread]] = []  # at most one


@final
class _Found(NamedTuple):
    """The file of a lock, at one time.

    Attributes:
        owner: Its owner; `None` if that cannot be told.
        changed: The time of the file, in nanoseconds of the clock of its file system.
    """

    owner: _Owner | None
    changed: int


def _look(path: Path) -> _Found | None:
    """Read the file of a lock; `None` if there is none. To open it lets network file systems ask their server."""
    try:
        with path.open("rb") as file:
            return _Found(_Owner.parse(file.read()), os.fstat(file.fileno()).st_mtime_ns)
    except FileNotFoundError:
        return None


def _is_gone(path: Path, first: _Found) -> bool:
    """Whether the owner of a lock is gone. Waits for a sign of life where nothing else can tell.

    Returns:
        False if the file has another owner meanwhile.

    Raises:
        OSError: If the owner lives.
    """
    owner = first.owner
    state = UNKNOWN if owner is None else owner.state
    limit = _UNNAMED_SECONDS if owner is None else _GONE_SECONDS
    left = limit - _age(path, first) if state == UNKNOWN else 0.0
    if owner is not None and left > 0:
        logger.warning("mpidist: waits at most %.0f s for a sign of life of another job (%s)", left, owner)
    until = time.monotonic() + left
    while state == UNKNOWN and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
        found = _look(path)
        if found is None or found.owner != owner:
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


def _age(path: Path, found: _Found) -> float:
    """Return how old the file of a lock is, in seconds of the clock of its file system."""
    with TemporaryFile(dir=path.parent) as probe:
        return (os.fstat(probe.fileno()).st_mtime_ns - found.changed) / 1e9


def _take_away(path: Path, found: _Found) -> None:
    """Remove the file of a lock whose owner is gone: at most one process does so, and removes no other lock."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        path.rename(aside)
    except FileNotFoundError:  # another process was faster
        return
    moved = _look(aside)
    if moved is not None and moved.owner != found.owner:  # a lock that another process has made meanwhile
        with suppress(FileNotFoundError):  # then its owner finds that the lock is gone
            aside.rename(path)
    else:
        aside.unlink(missing_ok=True)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _start_beating() -> None:
    if not _beating:
        _beating.append(Thread(target=_beat, name="mpidist.lock", daemon=True))
        _beating[0].start()


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
    _beating.clear()


os.register_at_fork(after_in_child=_forget)
