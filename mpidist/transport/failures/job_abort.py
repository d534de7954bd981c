"""End of a job when the program of a rank fails: the error is printed once, and the job aborted."""

from __future__ import annotations

import faulthandler
import logging
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Final, NamedTuple, final

from mpidist.transport.failures.exit_code import status_of, watch_exits, watch_immediate_exits, where_raised
from mpidist.transport.failures.process_end import note_status
from mpidist.transport.mpi.error_output import FORWARD_SECONDS, rank_prefix, write_lines
from mpidist.transport.mpi.launcher_abort import FAILED, mark_for_restarts, store_code
from mpidist.transport.shared_errors import following_of, has_left, is_shared
from mpidist.transport.text import text_of
from mpidist.transport.tracebacks import traceback_text

__all__ = [
    "EXIT_CODE_AFTER_FAILURE",
    "Job",
    "end_job",
    "install",
    "install_before_start",
    "is_of_first_rank",
    "register_job",
    "release_signal",
    "store_code_before_start",
    "uninstall",
    "write_line",
    "write_traceback",
]

logger = logging.getLogger("mpidist.transport")

EXIT_CODE_AFTER_FAILURE: Final = 75  # of a program that ends after a failed call, when other ranks cannot end with it
_EXIT_CODE: Final = 1
_INTERRUPTED: Final = 130
_LOWER_RANK_FIRST_SECONDS: Final = 0.5
_ACKNOWLEDGE_SECONDS: Final = 2.0  # how long the other ranks may take to raise the error of this one
_FOLLOW_SECONDS: Final = 6.0  # how long the rank that failed first may take to end the job
_ABORT_SECONDS: Final = 3.0  # how long MPI_Abort may take
_RESERVE_BYTES: Final = 8 << 20  # what printing an error and MPI_Abort need, where the program has left nothing


@final
class Job(NamedTuple):
    """The callbacks that end a job.

    Attributes:
        abort: Ends all ranks with an exit code: `MPI_Abort`.
        save_flights: Writes flight recorders to files. The arguments: why, and the exception that ends this
            rank's program; `None` where it still runs.
        is_thread_of_a_group: Whether other ranks may wait for this thread, or it has left a group without them.
        may_lower_rank_have_ended: Whether a lower rank has reported to this rank that it fails, too, or cannot.
        have_others_acknowledged: Whether all other ranks have answered that this one has failed.
        leave: Leaves all groups because of an exception, if the other ranks go on without this rank. Returns whether
            they do.
        finish: Finishes what must not be lost, such as files that a thread writes.
    """

    abort: Callable[[int], None]
    rank: int
    hostname: str
    tell_end: Callable[[str], None]
    save_flights: Callable[[str, BaseException | None], str]
    is_thread_of_a_group: Callable[[], bool]
    may_lower_rank_have_ended: Callable[[], bool]
    have_others_acknowledged: Callable[[], bool]
    leave: Callable[[BaseException], bool]
    finish: Callable[[], None]

    @property
    def prefix(self) -> str:
        """Prefix of every line of this rank."""
        return rank_prefix(self.rank, self.hostname)


_jobs: list[Job] = []  # at most one
_reserve: Final = mmap.mmap(-1, _RESERVE_BYTES, flags=mmap.MAP_PRIVATE)  # untouched: addresses, and no memory
_saving: list[int] = []  # the signal whose handler runs
_undo: list[Callable[[], None]] = []  # undoes `install`


def register_job(job: Job) -> None:
    """Store the callbacks, so that `end_job` can abort the job."""
    _jobs[:] = [job]


def write_line(text: str) -> None:
    """Write a line to standard error, with this rank's name in front, if there are several."""
    write_lines(f"{text}\n", _jobs[0].prefix if _jobs else "")


def write_traceback(error: BaseException) -> None:
    """Write the traceback of this rank's exception to standard error, with this rank's name in front."""
    write_lines(traceback_text(error), _jobs[0].prefix)


def is_of_first_rank() -> bool:
    """Whether this process is rank 0 of the job, or no job."""
    return not _jobs or _jobs[0].rank == 0


