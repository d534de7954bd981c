"""The groups that this process is in, and what all of them do when the process ends, fails or is forked."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final
from weakref import WeakSet

from mpidist.errors import UnavailableError
from mpidist.transport.failures.exit_code import stack_of
from mpidist.transport.failures.flight_files import GroupFlight, write_flight
from mpidist.transport.failures.status_board import RUNNING
from mpidist.transport.failures.watchdog import Watchdog
from mpidist.transport.mpi.library import load_mpi
from mpidist.transport.shared_errors import mark_shared
from mpidist.transport.stacks import Stack, read_stacks
from mpidist.transport.text import count_text, last_line, name_ranks

__all__ = [
    "OpenGroup",
    "add",
    "alone",
    "advance_others",
    "before_abort",
    "failed",
    "have_others_acknowledged",
    "is_thread_of_a_group",
    "is_any_dispensable",
    "leave",
    "leave_to_parent",
    "may_lower_rank_have_ended",
    "no_communicators_left",
    "num_open",
    "num_strategies",
    "opened",
    "remove",
    "require_no_build_failure",
    "require_unused",
    "save",
    "save_flights",
    "savers",
    "tell_end",
    "unbuilt",
]


class OpenGroup(ABC):
    """A group of several ranks that this process is in.

    Attributes:
        membership: This rank's `Membership`.
        watchdog: This rank's watchdog; `None` for a group of one.
        owner: The user's kind of object that has it, for errors.
        servers: Ranks, as numbered in the whole job, that serve this group alone until this rank leaves it.
    """

    membership: Any
    watchdog: Watchdog | None = None
    owner = "strategy"
    servers: frozenset[int] = frozenset()

    @abstractmethod
    def end_with_program(self) -> BaseException | None:
        """Leave the group, with all ranks, because the program of this rank ends.

        Returns the error of what the program has started, and has not waited for.
        """

    def wait_for_peers_at_exit(self) -> str | None:
        """Wait a while until all ranks of a failed group can finalize MPI; return `None`, or why they cannot.

        The text is empty if a lower rank reports it.
        """
        reason: str | None = self.membership.wait_for_peers_at_exit()
        return reason

    @abstractmethod
    def disown(self) -> None:
        """Leave the group to the parent process, as this process has just been forked. Local."""

    def advance(self) -> None:  # noqa: B027  not all groups have such calls
        """Advance the calls that were started and not waited for, if this thread makes the group's calls. Local."""

    def watch(self) -> Watchdog | None:
        """Return the group's watchdog; `None` if it can read no notes any more. Local."""
        return None if self.watchdog is None or load_mpi().Is_finalized() else self.watchdog

    @abstractmethod
    def is_dispensable(self) -> bool:
        """Whether the other ranks continue if this rank's program fails. Local."""

    @abstractmethod
    def leave(self, error: BaseException) -> None:
        """Leave a group that continues without this rank, because of an exception that ends the program. Local."""

    @abstractmethod
    def is_of_this_thread(self) -> bool:
        """Whether this thread makes the group's calls."""


opened: Final[list[OpenGroup]] = []
failed: Final[list[OpenGroup]] = []  # closed, but not by all ranks together: some ranks may never finalize MPI
# Of this process alone, where a larger job has several ranks; forgotten, if the program forgets them.
alone: Final[WeakSet[Any]] = WeakSet()
unbuilt: Final[list[str]] = []  # why groups could not be built: MPI_Finalize would hang, so the job is aborted at exit
before_abort: Final[list[Callable[[], None]]] = []  # finish what a job that an error ends should not lose
savers: Final[list[Callable[[], str]]] = []  # write files, and return how to read them, for people; "" for none


def add(group: OpenGroup) -> None:
    """Register a group as open, until `remove`."""
    if group not in opened:
        opened.append(group)
    if group in failed:
        failed.remove(group)


def remove(group: OpenGroup, has_failed: bool) -> None:
    """Unregister an open group. If it has failed, its ranks are awaited at the end of the program."""
    if group in opened:
        opened.remove(group)
    if has_failed and group not in failed:
        failed.append(group)


def require_no_build_failure() -> None:
    """Refuse to build a group after building one failed: messages for that one may still be under way."""
    if unbuilt:
        raise UnavailableError(f"{unbuilt[0]} before, so no other one can be built; end the job, and start it again")


