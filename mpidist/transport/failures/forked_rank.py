"""The end of a process without MPI_Finalize: of a fork of a rank, and of a rank whose job has lost others."""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType
from typing import final

from mpidist.transport.failures.exit_code import end_at_once, status_of, watch_exits
from mpidist.transport.mpi.child_process import is_forked_from_rank

__all__ = ["end_without_mpi", "leave_mpi_to_parent", "note_status"]


@final
class _Process:
    is_forked_from_rank = False
    status = 0  # the exit status of this process


def leave_mpi_to_parent() -> None:
    """Let this process end without ending MPI, if it has just been forked from a rank."""
    if is_forked_from_rank(os.environ):
        _Process.is_forked_from_rank = True
        _watch_status()


def end_without_mpi(watches: bool) -> None:
    """Let this process end without MPI_Finalize, where Open MPI sometimes waits for processes that are lost. Local.

    Args:
        watches: Whether nothing else calls `note_status`.
    """
    vars(sys)["_mpidist_last"] = _Last()  # no module of ours is sure to be freed, as hooks refer to functions in it
    if watches:
        _watch_status()


def note_status(status: int) -> None:
    """Store the exit status with which the program ends, if it is not 0."""
    _Process.status = status


def _watch_status() -> None:
    _Process.status = 0
    watch_exits(lambda error: note_status(status_of(error)))
    sys.excepthook = _note_failure


def _note_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    note_status(130 if issubclass(kind, KeyboardInterrupt) else 1)
    sys.__excepthook__(kind, error, trace)


@final
class _Last:
    """Ends the process when Python frees `sys`: after all functions that run at exit, and before mpi4py's."""

    def __init__(self) -> None:
        self._is_ending, self._process, self._end = sys.is_finalizing, _Process, end_at_once  # globals end sooner

    def __del__(self) -> None:
        if self._is_ending():
            self._end(self._process.status)


@atexit.register  # registered at import, so that it runs after the functions that the program registers
def _end_without_mpi() -> None:
    """End a forked process before mpi4py finalizes MPI in it, which would wait for the launcher of the rank."""
    if _Process.is_forked_from_rank:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_Process.status)
