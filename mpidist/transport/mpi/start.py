"""MPI_Init, which waits for all ranks of the job: watched, so that the wait is neither silent nor endless."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final, final

from mpidist.transport.mpi.launched_rank import LaunchedRank
from mpidist.transport.mpi.launcher_abort import (
    FORWARD_SECONDS,
    ask_launcher_to_abort,
    rank_prefix,
    store_code,
    write_lines,
)
from mpidist.transport.settings import Settings
from mpidist.transport.tracebacks import stack_text

__all__ = ["start_mpi"]

logger = logging.getLogger("mpidist.transport")

_EXIT_CODE: Final = 1
# Processes of a job start at different times: until then no rank is called late, and no deadline ends the job.
_LEAST_STALL_SECONDS: Final = 5.0
_LEAST_TIMEOUT_SECONDS: Final = 10.0
# The ranks of a node reach the deadline together. One says why, and the launcher has this time to end the others.
_FOLLOW_SECONDS: Final = 2.0


def start_mpi(mpi: ModuleType, thread_level: int, errors: str, environ: Mapping[str, str]) -> None:
    """Start MPI, and watch the wait for the other ranks. Collective.

    mpi4py holds Python's lock while MPI starts, so no other thread could watch; a call through ctypes releases it. If
    ctypes does not find the library's function, or no other rank is awaited, mpi4py starts MPI.
    """
    rank = LaunchedRank.of(environ)
    settings = Settings.or_default(environ)
    is_watched = settings.stall_seconds or settings.timeout_seconds
    init = None if rank is None or not is_watched or errors != "exception" else _init_function(mpi)
    if rank is None or init is None:
        mpi.Init_thread(thread_level)
        return
    with _Watch(rank, settings):
        code = init(None, None, thread_level, ctypes.byref(ctypes.c_int()))
    if code:
        raise RuntimeError(f"MPI_Init_thread failed on rank {rank.rank} with error code {code}")
    for comm in (mpi.COMM_SELF, mpi.COMM_WORLD):  # as mpi4py does, so that errors of MPI become exceptions
        comm.Set_errhandler(mpi.ERRORS_RETURN)


def _init_function(mpi: ModuleType) -> Callable[..., Any] | None:
    """Find MPI_Init_thread of the very library that mpi4py calls; `None` if the function is hidden."""
    try:
        function: Callable[..., Any] = ctypes.CDLL(mpi.__file__).MPI_Init_thread
    except (OSError, AttributeError, TypeError):
        return None
    return function


@final
class _Watch:
    """A thread that watches the time while the main thread waits in MPI_Init."""

    def __init__(self, rank: LaunchedRank, settings: Settings) -> None:
        self._rank, self._settings = rank, settings
        self._is_over = threading.Event()
        self._begun = time.monotonic()
        self._waiting = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="mpidist-start", daemon=True)

    def __enter__(self) -> None:
        self._sign = self._rank.arrive()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._sign.close()

    def _watch(self) -> None:
        stall, timeout = self._settings.stall_seconds, self._settings.timeout_seconds
        if stall and (timeout is None or stall < max(timeout, _LEAST_TIMEOUT_SECONDS)):
            if self._is_over.wait(max(stall, _LEAST_STALL_SECONDS)):
                return
            if self._is_speaker() and not self._rank.have_all_come():
                logger.warning("mpidist: %s", self._text())
        if timeout is None:
            return
        until = self._begun + max(timeout, _LEAST_TIMEOUT_SECONDS)
        if self._is_over.wait(max(0.0, until - time.monotonic())):
            return
        if not self._is_speaker() and self._is_over.wait(_FOLLOW_SECONDS):
            return
        self._end()

    def _is_speaker(self) -> bool:
        return self._rank.rank == self._rank.arrived()[0]

    def _text(self) -> str:
        waited = time.monotonic() - self._begun
        return f"starting MPI on rank {self._rank.rank} has waited {waited:.0f} s, and {self._rank.missing()}"

    def _end(self) -> None:
        """Report where the program waits, and end it: the launcher then ends the job."""
        where = stack_text(sys._current_frames()[self._waiting])
        text = (
            f"Traceback (most recent call last):\n{where}mpidist.errors.DeadlineExceededError: {self._text()}. Every "
            "rank must come to build its first strategy; see which rank's program has ended, or does not come this far"
        )
        write_lines(text, rank_prefix(self._rank.rank))
        store_code(os.environ, _EXIT_CODE)
        time.sleep(FORWARD_SECONDS)
        ask_launcher_to_abort(os.environ, _EXIT_CODE, is_connected=True)
        time.sleep(FORWARD_SECONDS)
        os._exit(_EXIT_CODE)
