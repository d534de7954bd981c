"""Leftovers of this user's ended jobs on this machine: shared memory, and folders of Open MPI's launcher."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple, final

from mpidist.cli.launching import first_of
from mpidist.transport.mpi.shared_files import SHARED_MEMORY
from mpidist.transport.text import count_text, size_text

__all__ = ["Leftover", "find_leftovers", "leftovers_text", "remove"]

# Names of files of MPI libraries, UCX below them, and mpidist, and of its folders. Nothing else may be removed.
_FILES: Final = re.compile(
    r"mpich_(shm|vci)_[0-9a-f]+_\d+|(mpich_shar_tmp|Intel_MPI_)\w{6}|ucx_shm_posix_[0-9a-f]+|open_mpi\.\d{4}"
    r"|mpidist-(copies-)?[0-9a-f]{16}|(sm_segment|vader_segment|osc_sm)(\.[\w-]+)+"
)
# Folders of Open MPI 5 and 4, below the one for temporary files; the number is that of the launcher's process.
_FOLDERS: Final = re.compile(r"ompi\.(\d+|[^/]+/pid\.\d+)")
_NEW_SECONDS: Final = 60.0  # how old a folder is at least: a launcher that starts may have nothing in it yet
_MOST_NAMES: Final = 3


@final
class Leftover(NamedTuple):
    """A file or a folder that no process uses, and the memory or disk space that it takes."""

    path: Path
    is_folder: bool
    nbytes: int


def find_leftovers() -> list[Leftover]:
    """List what ended jobs of this user have left. Local."""
    found = []
    for path in (*_matching(SHARED_MEMORY, "*", _FILES), *_matching(tempfile.gettempdir(), "ompi.*", _FOLDERS)):
        with suppress(FileNotFoundError):  # its job has just ended, or another `doctor` has removed it
            if path.lstat().st_uid == os.getuid() and _is_left(path):
                nbytes = sum(file.lstat().st_blocks * 512 for file in _files_of(path))
                found.append(Leftover(path, path.is_dir(), nbytes))
    return found


def remove(leftovers: Sequence[Leftover]) -> None:
    """Remove what still no process uses. Local."""
    for path, is_folder, _ in leftovers:
        with suppress(FileNotFoundError):
            if not is_folder:
                with _unused(path) as is_unused:
                    if is_unused:
                        path.unlink()
            elif _is_left(path):
                shutil.rmtree(path)
                if path.name.startswith("pid.") and not any(path.parent.iterdir()):
                    path.parent.rmdir()


def leftovers_text(leftovers: Sequence[Leftover]) -> str:
    """Name some of them, for people, with the space that all of them take."""
    num_folders = sum(one.is_folder for one in leftovers)
    counts = (len(leftovers) - num_folders, "file"), (num_folders, "folder")
    things = " and ".join(count_text(number, noun) for number, noun in counts if number)
    names = first_of([str(one.path) for one in leftovers], _MOST_NAMES)
    return f"{things}, {size_text(sum(one.nbytes for one in leftovers))} ({names})"


def _matching(folder: str, start: str, names: re.Pattern[str]) -> list[Path]:
    paths = [*Path(folder).glob(start), *Path(folder).glob(f"{start}/*")]
    matching = (path for path in paths if names.fullmatch(str(path.relative_to(folder))))
    return sorted(path for path in matching if not path.is_symlink())


def _is_left(path: Path) -> bool:
    """Whether no process uses a file, or any file of a folder whose launcher has ended."""
    if path.is_dir() and path.name.startswith(("ompi.", "pid.")):
        launcher, is_new = path.name.rpartition(".")[2], time.time() < path.lstat().st_mtime + _NEW_SECONDS
        if is_new or os.path.exists(f"/proc/{launcher}") or not (path / "0" / "0").is_dir():  # of job 0, the launcher
            return False
    for file in _files_of(path):
        with _unused(file) as is_unused:
            if not is_unused:
                return False
    return True


def _files_of(path: Path) -> list[Path]:
    return [file for file in (path.rglob("*") if path.is_dir() else [path]) if stat.S_ISREG(file.lstat().st_mode)]


@contextmanager
def _unused(path: Path) -> Iterator[bool]:
    """Yield whether no other process has a file open or mapped; none opens it during the body.

    A lease of the kernel proves it, for processes of all users and containers. Where it grants no leases, as on network
    file systems, files count as used.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # if another process opens the file: it does not end this one
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(file)
