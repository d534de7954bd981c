"""The groups that this process is in, and what happens to them when the process ends, fails or is forked."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

from mpidist.errors import UnavailableError
from mpidist.transport.failures import job_abort
from mpidist.transport.failures.exit_code import end_at_once, stack_of
from mpidist.transport.failures.flight_files import GroupFlight, write_flight
from mpidist.transport.failures.process_end import leave_mpi_to_parent
from mpidist.transport.failures.process_state import RUNNING
from mpidist.transport.failures.watchdog import Watchdog
from mpidist.transport.mpi.child_process import launcher_here, launcher_or_parent
from mpidist.transport.mpi.error_output import FORWARD_SECONDS
from mpidist.transport.mpi.launched_rank import LaunchedRank
from mpidist.transport.mpi.launcher_abort import ask_launcher_to_abort, exit_code_file, rank_before_start, store_code
from mpidist.transport.mpi.launcher_variables import numbers_of, rank_from_environment
from mpidist.transport.mpi.library import Intracomm, load_mpi, survives_losses
from mpidist.transport.settings import Settings
from mpidist.transport.shared_errors import mark_shared
from mpidist.transport.stacks import Stack, publish_stack, read_stacks, withdraw_stack
from mpidist.transport.text import count_text, last_line, name_ranks, text_of
from mpidist.transport.tracebacks import shorten_printed

__all__ = [
    "OpenGroup",
    "add",
    "add_alone",
    "advance_others",
    "call_before_abort",
    "end_as_lost_rank",
    "end_job_before_start",
    "explain_failures",
    "have_others_acknowledged",
    "install_job_abort",
    "is_thread_of_a_group",
    "leave",
    "may_lower_rank_have_ended",
    "no_communicators_left",
    "num_open",
    "num_strategies",
    "record_build_failure",
    "release_signal",
    "remove",
    "remove_alone",
    "require_no_build_failure",
    "require_unused",
    "save_flights",
    "save_with",
    "show_stack",
    "tell_end",
]


class OpenGroup(ABC):
    """A group of several ranks that this process is in.

    Attributes:
        owner: The user's kind of object that has it, for errors.
        servers: Ranks, as numbered in the whole job, that serve this group alone until this rank leaves it.
    """

    owner = "strategy"
    servers: frozenset[int] = frozenset()

    @abstractmethod
    def end_with_program(self) -> BaseException | None:
        """Leave the group, with all ranks, because the program of this rank ends.

        Returns the error of what the program has started, and has not waited for.
        """

    @abstractmethod
    def wait_for_peers_at_exit(self) -> str | None:
        """Wait a while until all ranks of a failed group can finalize MPI; return `None`, or why they cannot.

        The text is empty if a lower rank reports it.
        """

    @abstractmethod
    def disown(self) -> None:
        """Leave the group to the parent process, as this process has just been forked. Local."""

    def advance(self) -> None:  # noqa: B027  not all groups have such calls
        """Advance the calls that were started and not waited for, if this thread makes the group's calls. Local."""

    @abstractmethod
    def watch(self) -> Watchdog | None:
        """Return the group's watchdog; `None` if it can read no notes any more. Local."""

    def is_dispensable(self) -> bool:
        """Whether the other ranks continue if this rank's program fails. Local."""
        return False

    def leave(self, error: BaseException) -> None:
        """Leave a group that continues without this rank, because of an exception that ends the program. Local."""
        raise RuntimeError("other ranks cannot continue without this one")

    @abstractmethod
    def flights(self) -> Mapping[int, GroupFlight]:
        """Read the flight recorders of this rank, and of ranks of its node that are late, by rank of the world."""

    @property
    @abstractmethod
    def folder(self) -> Path | None:
        """The folder for flight recorders; `None` if none are written."""

    @abstractmethod
    def is_of_this_thread(self) -> bool:
        """Whether this thread makes the group's calls."""