def install(job: Job, flight_signal: str | None, tell_of_immediate_exit: Callable[[int], None]) -> None:
    """Make an uncaught exception of this process end the registered job. Once; later calls do nothing.

    `SystemExit` with a code other than 0 counts as one, where nobody catches it; so does an exception in a thread that
    makes calls which other ranks wait for.
    """
    if _undo or hasattr(sys, "ps1"):  # an interactive session survives its exceptions
        return
    hook, thread_hook = sys.excepthook, threading.excepthook

    def put_back() -> None:
        sys.excepthook, threading.excepthook = hook, thread_hook

    _undo.append(put_back)
    _undo.append(watch_exits(_end_with_code))
    _undo.append(watch_immediate_exits(tell_of_immediate_exit))
    sys.excepthook = _fail
    threading.excepthook = lambda arguments: _fail_in_thread(arguments, thread_hook)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and flight_signal is not None:
        number = signal.Signals[flight_signal]
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _save_on_signal)
            logger.debug("r%d | the flight recorder is written at %s (MPIDIST_FLIGHT_SIGNAL)", job.rank, number.name)
            _undo.append(lambda: release_signal(number))


def install_before_start(job: Job, can_end: Callable[[], bool]) -> None:
    """Make an uncaught exception, or an exit with another code than 0, end the job before MPI is started.

    `can_end`: whether `job` can still end it. The first strategy of several ranks replaces the callbacks.
    """
    hook = sys.excepthook

    def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _jobs or issubclass(kind, KeyboardInterrupt) or not can_end():  # the launcher sends Ctrl-C to all ranks
            hook(kind, error, trace)
        else:
            register_job(job)
            _fail(kind, error, trace)

    def end_with_code(error: SystemExit) -> None:
        if not _jobs and can_end():
            register_job(job)
            _end_with_code(error)

    sys.excepthook = fail
    watch_exits(end_with_code)


def store_code_before_start() -> None:
    """Make an uncaught exception, or an exit with another code than 0, store its code before a strategy is built.

    The launcher ends the job, and may return the code of a rank that it has ended by a signal.
    """
    hook, own = sys.excepthook, os.getpid()

    def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        store(_INTERRUPTED if issubclass(kind, KeyboardInterrupt) else _EXIT_CODE)
        hook(kind, error, trace)

    def store(code: int) -> None:
        if code and not _jobs and os.getpid() == own:
            store_code(os.environ, code)

    sys.excepthook = fail
    watch_exits(lambda error: store(status_of(error)))


def uninstall() -> None:
    """Undo `install`, in a process that was forked from a rank: its exceptions end that process alone."""
    _jobs.clear()
    while _undo:
        _undo.pop()()


