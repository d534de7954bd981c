"""End of a job without MPI: a request to the launcher, the exit code in a file, and last lines on standard error."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from mpidist.transport.mpi.child_process import launcher_here
from mpidist.transport.mpi.launched_rank import LaunchedRank
from mpidist.transport.mpi.launcher_variables import HYDRA_LOCAL_SIZE, PMI_FD

__all__ = [
    "FAILED",
    "FORWARD_SECONDS",
    "LOST_RANK",
    "ask_launcher_to_abort",
    "exit_code_file",
    "flush_standard_streams",
    "mark_for_restarts",
    "rank_before_start",
    "rank_prefix",
    "store_code",
    "write_lines",
]

FAILED: Final = "-failed"  # the exit code 75 is that of a failure, not of a preemption
LOST_RANK: Final = "-lost"  # a rank fails because the process of another one is gone
_ANSWER_SECONDS: Final = 1.0
# How long a launcher may take to forward what a rank has written, before the rank ends.
FORWARD_SECONDS: Final = 0.2


def _current_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it is gone
        return ""


_FOLDER: Final = _current_folder()  # of the import: the program may leave it


def rank_before_start(environ: Mapping[str, str]) -> LaunchedRank | None:
    """Describe this process, if its launcher waits for ever when a process ends before it has started MPI, or `None`.

    MPICH's launcher, Hydra, and launchers built on Hydra wait. Those of Open MPI and Slurm end the job themselves, or
    have an option for it. `None`, too, if this process has started MPI or is a child of a rank.
    """
    if not environ.get(PMI_FD, "").isdecimal() or HYDRA_LOCAL_SIZE not in environ:
        return None
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        return None
    rank = LaunchedRank.of(environ)
    return rank if rank is not None and launcher_here() == os.getppid() else None


def ask_launcher_to_abort(environ: Mapping[str, str], code: int, is_connected: bool = False) -> None:
    """Make Hydra, if it is there, end all ranks with an exit code, as MPI_Abort does, by the protocol PMI-1. Local.

    `is_connected`: MPI has begun to start, and has connected to the launcher.
    """
    if HYDRA_LOCAL_SIZE not in environ:
        return
    with suppress(OSError, KeyError, ValueError), socket.socket(fileno=os.dup(int(environ[PMI_FD]))) as launcher:
        if not is_connected:
            launcher.settimeout(_ANSWER_SECONDS)
            launcher.sendall(b"cmd=init pmi_version=1 pmi_subversion=1\n")
            launcher.recv(256)
        launcher.sendall(f"cmd=abort exitcode={code}\n".encode())


def exit_code_file(environ: Mapping[str, str]) -> str:
    """Return the path in `MPIDIST_EXIT_CODE_FILE`, from where mpidist was imported; "" for none. Local."""
    path = os.path.expanduser(environ.get("MPIDIST_EXIT_CODE_FILE", "").strip())
    return path and os.path.join(_FOLDER, path)


def store_code(environ: Mapping[str, str], code: int) -> None:
    """Write the exit code of the job into the file `MPIDIST_EXIT_CODE_FILE`, unless a rank has written one. Local.

    The script that started the ranks reads the file, as srun returns a code of its own when Slurm kills the tasks.
    """
    path = exit_code_file(environ)
    if not path:
        return
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(file, f"{code}\n".encode())
        os.close(file)
    except OSError as error:  # the job must end nevertheless
        if error.errno != errno.EEXIST or os.path.isdir(path):  # else another rank has stored its code
            with suppress(OSError):
                why = "it is a folder" if os.path.isdir(path) else error.strerror
                write_lines(f"mpidist: MPIDIST_EXIT_CODE_FILE={path} cannot be written: {why}", "")


def mark_for_restarts(environ: Mapping[str, str], mark: str) -> None:
    """Make a file beside `MPIDIST_SAVED_FILE` that `mpidist run --max-restarts` looks for. Local."""
    path = environ.get("MPIDIST_SAVED_FILE", "")
    if path:
        with suppress(OSError):  # the job must end nevertheless
            open(f"{path}{mark}", "w").close()


def rank_prefix(rank: int) -> str:
    """Return what stands before every line of a rank of this host."""
    return f"[rank {rank} on {socket.gethostname()}] "


def flush_standard_streams() -> None:
    """Flush the program's output, if possible: the program may have closed or replaced its streams."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()


def write_lines(text: str, prefix: str) -> None:
    """Write lines to standard error, after the program's output."""
    flush_standard_streams()
    os.write(2, "".join(f"{prefix}{line}\n" for line in text.splitlines()).encode(errors="replace"))