_JOB: Final = "SLURM_JOB_ID"
_open: Final[list[OpenGroup]] = []
_failed: Final[list[OpenGroup]] = []  # closed, but not by all ranks together: some ranks may never finalize MPI
_alone: Final[WeakSet[Any]] = WeakSet()  # of this process alone; forgotten, if the program forgets them
_unbuilt: Final[list[str]] = []  # why groups could not be built
_before_abort: Final[list[Callable[[], None]]] = []  # finish what a job that an error ends should not lose
_savers: Final[list[Callable[[], str]]] = []  # write files, and return how to read them, for people; "" for none


def add(group: OpenGroup) -> None:
    """Register a group as open, until `remove`."""
    if group not in _open:
        _open.append(group)
    if group in _failed:
        _failed.remove(group)


def remove(group: OpenGroup, has_failed: bool) -> None:
    """Unregister an open group. If it has failed, its ranks are awaited at the end of the program."""
    if group in _open:
        _open.remove(group)
    if has_failed and group not in _failed:
        _failed.append(group)


def record_build_failure(reason: str) -> None:
    """Record that building a group failed; MPI_Finalize would hang, so the job is aborted at exit."""
    _unbuilt.append(reason)


def require_no_build_failure() -> None:
    """Refuse to build a group after building one failed: messages for that one may still be under way."""
    if _unbuilt:
        raise UnavailableError(f"{_unbuilt[0]} before, so no other one can be built; end the job, and start it again")


def require_unused(call: str, ranks: frozenset[int]) -> None:
    """Require that no rank serves a strategy that this thread uses: it would wait for ever. Local.

    `ranks` are as numbered in the whole job.
    """
    for group in _open:
        busy = ranks & group.servers
        if busy and group.is_of_this_thread():
            raise RuntimeError(
                f"{call} would wait for {name_ranks(busy)} of the job, in serve() of another ParameterServerStrategy "
                "until this worker has closed that one: call its close() first, or use it as `with strategy:`; or give "
                "the new one a comm= of workers alone"
            )


def install_job_abort(world: Intracomm, settings: Settings) -> None:
    """Make a failure of this rank's program end all ranks of the job, from now on, and show its stack. Local."""
    if world.Get_size() == 1:
        return
    launcher = launcher_or_parent()
    job_name = os.environ.get(_JOB, str(launcher))
    publish_stack(settings.stack_signal, world.Get_rank(), world.Get_size(), launcher, job_name)

    def abort(code: int) -> None:
        if _save_at_end():
            time.sleep(FORWARD_SECONDS)
        is_by_itself = survives_losses() and any(group.is_dispensable() for group in (*_open, *_failed))
        if not (is_by_itself or load_mpi().Is_finalized()):  # there MPI_Abort hangs, or mpirun returns 0 after a loss
            world.Abort(code)
        end_at_once(code)  # MPICH's MPI_Abort may come back

    job = _job_of(world.Get_rank(), abort)
    job_abort.register_job(job)
    if settings.abort_on_error:
        job_abort.install(job, settings.flight_signal, _tell_of_immediate_exit)


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
            publish_stack(number, rank.rank, rank.size, rank.launcher, environ.get(_JOB, str(rank.launcher)))


def release_signal(number: int) -> None:
    """Use a signal no more, as the program needs it. Local."""
    job_abort.release_signal(number)
    withdraw_stack(number)


def _tell_of_immediate_exit(status: int) -> None:
    """Report that `os._exit` ends this rank in the middle of its work, which launchers may take for the job's end."""
    if _open:
        store_code(os.environ, status & 0xFF or 1)  # launchers may return 0, or that of a rank that they have killed
        job_abort.write_line(
            f"os._exit({status}) ends this rank with a strategy that is not closed: the job is not complete"
        )
        time.sleep(FORWARD_SECONDS)