def release_signal(number: int) -> None:
    """Write no flight recorders at a signal any more, as the program needs the signal. Local."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(number) is _save_on_signal:
        signal.signal(number, signal.SIG_DFL)


def end_job(reason: str) -> None:
    """Abort the job, and report why: the other ranks do not finish. Returns only where no job is registered.

    `reason`: empty if a lower rank reports it, and should end the job.
    """
    if _jobs:
        if not reason:
            time.sleep(_LOWER_RANK_FIRST_SECONDS)
        else:
            write_line(f"this job ends with exit code {EXIT_CODE_AFTER_FAILURE}: {reason}")
        mark_for_restarts(os.environ, FAILED)
        _abort(_jobs[0], EXIT_CODE_AFTER_FAILURE)


def _fail(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
    """End the job because of an exception that nobody caught."""
    _reserve.close()
    job = _jobs[0]
    if _has_left(job, error):
        write_traceback(error)
        return
    try:
        _report_failure(job, kind, error)
    except BaseException as problem:  # no memory, for example: the job must end nevertheless
        write_lines(f"{kind.__name__}; its description failed with {type(problem).__name__}\n", job.prefix)
    finally:
        _abort(job, _INTERRUPTED if issubclass(kind, KeyboardInterrupt) else _EXIT_CODE)


def _report_failure(job: Job, kind: type[BaseException], error: BaseException) -> None:
    following = following_of(error)
    if following is not None:  # the other rank prints the whole error, and ends this one
        write_lines(f"{kind.__name__}: {following.summary}\n", job.prefix)
        time.sleep(_FOLLOW_SECONDS)
        if not following.may_go_on:
            return
    is_own = not getattr(error, "raised_on_all_ranks", False)
    if is_own:
        with suppress(Exception):  # MPI itself may have failed: the error must be reported nevertheless
            job.tell_end(text_of(error))
        if issubclass(kind, Exception):
            job.save_flights(text_of(error), error)
    _wait_for_lower_rank(job, error)
    write_traceback(error)
    if is_own:
        _await_acknowledgements(job)


def _fail_in_thread(arguments: threading.ExceptHookArgs, otherwise: Callable[[threading.ExceptHookArgs], Any]) -> None:
    error = arguments.exc_value
    if error is None or not (is_shared(error) or _jobs[0].is_thread_of_a_group()):
        otherwise(arguments)
    elif isinstance(error, SystemExit):
        _end_with_code(error)
    else:
        _fail(arguments.exc_type, error, arguments.exc_traceback)


def _wait_for_lower_rank(job: Job, error: BaseException) -> None:
    """Give a lower rank that fails alike, by the same mistake or Ctrl-C, time to print the error and end this rank."""
    if job.rank > 0:
        time.sleep(_LOWER_RANK_FIRST_SECONDS)
        if is_shared(error) or job.may_lower_rank_have_ended():
            time.sleep(_FOLLOW_SECONDS)


def _await_acknowledgements(job: Job) -> None:
    """Wait until the other ranks have raised the error of this one, which takes them a while on busy cores."""
    until = time.monotonic() + _ACKNOWLEDGE_SECONDS
    with suppress(Exception):  # MPI itself may have failed
        while not job.have_others_acknowledged() and time.monotonic() < until:
            time.sleep(_ACKNOWLEDGE_SECONDS / 200)


def _end_with_code(error: SystemExit) -> None:
    """End the job if this rank's program ends with another code than 0."""
    job, code = _jobs[0], status_of(error)
    if code == 0:
        return
    if getattr(error, "raised_on_all_ranks", False):  # all ranks end by themselves
        note_status(code)
        store_code(os.environ, code)  # some launchers end the other ranks when the first one has ended, others do not
        return
    if _has_left(job, error):
        note_status(code)
        _report_exit(job, error)
        return
    try:
        job.tell_end(_text_of_exit(error))
        job.save_flights(_text_of_exit(error), error)
        _wait_for_lower_rank(job, error)
        _report_exit(job, error)
        _await_acknowledgements(job)
    finally:
        _abort(job, code)


def _text_of_exit(error: SystemExit) -> str:
    """Name the exception with its arguments, else with the code that the program has set later."""
    return f"SystemExit: {error.args[0] if error.args else status_of(error)}"


def _report_exit(job: Job, error: SystemExit) -> None:
    where = where_raised(error)
    head = "Traceback (most recent call last):\n" if where else ""
    write_lines(f"{head}{where}{_text_of_exit(error)}\n", job.prefix)


def _has_left(job: Job, error: BaseException) -> bool:
    """Whether the job continues without this rank, whose program ends by this exception."""
    if has_left(error):
        return True
    is_own = following_of(error) is None and not getattr(error, "raised_on_all_ranks", False)
    return is_own and not isinstance(error, KeyboardInterrupt) and job.leave(error)


def _save_on_signal(number: int, frame: FrameType | None) -> None:
    if _saving:  # a second signal, while the first one is handled
        return
    _saving.append(number)
    try:
        where = _jobs[0].save_flights(signal.Signals(number).name, None)
        if where:
            write_lines(f"{where}\n", _jobs[0].prefix)
    finally:
        _saving.clear()


def _abort(job: Job, code: int) -> None:
    try:
        job.finish()
    except BaseException as problem:  # Ctrl-C, for example: the job must end nevertheless
        write_lines(f"{text_of(problem)}, while the job ended\n", job.prefix)
    time.sleep(FORWARD_SECONDS)
    # MPI_Abort may hang while the launcher handles that of another rank. `faulthandler` then ends the process, in a
    # thread that needs no Python lock.
    with suppress(OSError, RuntimeError):  # out of files or memory: MPI_Abort has to do
        faulthandler.dump_traceback_later(_ABORT_SECONDS, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
    store_code(os.environ, code)
    job.abort(code)
