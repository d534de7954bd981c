"""What happens when a rank's program fails: it says so once, and ends the job."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Final, NamedTuple, final

from mpidist import errors
from mpidist.transport.failures.exit_code import status_of, watch_exits, where_raised
from mpidist.transport.text import text_of

__all__ = ["EXIT_CODE_OF_PARTING", "Job", "end_job", "install", "register_job", "report", "tell", "uninstall"]

EXIT_CODE_OF_PARTING: Final = 75  # of a program that ends after a call that failed, when others cannot end with it
_PACKAGE: Final = os.path.dirname(errors.__file__)
_EXIT_CODE: Final = 1
_INTERRUPTED: Final = 130
_FORWARD_SECONDS: Final = 0.2  # a launcher needs a moment to pass on what a rank wrote before it is killed
_LOWER_RANK_FIRST_SECONDS: Final = 0.5
_FOLLOW_SECONDS: Final = 2.0  # for the rank that failed first to end the job
_ABORT_SECONDS: Final = 3.0  # for MPI to do so


@final
class Job(NamedTuple):
    """What ending a job takes.

    Attributes:
        abort: Ends all ranks with the exit code that it is given: `MPI_Abort`.
        rank: This rank in the world.
        hostname: Its host.
        tell: Tells other ranks that this one has failed, and why.
        keep: Keeps what the ranks called last; the argument says why.
        is_concerned: Whether ranks may wait for what this thread does.
        is_told_by_lower_rank: Whether a rank before this one has failed, too, and says so.
    """

    abort: Callable[[int], None]
    rank: int
    hostname: str
    tell: Callable[[str], None]
    keep: Callable[[str], str]
    is_concerned: Callable[[], bool]
    is_told_by_lower_rank: Callable[[], bool]

    @property
    def prefix(self) -> str:
        """What stands before every line of this rank."""
        return f"[rank {self.rank} on {self.hostname}] "


_jobs: list[Job] = []  # at most one
_keeping: list[int] = []  # the signal that is looked after
_before: list[Callable[[], None]] = []  # puts back what was there


def register_job(job: Job) -> None:
    """Remember what ending the job takes, for a program that could end but for other ranks."""
    _jobs[:] = [job]


def tell(text: str) -> None:
    """Write a line for people, with this rank's name in front."""
    if _jobs:
        _write(f"{text}\n", _jobs[0].prefix)


def install(job: Job) -> None:
    """Make an uncaught exception of this process end the whole job. Once; later calls do nothing.

    `SystemExit` with a code other than 0 counts as one, where nobody catches it; so does an exception in a thread that
    makes calls which other ranks wait for. SIGUSR1 keeps what the ranks called last, if it had no other meaning.
    """
    register_job(job)
    if _before or hasattr(sys, "ps1"):  # an interactive session survives its exceptions
        return
    hook, thread_hook = sys.excepthook, threading.excepthook

    def put_back() -> None:
        sys.excepthook, threading.excepthook = hook, thread_hook

    _before.append(put_back)
    _before.append(watch_exits(_end_with_code))
    sys.excepthook = _fail
    threading.excepthook = lambda arguments: _fail_in_thread(arguments, thread_hook)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _keep)
        _before.append(lambda: _default(signal.SIGUSR1))


def uninstall() -> None:
    """Let exceptions be those of this process alone again, as in one that was forked from a rank."""
    _jobs.clear()
    while _before:
        _before.pop()()


def end_job(reason: str) -> None:
    """End the job of a program that could end but for other ranks, and say why. Returns only without a job."""
    if _jobs:
        tell(f"this job ends with exit code {EXIT_CODE_OF_PARTING}: {reason}")
        _abort(_jobs[0], EXIT_CODE_OF_PARTING)


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None, prefix: str) -> None:
    """Write a traceback to standard error in one piece, `prefix` before every line.

    Of an error that this package tells on purpose its own inner frames say nothing: the program's are shown.
    """
    is_told = kind.__module__ == errors.__name__ or getattr(error, "raised_on_all_ranks", False)
    if is_told or kind is KeyboardInterrupt:
        frames = [frame.filename.startswith(_PACKAGE) for frame in traceback.extract_tb(trace)]
        limit = max((at for at, is_ours in enumerate(frames) if not is_ours), default=len(frames)) + 2
        _write("".join(traceback.format_exception(kind, error, trace, limit=limit)), prefix)
    else:
        _write("".join(traceback.format_exception(kind, error, trace)), prefix)


def _fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End the job because of an exception that nobody caught."""
    job = _jobs[0]
    try:
        _say(job, kind, error, trace)
    except BaseException as problem:  # no memory, for example: the job has to end nevertheless
        _write(f"{kind.__name__}; to say more of it failed with {type(problem).__name__}\n", job.prefix)
    finally:
        _abort(job, _INTERRUPTED if issubclass(kind, KeyboardInterrupt) else _EXIT_CODE)


def _say(job: Job, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if getattr(error, "follows_rank", None) is not None:  # that rank says it all, and ends this one
        _write(f"{kind.__name__}: {vars(error)['summary']}\n", job.prefix)
        time.sleep(_FOLLOW_SECONDS)
        if not vars(error)["may_go_on"]:
            return
    if not getattr(error, "raised_on_all_ranks", False):
        job.tell(text_of(error))
        if issubclass(kind, Exception):
            job.keep(text_of(error))
    _let_lower_rank_speak(job)
    report(kind, error, trace, job.prefix)


def _fail_in_thread(arguments: threading.ExceptHookArgs, otherwise: Callable[[threading.ExceptHookArgs], Any]) -> None:
    error = arguments.exc_value
    if error is None or isinstance(error, SystemExit) or not _jobs[0].is_concerned():
        otherwise(arguments)
    else:
        _fail(arguments.exc_type, error, arguments.exc_traceback)


def _let_lower_rank_speak(job: Job) -> None:
    """Wait for a rank that has failed as well, as with a mistake in the program or Ctrl-C, to end this rank."""
    if job.rank > 0:
        time.sleep(_LOWER_RANK_FIRST_SECONDS)  # it says the same, and once is enough
        if job.is_told_by_lower_rank():
            time.sleep(_FOLLOW_SECONDS)


def _end_with_code(error: SystemExit) -> None:
    """End the job if a program ends with another code than 0, in the middle of the job."""
    job, code = _jobs[0], status_of(error)
    if code == 0:
        return
    try:
        job.tell(f"SystemExit: {error.args[0]}")
        _let_lower_rank_speak(job)
        where = where_raised(error)
        head = "Traceback (most recent call last):\n" if where else ""
        _write(f"{head}{where}SystemExit: {error.args[0]}\n", job.prefix)
    finally:
        _abort(job, code)


def _keep(number: int, frame: FrameType | None) -> None:
    if _keeping:  # a signal while the last one is still looked after
        return
    _keeping.append(number)
    try:
        where = _jobs[0].keep(signal.Signals(number).name)
        if where:
            _write(f"{where}\n", _jobs[0].prefix)
    finally:
        _keeping.clear()


def _default(number: signal.Signals) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(number, signal.SIG_DFL)


def _abort(job: Job, code: int) -> None:
    time.sleep(_FORWARD_SECONDS)
    # MPI's own end may hang, where a launcher is busy with another rank's. This thread needs nothing of Python.
    with suppress(OSError, RuntimeError):  # out of files, or of memory: then MPI has to do
        faulthandler.dump_traceback_later(_ABORT_SECONDS, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
    job.abort(code)


def _write(text: str, prefix: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(2, "".join(f"{prefix}{line}\n" for line in text.splitlines()).encode(errors="replace"))