def end_job_before_start(environ: Mapping[str, str]) -> None:
    """Make a failure of this rank's program end the job, even before MPI is started. Local; starts no MPI.

    Other ranks may by then wait in MPI_Init for this rank, for ever. Where the launcher itself ends the job, only the
    exit code is stored. Does nothing in a process that no launcher started, and with `MPIDIST_ON_ERROR=raise`.
    """
    if environ.get("MPIDIST_ON_ERROR", "").strip() == "raise":
        return
    rank = rank_before_start(environ)
    if rank is None:
        if exit_code_file(environ) and numbers_of(environ) is not None and launcher_here() == os.getppid():
            job_abort.store_code_before_start()
        return
    own = os.getpid()

    def abort(code: int) -> None:
        ask_launcher_to_abort(environ, code)
        end_at_once(code)

    job = _job_of(rank.rank, abort)
    job_abort.install_before_start(job, lambda: os.getpid() == own and rank_before_start(environ) is not None)


def _job_of(rank: int, abort: Callable[[int], None]) -> job_abort.Job:
    """Return the callbacks of a job that `abort` ends: those of this module, which act for all groups, and `abort`."""
    return job_abort.Job(
        abort,
        rank,
        socket.gethostname(),
        tell_end,
        save_flights,
        is_thread_of_a_group,
        may_lower_rank_have_ended,
        have_others_acknowledged,
        leave,
        _finish,
    )


def num_open(or_alone: bool = False) -> int:
    """Count the groups of several ranks that this process has made and not closed. `or_alone`: also those of one."""
    return len(_open) + or_alone * len(_alone)


def num_strategies() -> int:
    """Count the strategies of several ranks that this process has made and not closed."""
    return sum(group.owner == OpenGroup.owner for group in _open)


def add_alone(group: object) -> None:
    """Register a group that would be of several ranks, had the job more than one, until `remove_alone`."""
    _alone.add(group)


def remove_alone(group: object) -> None:
    """Unregister a group of one rank, if it is one."""
    _alone.discard(group)


def is_thread_of_a_group() -> bool:
    """Whether other ranks may wait for this thread, or it has left a group without them."""
    return any(group.is_of_this_thread() for group in (*_open, *_failed))


def no_communicators_left(error: Exception, ranks: frozenset[int]) -> UnavailableError:
    """Make the error that all ranks of a new group raise if MPI has no communicators left for the group."""
    failed = count_text(len(_failed), "strategy", "strategies")
    left = f", and {failed} that a failure ended give theirs back at the end of the program" if _failed else ""
    problem = UnavailableError(
        f"MPI could not make the communicators of another strategy ({last_line(error)}): "
        f"{count_text(len(_open), 'strategy', 'strategies')} of this process are open{left}; close "
        "those that are done with, by `with` or strategy.close(); make one strategy, and use it again and again"
    )
    mark_shared(problem, ranks)
    return problem


def advance_others(group: OpenGroup) -> None:
    """Advance the calls that were started in other groups, while this thread waits in a call of `group`. Local.

    Another rank may wait for such a call before that rank joins the call that this rank waits in.
    """
    if len(_open) > 1:
        for other in _open:
            if other is not group:
                other.advance()


def tell_end(text: str) -> None:
    """Notify the other ranks of all groups that this rank's program has failed. Local."""
    for watch in _watches(_open):
        watch.tell_end(text)


def leave(error: BaseException) -> bool:
    """Leave all groups as an exception ends the program; return whether they continue without it. Local."""
    groups = (*_open, *_failed)
    if not groups or not all(group.is_dispensable() for group in groups):
        return False
    for group in groups:
        group.leave(error)
    return True