def require_unused(call: str, ranks: frozenset[int]) -> None:
    """Require that no rank serves a strategy that this thread uses: it would wait for ever. Local.

    `ranks` are as numbered in the whole job.
    """
    for group in opened:
        busy = ranks & group.servers
        if busy and group.is_of_this_thread():
            raise RuntimeError(
                f"{call} would wait for {name_ranks(busy)} of the job, in serve() of another ParameterServerStrategy "
                "until this worker has closed that one: call its close() first, or use it as `with strategy:`; or give "
                "the new one a comm= of workers alone"
            )


def num_open(or_alone: bool = False) -> int:
    """Count the groups of several ranks that this process has made and not closed. `or_alone`: also those of one."""
    return len(opened) + or_alone * len(alone)


def num_strategies() -> int:
    """Count the strategies of several ranks that this process has made and not closed."""
    return sum(group.owner == OpenGroup.owner for group in opened)


def is_thread_of_a_group() -> bool:
    """Whether other ranks may wait for this thread, or it has left a group without them."""
    return any(group.is_of_this_thread() for group in (*opened, *failed))


def no_communicators_left(error: Exception, ranks: frozenset[int]) -> UnavailableError:
    """Make the error that all ranks of a new group raise if MPI has no communicators left for the group."""
    abandoned = count_text(len(failed), "strategy", "strategies")
    left = f", and {abandoned} that a failure ended give theirs back at the end of the program" if failed else ""
    problem = UnavailableError(
        f"MPI could not make the communicators of another strategy ({last_line(error)}): "
        f"{count_text(len(opened), 'strategy', 'strategies')} of this process are open{left}; close "
        "those that are done with, by `with` or strategy.close(); make one strategy, and use it again and again"
    )
    mark_shared(problem, ranks)
    return problem


def advance_others(group: OpenGroup) -> None:
    """Advance the calls that were started in other groups, while this thread waits in a call of `group`. Local.

    Another rank may wait for such a call before that rank joins the call that this rank waits in.
    """
    if len(opened) > 1:
        for other in opened:
            if other is not group:
                other.advance()


def tell_end(text: str) -> None:
    """Notify the other ranks of all groups that this rank's program has failed. Local."""
    for watch in _watches(opened):
        watch.tell_end(text)


def leave(error: BaseException) -> bool:
    """Leave all groups as an exception ends the program; return whether they continue without it. Local."""
    groups = (*opened, *failed)
    if not groups or not all(group.is_dispensable() for group in groups):
        return False
    for group in groups:
        group.leave(error)
    return True


def is_any_dispensable() -> bool:
    """Whether the other ranks of a group continue if this rank's program fails. Local."""
    return any(group.is_dispensable() for group in (*opened, *failed))


def may_lower_rank_have_ended() -> bool:
    """Whether a lower rank has reported in any group that its program ends, or there is no group. Local."""
    groups = (*opened, *failed)
    return not groups or any(watch.has_lower_rank_ended() for watch in _watches(groups))


def have_others_acknowledged() -> bool:
    """Whether every rank of the open groups has raised an error in one of them. Local."""
    pairs = [pair for watch in _watches(opened) for pair in watch.acknowledged().items()]
    return {rank for rank, _ in pairs} == {rank for rank, has_raised in pairs if has_raised}


def _watches(groups: Iterable[OpenGroup]) -> Iterator[Watchdog]:
    return filter(None, (group.watch() for group in groups))


def save_flights(reason: str, end: BaseException | None = None) -> str:
    """Write the flight recorders of this rank, and of late ranks of its node; return how to read them. Local.

    `end`: the exception that ended this rank's program; `None` where it still runs.
    """
    save()
    groups = (*opened, *failed)
    folders = [folder for group in groups if (folder := group.membership.folder) is not None]
    if not folders:
        return ""
    flights: dict[int, list[GroupFlight]] = {}
    for group in groups:
        for rank, flight in group.membership.flights().items():
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


def save() -> list[str]:
    """Call all `savers`, and return what to print."""
    return [text for saver in savers if (text := saver())]


def leave_to_parent() -> None:
    """Leave the groups to the parent of this forked process. Local."""
    failed.clear()
    unbuilt.clear()
    while opened:
        opened.pop().disown()
