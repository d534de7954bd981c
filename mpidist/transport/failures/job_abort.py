"""End of a job when the program of a rank fails: the error is printed once, and the job aborted."""

from __future__ import annotations

import atexit
import faulthandler
import logging
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Final, NamedTuple, final

from mpidist.transport.failures import open_groups
from mpidist.transport.failures.exit_code import (
    end_at_once,
    status_of,
    watch_exits,
    watch_immediate_exits,
    where_raised,
)
from mpidist.transport.failures.process_end import leave_mpi_to_parent, note_status
from mpidist.transport.mpi.child_process import launcher_here, launcher_or_parent
from mpidist.transport.mpi.launched_rank import LaunchedRank
from mpidist.transport.mpi.launcher_abort import (
    FAILED,
    FORWARD_SECONDS,
    ask_launcher_to_abort,
    exit_code_file,
    mark_for_restarts,
    rank_before_start,
    rank_prefix,
    store_code,
    write_lines,
)
from mpidist.transport.mpi.launcher_variables import numbers_of, rank_from_environment
from mpidist.transport.mpi.library import Intracomm, load_mpi, survives_losses
from mpidist.transport.settings import Settings
from mpidist.transport.shared_errors import following_of, has_left, is_shared
from mpidist.transport.stacks import publish_stack, withdraw_stack
from mpidist.transport.text import text_of
from mpidist.transport.tracebacks import shorten_printed, traceback_text

__all__ = [
    "EXIT_CODE_AFTER_FAILURE",
    "end_as_lost_rank",
    "end_job",
    "end_job_before_start",
    "explain_failures",
    "install_job_abort",
    "release_signal",
    "show_stack",
    "write_line",
]

logger = logging.getLogger("mpidist.transport")

EXIT_CODE_AFTER_FAILURE: Final = 75  # of a program that ends after a failed call, when other ranks cannot end with it
_JOB_ID: Final = "SLURM_JOB_ID"
_LOWER_RANK_FIRST_SECONDS: Final = 0.5
_ACKNOWLEDGE_SECONDS: Final = 2.0  # how long the other ranks may take to raise the error of this one
_FOLLOW_SECONDS: Final = 6.0  # how long the rank that failed first may take to end the job
_ABORT_SECONDS: Final = 3.0  # how long MPI_Abort may take
_RESERVE_BYTES: Final = 8 << 20  # what printing an error and MPI_Abort need, where the program has left nothing


@final
class _Job(NamedTuple):
    """The job of this rank. `abort` ends all ranks with an exit code; `prefix` comes before every line of this rank."""

    abort: Callable[[int], None]
    rank: int
    prefix: str


_jobs: list[_Job] = []  # at most one
_reserve: Final = mmap.mmap(-1, _RESERVE_BYTES, flags=mmap.MAP_PRIVATE)  # untouched: addresses, and no memory
_saving: list[int] = []  # the signal whose handler runs
_undo: list[Callable[[], None]] = []  # undoes `_install`


def write_line(text: str) -> None:
    """Write a line to standard error, with this rank's name in front, if there are several."""
    write_lines(f"{text}\n", _jobs[0].prefix if _jobs else "")


def _write_traceback(error: BaseException) -> None:
    """Write the traceback of this rank's exception to standard error, with this rank's name in front."""
    if isinstance(error, SystemExit):
        where = where_raised(error)
        head = "Traceback (most recent call last):\n" if where else ""
        text = f"{head}{where}{_text_of_end(error)}\n"
    else:
        text = traceback_text(error)
    write_lines(text, _jobs[0].prefix)


def install_job_abort(world: Intracomm, settings: Settings) -> None:
    """Make a failure of this rank's program end all ranks of the job, from now on, and show its stack. Local."""
    if world.Get_size() == 1:
        return
    launcher = launcher_or_parent()
    job_name = os.environ.get(_JOB_ID, str(launcher))
    publish_stack(settings.stack_signal, world.Get_rank(), world.Get_size(), launcher, job_name)

    def abort(code: int) -> None:
        if _save_at_end():
            time.sleep(FORWARD_SECONDS)
        is_by_itself = survives_losses() and open_groups.is_any_dispensable()
        if not (is_by_itself or load_mpi().Is_finalized()):  # there MPI_Abort hangs, or mpirun returns 0 after a loss
            world.Abort(code)
        end_at_once(code)  # MPICH's MPI_Abort may come back

    _jobs[:] = [_Job(abort, world.Get_rank(), rank_prefix(world.Get_rank()))]
    if settings.abort_on_error:
        _install(settings.flight_signal)


def _install(flight_signal: str | None) -> None:
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
    _undo.append(watch_immediate_exits(_tell_of_immediate_exit))
    sys.excepthook = _fail
    threading.excepthook = lambda arguments: _fail_in_thread(arguments, thread_hook)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and flight_signal is not None:
        number = signal.Signals[flight_signal]
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _save_on_signal)
            rank = _jobs[0].rank
            logger.debug("r%d | the flight recorder is written at %s (MPIDIST_FLIGHT_SIGNAL)", rank, number.name)
            _undo.append(lambda: _release_flight_signal(number))


