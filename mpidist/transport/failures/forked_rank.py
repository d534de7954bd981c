"""The end of a process that was forked from a rank, and not replaced by another program."""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType
from typing import final

from mpidist.transport.failures.exit_code import status_of, watch_exits
from mpidist.transport.mpi.child_process import is_forked_from_rank

__all__ = ["leave_mpi_to_parent"]


@final
class _Process:
    is_forked_from_rank = False
    status = 0  # the exit status of this process


def leave_mpi_to_parent() -> None:
    """Let this process end without ending MPI, if it has just been forked from a rank."""
    if is_forked_from_rank(os.environ):
        _Process.is_forked_from_rank, _Process.status = True, 0
        watch_exits(_note_exit)
        sys.excepthook = _note_failure


def _note_exit(error: SystemExit) -> None:
    _Process.status = status_of(error)


def _note_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _Process.status = 130 if issubclass(kind, KeyboardInterrupt) else 1
    sys.__excepthook__(kind, error, trace)


@atexit.register  # registered at import, so that it runs after the functions that the program registers
def _end_without_mpi() -> None:
    """End a forked process before mpi4py finalizes MPI in it, which would wait for the launcher of the rank."""
    if _Process.is_forked_from_rank:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_Process.status)