def end_as_lost_rank(error: BaseException) -> None:
    """End this process by a signal, because of an exception of its own, for MPI to find a lost process. Local."""
    tell_end(text_of(error))
    job_abort.write_traceback(error)
    _save_at_end()
    time.sleep(FORWARD_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def may_lower_rank_have_ended() -> bool:
    """Whether a lower rank has reported in any group that its program ends, or there is no group. Local."""
    groups = (*_open, *_failed)
    return not groups or any(watch.has_lower_rank_ended() for watch in _watches(groups))


def have_others_acknowledged() -> bool:
    """Whether every rank of the open groups has raised an error in one of them. Local."""
    pairs = [pair for watch in _watches(_open) for pair in watch.acknowledged().items()]
    return {rank for rank, _ in pairs} == {rank for rank, has_raised in pairs if has_raised}


def _watches(groups: Iterable[OpenGroup]) -> Iterator[Watchdog]:
    return filter(None, (group.watch() for group in groups))


def call_before_abort(function: Callable[[], None]) -> None:
    """Register a function that is called before an error of this process ends the whole job."""
    _before_abort.append(function)


def save_with(saver: Callable[[], str]) -> None:
    """Call a function when flight recorders are written, and before this process ends; it returns what to print."""
    _savers.append(saver)


def save_flights(reason: str, end: BaseException | None = None) -> str:
    """Write the flight recorders of this rank, and of late ranks of its node; return how to read them. Local.

    `end`: the exception that ended this rank's program; `None` where it still runs.
    """
    _save()
    groups = (*_open, *_failed)
    folders = [group.folder for group in groups if group.folder is not None]
    if not folders:
        return ""
    flights: dict[int, list[GroupFlight]] = {}
    for group in groups:
        for rank, flight in group.flights().items():
            flights.setdefault(rank, []).append(flight)
    own = load_mpi().COMM_WORLD.Get_rank()
    pids = {rank: of_rank[0].pid for rank, of_rank in flights.items() if of_rank[0].process == RUNNING}
    stacks = read_stacks(pids.values())
    if end is not None:
        stacks[os.getpid()] = stack_of(end)
    try:
        for rank, of_rank in flights.items():
            stack = stacks.get(pids.get(rank, 0), Stack())
            write_flight(folders[0], rank, reason.splitlines()[0], of_rank, stack, own, end if rank == own else None)
        return f"last calls of the ranks: python -m mpidist flight {os.path.relpath(folders[0])}"
    except OSError as error:
        return f"the last calls could not be written to {folders[0]}: {error.strerror}"


def _finish() -> None:
    for function in _before_abort:
        function()


def _save() -> list[str]:
    return [saver() for saver in _savers]


def _save_at_end() -> list[str]:
    """Save, write to standard error how to read the files, and return that text."""
    texts = [text for text in _save() if text]
    for text in texts:
        job_abort.write_line(text)
    return texts


def _leave_to_parent() -> None:
    """Leave the groups, and the end of MPI, to the parent of this forked process."""
    job_abort.uninstall()
    _failed.clear()
    _unbuilt.clear()
    while _open:
        _open.pop().disown()
    leave_mpi_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _leave_groups_at_exit() -> None:
    """Leave all groups, so that no rank waits for this one, and MPI can be finalized.

    After a call that failed, other ranks may never finalize MPI, and MPI_Finalize of this rank would wait for ever.
    """
    if job_abort.is_of_first_rank():
        _save_at_end()
    else:
        _save()
    unread = []
    while _open and not load_mpi().Is_finalized():
        group = _open[0]
        try:
            unread.append(group.end_with_program())
        except BaseException as error:  # the other groups must be left, too
            remove(group, has_failed=True)
            if isinstance(error, KeyboardInterrupt):  # it ends the job, as at any other moment
                unread.append(error)
            else:
                job_abort.write_line(f"while the program ended: {text_of(error)}")
    for uncaught in filter(None, unread):
        sys.excepthook(type(uncaught), uncaught, uncaught.__traceback__)
    for reason in _unbuilt[:1]:
        if not load_mpi().Is_finalized():
            job_abort.end_job(reason)
    while _failed and not load_mpi().Is_finalized():
        missing = _failed.pop().wait_for_peers_at_exit()
        if missing is not None:
            job_abort.end_job(missing)