def explain_failures(environ: Mapping[str, str]) -> None:
    """Print exceptions of this process in short, and where a rank's process crashed. Local; starts no MPI."""
    shorten_printed()
    if rank_from_environment(environ) is not None and not faulthandler.is_enabled():
        with suppress(OSError):  # the program has closed standard error
            faulthandler.enable(2)


def show_stack(environ: Mapping[str, str]) -> None:
    """Publish this thread's stack already before MPI is started, if it is a launched rank's. Local."""
    rank = LaunchedRank.of(environ)
    if rank is not None and rank.launcher == os.getppid():  # no child of a rank
        with suppress(ValueError):  # building the strategy raises it, on all ranks
            number = Settings.from_environment(environ).stack_signal
            publish_stack(number, rank.rank, rank.size, rank.launcher, environ.get(_JOB_ID, str(rank.launcher)))


def end_job_before_start(environ: Mapping[str, str]) -> None:
    """Make a failure of this rank's program end the job, even before MPI is started. Local; starts no MPI.

    Other ranks may by then wait in MPI_Init for this rank, for ever. Where the launcher itself ends the job, only the
    exit code is stored. Does nothing in a process that no launcher started, and with `MPIDIST_ON_ERROR=raise`. The
    first strategy of several ranks installs another end.
    """
    if environ.get("MPIDIST_ON_ERROR", "").strip() == "raise":
        return
    rank = rank_before_start(environ)
    if rank is None:
        if exit_code_file(environ) and numbers_of(environ) is not None and launcher_here() == os.getppid():
            _store_code_before_start()
        return
    own, hook = os.getpid(), sys.excepthook

    def abort(code: int) -> None:
        ask_launcher_to_abort(environ, code)
        end_at_once(code)

    job = _Job(abort, rank.rank, rank_prefix(rank.rank))

    def can_end() -> bool:
        return not _jobs and os.getpid() == own and rank_before_start(environ) is not None

    def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt) or not can_end():  # the launcher sends Ctrl-C to all ranks
            hook(kind, error, trace)
        else:
            _jobs.append(job)
            _fail(kind, error, trace)

    def end_with_code(error: SystemExit) -> None:
        if can_end():
            _jobs.append(job)
            _end_with_code(error)

    sys.excepthook = fail
    watch_exits(end_with_code)


def _store_code_before_start() -> None:
    """Make an uncaught exception, or an exit with another code than 0, store its code before a strategy is built.

    The launcher ends the job, and may return the code of a rank that it has ended by a signal.
    """
    hook, own = sys.excepthook, os.getpid()

    def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        store(error)
        hook(kind, error, trace)

    def store(error: BaseException) -> None:
        code = status_of(error)
        if code and not _jobs and os.getpid() == own:
            store_code(os.environ, code)

    sys.excepthook = fail
    watch_exits(store)


def _tell_of_immediate_exit(status: int) -> int:
    """Report that `os._exit` ends this rank in the middle of its work; return the status of a job that is not complete.

    MPICH's launcher may return that of this rank, though it kills the others.
    """
    if not open_groups.num_open():
        return status
    code = status & 0xFF or 1
    store_code(os.environ, code)
    write_line(f"os._exit({status}) ends this rank with a strategy that is not closed: the job is not complete")
    time.sleep(FORWARD_SECONDS)
    return status if open_groups.is_any_dispensable() else code


def _leave_to_parent() -> None:
    """Leave the job, the groups and the end of MPI to the parent of this process, which has just been forked."""
    _jobs.clear()
    while _undo:
        _undo.pop()()
    open_groups.leave_to_parent()
    leave_mpi_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def release_signal(number: int) -> None:
    """Use a signal no more, as the program needs it. Local."""
    _release_flight_signal(number)
    withdraw_stack(number)


def _release_flight_signal(number: int) -> None:
    """Write no flight recorders at a signal any more."""
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
    if _has_left(error):
        _write_traceback(error)
        return
    try:
        _report_failure(job, error)
    except BaseException as problem:  # no memory, for example: the job must end nevertheless
        write_lines(f"{kind.__name__}; its description failed with {type(problem).__name__}\n", job.prefix)
    finally:
        _abort(job, status_of(error))


def _report_failure(job: _Job, error: BaseException) -> None:
    following = following_of(error)
    if following is not None:  # the other rank prints the whole error, and ends this one
        write_lines(f"{type(error).__name__}: {following.summary}\n", job.prefix)
        time.sleep(_FOLLOW_SECONDS)
        if not following.may_go_on:
            return
    is_own = not getattr(error, "raised_on_all_ranks", False)
    if is_own:
        with suppress(Exception):  # MPI itself may have failed: the error must be reported nevertheless
            open_groups.tell_end(_text_of_end(error))
        if isinstance(error, (Exception, SystemExit)):
            open_groups.save_flights(_text_of_end(error), error)
    _wait_for_lower_rank(job, error)
    _write_traceback(error)
    if is_own:
        _await_acknowledgements()


