"""The end of a process without MPI_Finalize: of a fork of a rank, and of a rank whose job has lost others."""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import sys
from contextlib import suppress
from typing import final

from mpidist.transport.failures.exit_code import end_at_once, status_of, watch_exits
from mpidist.transport.mpi.child_process import disconnect_from_launcher, is_forked_from_rank
from mpidist.transport.mpi.launcher_abort import flush_standard_streams

__all__ = ["end_without_mpi", "leave_mpi_to_parent", "note_status"]


@final
class _Process:
    is_forked_from_rank = False
    status = 0  # the exit status of this process


def leave_mpi_to_parent() -> None:
    """Make this process end without ending MPI, if it has just been forked from a rank."""
    if is_forked_from_rank(os.environ):
        disconnect_from_launcher(os.environ)
        _Process.is_forked_from_rank, _Process.status = True, 0
        watch_exits(_note_exit)


def end_without_mpi(watches: bool) -> None:
    """End this process without MPI_Finalize, where Open MPI sometimes waits for lost processes. Local.

    `watches`: nothing else calls `note_status` when the program ends by `SystemExit`.
    """
    vars(sys)["mpidist_end"] = _EndAtFinalization()  # the names in `sys` are cleared in the order in which they came
    if watches:
        watch_exits(_note_exit)


def note_status(status: int) -> None:
    """Store the exit status with which the program ends, if it is not 0."""
    _Process.status = status


def _note_exit(error: SystemExit) -> None:
    note_status(status_of(error))


@final
class _EndAtFinalization:
    """Ends the process when Python clears `sys`: after all functions that run at exit, and before mpi4py's."""

    def __init__(self) -> None:  # globals are gone by then
        self._is_ending, self._process, self._end = sys.is_finalizing, _Process, end_at_once
        self._collect, self._objects = gc.collect, gc.get_objects
        self._files = io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom  # not an ABC, which is gone, too
        self._flush_files_of_c, self._suppress = ctypes.CDLL(None).fflush, suppress

    def __del__(self) -> None:
        if not self._is_ending():
            return
        try:
            self._collect()
            for one in self._objects():
                with self._suppress(Exception):  # a file may be closed, and the object of a weak proxy gone
                    if isinstance(one, self._files):
                        one.flush()
            self._flush_files_of_c(None)
        finally:
            self._end(self._process.status)


@atexit.register  # registered at import, so that it runs after the functions that the program registers
def _end_without_mpi() -> None:
    """End a forked process before mpi4py finalizes MPI in it, which would wait for the launcher of the rank."""
    error = getattr(sys, "last_value", None)  # the exception that ends the program, whatever hook prints it
    if error is not None and not _Process.status:
        note_status(status_of(error))
    if _Process.is_forked_from_rank:
        flush_standard_streams()
        os._exit(_Process.status)