def _fail_in_thread(arguments: threading.ExceptHookArgs, otherwise: Callable[[threading.ExceptHookArgs], Any]) -> None:
    error = arguments.exc_value
    if error is None or not (is_shared(error) or open_groups.is_thread_of_a_group()):
        otherwise(arguments)
    elif isinstance(error, SystemExit):
        _end_with_code(error)
    else:
        _fail(arguments.exc_type, error, arguments.exc_traceback)


def _wait_for_lower_rank(job: _Job, error: BaseException) -> None:
    """Give a lower rank that fails alike, by the same mistake or Ctrl-C, time to print the error and end this rank."""
    if job.rank > 0:
        time.sleep(_LOWER_RANK_FIRST_SECONDS)
        if is_shared(error) or open_groups.may_lower_rank_have_ended():
            time.sleep(_FOLLOW_SECONDS)


def _await_acknowledgements() -> None:
    """Wait until the other ranks have raised the error of this one, which takes them a while on busy cores."""
    until = time.monotonic() + _ACKNOWLEDGE_SECONDS
    with suppress(Exception):  # MPI itself may have failed
        while not open_groups.have_others_acknowledged() and time.monotonic() < until:
            time.sleep(_ACKNOWLEDGE_SECONDS / 200)


def _end_with_code(error: SystemExit) -> None:
    """End the job if this rank's program ends with another code than 0."""
    code = status_of(error)
    if code == 0:
        return
    note_status(code)
    if getattr(error, "raised_on_all_ranks", False):  # all ranks end by themselves
        store_code(os.environ, code)  # some launchers end the other ranks when the first one has ended, others do not
    else:
        _fail(SystemExit, error, None)


def _text_of_end(error: BaseException) -> str:
    """Name an exception that ends the program; an exit with its argument, else the code that the program set later."""
    if not isinstance(error, SystemExit):
        return text_of(error)
    return f"SystemExit: {error.args[0] if error.args else status_of(error)}"


def _has_left(error: BaseException) -> bool:
    """Whether the job continues without this rank, whose program ends by this exception."""
    if has_left(error):
        return True
    is_own = following_of(error) is None and not getattr(error, "raised_on_all_ranks", False)
    return is_own and not isinstance(error, KeyboardInterrupt) and open_groups.leave(error)


def _save_on_signal(number: int, frame: FrameType | None) -> None:
    if _saving:  # a second signal, while the first one is handled
        return
    _saving.append(number)
    try:
        where = open_groups.save_flights(signal.Signals(number).name, None)
        if where:
            write_lines(f"{where}\n", _jobs[0].prefix)
    finally:
        _saving.clear()


def _abort(job: _Job, code: int) -> None:
    try:
        for finish in open_groups.before_abort:
            finish()
    except BaseException as problem:  # Ctrl-C, for example: the job must end nevertheless
        write_lines(f"{text_of(problem)}, while the job ended\n", job.prefix)
    time.sleep(FORWARD_SECONDS)
    # MPI_Abort may hang while the launcher handles that of another rank. `faulthandler` then ends the process, in a
    # thread that needs no Python lock.
    with suppress(OSError, RuntimeError):  # out of files or memory: MPI_Abort has to do
        faulthandler.dump_traceback_later(_ABORT_SECONDS, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
    store_code(os.environ, code)
    job.abort(code)


def end_as_lost_rank(error: BaseException) -> None:
    """End this process by a signal, because of an exception of its own, for MPI to find a lost process. Local."""
    open_groups.tell_end(text_of(error))
    _write_traceback(error)
    _save_at_end()
    time.sleep(FORWARD_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _save_at_end() -> list[str]:
    """Save, write to standard error how to read the files, and return that text."""
    texts = open_groups.save()
    for text in texts:
        write_line(text)
    return texts


@atexit.register
def _leave_groups_at_exit() -> None:
    """Leave all groups, so that no rank waits for this one, and MPI can be finalized.

    After a call that failed, other ranks may never finalize MPI, and MPI_Finalize of this rank would wait for ever.
    """
    if not _jobs or _jobs[0].rank == 0:
        _save_at_end()
    else:
        open_groups.save()
    unread = []
    while open_groups.opened and not load_mpi().Is_finalized():
        group = open_groups.opened[0]
        try:
            unread.append(group.end_with_program())
        except BaseException as error:  # the other groups must be left, too
            open_groups.remove(group, has_failed=True)
            if isinstance(error, KeyboardInterrupt):  # it ends the job, as at any other moment
                unread.append(error)
            else:
                write_line(f"while the program ended: {text_of(error)}")
    for uncaught in filter(None, unread):
        sys.excepthook(type(uncaught), uncaught, uncaught.__traceback__)
    for reason in open_groups.unbuilt[:1]:
        if not load_mpi().Is_finalized():
            end_job(reason)
    while open_groups.failed and not load_mpi().Is_finalized():
        missing = open_groups.failed.pop().wait_for_peers_at_exit()
        if missing is not None:
            end_job(missing)
