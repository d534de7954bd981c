"""A group of ranks that send each other requests at any time, no calls in lock step, and one common end.

The ranks of a `SyncGroup` make the same calls, which are numbered. The ranks of a `ServiceGroup` send messages at any
time. Its `AwaitedPeers` lists the ranks that a rank waits for, and the ends of its wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import NoneType
from typing import Any, Final, TypeGuard, cast, final

from mpidist.errors import DeadlineExceededError, UnavailableError
from mpidist.transport.failures import open_groups
from mpidist.transport.failures.awaited_peers import AwaitedPeers
from mpidist.transport.failures.exit_code import ends_normally
from mpidist.transport.failures.open_groups import OpenGroup
from mpidist.transport.failures.watchdog import Watchdog
from mpidist.transport.group.discovery import await_ranks, discover
from mpidist.transport.group.levels import on_node, report_no_shared_memory
from mpidist.transport.group.membership import Membership
from mpidist.transport.group.thread_guard import ThreadGuard
from mpidist.transport.mpi.library import Intracomm, is_process_failure, last_round, load_mpi, ranks_in_world
from mpidist.transport.node_memory.arena import SharedArena
from mpidist.transport.settings import Settings
from mpidist.transport.shared_errors import following_of, is_shared_by, repeat_of
from mpidist.transport.text import text_of
from mpidist.transport.topology import Topology
from mpidist.transport.waiting import poll_or_keep

__all__ = ["ServiceGroup", "meet_ranks"]

_REMEDY: Final = "Close the strategy, end the job, and start it again"


def meet_ranks(comm: Intracomm | None, item: Any) -> tuple[Intracomm, list[Any]]:
    """Wait until all ranks build a group; return their communicator and a picklable item of each. Collective."""
    comm = await_ranks(comm)
    return comm, comm.allgather(item)


@final
class ServiceGroup(OpenGroup):
    """Ranks that send each other requests. `from_mpi` makes one, on all its ranks.

    Attributes:
        comm: The communicator of the requests.
        ranks: The ranks, as they are numbered in the whole job.
        awaited: What this rank waits for, whenever it waits, and which ranks are lost.
        arena: Memory that the ranks of this node share; `None` before `share_memory`, or if they share none.
        timeout_seconds: How long a rank waits for an answer; `None` or 0 for ever. By default that of the settings.
        end: Ends this rank's part, because of an exception or `None`, and returns an error that nobody has raised.
            Called when the program ends, if not before.
        may_miss_ranks: Whether the group continues without ranks that are lost. Then its ranks wait for each other only
            at the very end of their programs.
        is_needed: Whether the group cannot continue without this rank.
    """

    membership: Membership
    watchdog: Watchdog

    def __init__(self, membership: Membership, topology: Topology, settings: Settings) -> None:
        self.topology, self.settings = topology, settings
        self.membership, self.awaited = membership, AwaitedPeers()
        self.comm = membership.comm.Dup()
        self._notes_comm = membership.comm.Dup()
        self.ranks = ranks_in_world(self.comm)
        self.watchdog = membership.make_watchdog(self.awaited, self._notes_comm, _REMEDY)
        self.arena: SharedArena | None = None
        self.recorder = membership.recorder
        self.timeout_seconds = settings.timeout_seconds
        self.end: Callable[[BaseException | None], Exception | None] = lambda error: None
        self.may_miss_ranks = False
        self.is_needed = True
        self._threads = ThreadGuard.of_group()
        self._is_gone = False  # freed, abandoned or forked
        open_groups.add(self)

    @classmethod
    def from_mpi(cls, comm: Intracomm, members: Sequence[int]) -> ServiceGroup | None:
        """Make the group of `members`, numbered in their order; `None` on other ranks. Collective over `comm`."""
        mpi = load_mpi()
        is_member = comm.rank in members
        color, key = (0, members.index(comm.rank)) if is_member else (mpi.UNDEFINED, 0)
        own = comm.Split(color, key)
        if not is_member:
            return None
        own = cast("Intracomm", own)
        settings, topology, token = discover(own)
        return cls(Membership(own, topology, token, settings), topology, settings)

    def share_memory(self, nbytes: int) -> None:
        """Share memory on all nodes, if all can: set `arena`, of which this rank takes `nbytes` at once. Collective."""
        topology, transport = self.topology, self.settings.transport
        if transport == "mpi" or max(topology.node_sizes) == 1:
            return
        comm, reason = self.membership.comm, None
        try:
            with on_node(comm, topology) as node:
                self.arena = None if node is None else SharedArena(node, nbytes)
        except UnavailableError as error:
            reason = f"rank {topology.rank}: {error}"
        reasons = [text for text in comm.allgather(reason) if text is not None]
        if not reasons:
            return
        if self.arena is not None:
            self.arena.free()
            self.arena = None
        report_no_shared_memory(reasons[0], transport, topology.rank, self.free)

    @property
    def is_open(self) -> bool:
        """Whether this rank may still send and receive in the group."""
        return not self._is_gone and not load_mpi().Is_finalized()

    def enter(self, call: str) -> None:
        """Check that this thread may make a call. Local."""
        if self._threads.here.token is not self._threads.admitted:
            self._threads.take_over(call)

    def begin_wait(self, what: str, ranks: Collection[int], timeout: float | None, serving: str | None = None) -> None:
        """Begin a wait, in which `watchdog.check_peers` raises if it cannot succeed: see `AwaitedPeers`. Local."""
        self.awaited.begin(what, ranks, timeout, serving)
        self.watchdog.begin()

    def free(self) -> None:
        """Free the communicators, with all ranks. Collective; every rank has ended its part before."""
        if not self.is_open or self.may_miss_ranks:  # a lost rank would block what all ranks do together
            self.abandon(has_ended=True)
            return
        notes = self.watchdog.stop_answering()
        request, has_notes = last_round(self.comm, any(notes.sent))
        others = [other for other in range(self.topology.size) if other != self.topology.rank]
        self.begin_wait("close()", others, None)  # for ever: a server may do other work after serve()
        try:
            poll_or_keep(request.Test, self.watchdog.check_peers, (request, has_notes.base))
        except BaseException:
            self.abandon(has_ended=True)
            raise
        if has_notes.any():  # MPI frees no communicator with messages left in it
            self.abandon(has_ended=True)
            return
        self._is_gone = True
        open_groups.remove(self, has_failed=False)
        if self.arena is not None:
            self.arena.free()
        self.comm.Free()
        self._notes_comm.Free()
        self.membership.free()

    def abandon(self, has_ended: bool = False) -> None:
        """Leave the group without freeing what only all ranks together can free. Local.

        `has_ended`: this rank's part has ended in order, so that no rank reads its memory any more.
        """
        if self._is_gone:
            return
        self._is_gone = True
        open_groups.remove(self, has_failed=True)
        if self.membership.trace is not None:
            self.membership.trace.end()
        if self.arena is not None and has_ended:
            self.arena.free()
        elif self.arena is not None:
            self.arena.close()

    def end_with_program(self) -> Exception | None:
        """See `OpenGroup.end_with_program`."""
        self._threads.end()
        try:
            return self.end(None)
        except Exception as error:  # no rank may wait for what this one does not do
            self.watchdog.tell_leaving(text_of(error))
            raise
        finally:
            self.abandon()

    def is_dispensable(self) -> bool:
        """See `OpenGroup.is_dispensable`. Without its servers the group does not continue either."""
        broken = self.watchdog.broken  # a deadline of this rank's own does not break the group of the others
        return self.may_miss_ranks and not self.is_needed and isinstance(broken, (NoneType, DeadlineExceededError))

    def is_own(self, error: BaseException | None) -> TypeGuard[BaseException]:
        """Whether an exception that leaves the strategy is a failure of this rank, and other ranks do not raise it."""
        return error is not None and not ends_normally(error) and not is_shared_by(error, self.ranks)

    def tell_leaving(self, text: str) -> None:
        """Notify the other ranks that this rank leaves because of an exception, if they have not noticed. Local.

        The others have noticed if this rank's failure follows that of another rank. If this rank itself found that a
        deadline has passed or a process is gone, only ranks that waited for the same have noticed.
        """
        broken = self.watchdog.broken
        self.watchdog.tell_leaving(text, others_know=broken is not None and following_of(broken) is not None)

    def leave(self, error: BaseException) -> None:
        """See `OpenGroup.leave`."""
        if self.is_open:
            self.end(error)

    def wait_for_peers_at_exit(self) -> str | None:
        """See `OpenGroup.wait_for_peers_at_exit`."""
        if self.may_miss_ranks:
            return self.membership.wait_for_live_peers_at_exit()  # for ever, as they may have hours of work left
        return self.membership.wait_for_peers_at_exit()

    def disown(self) -> None:
        """See `OpenGroup.disown`."""
        self._is_gone = True
        self._threads.disown()

    def lose(self, rank: int, error: Exception) -> None:
        """Record that a rank is lost, as an error of MPI shows; raise if the group cannot continue without it. Local.

        Any other error is raised: a loss is reported by MPI, or the process of the rank is gone.
        """
        is_of_mpi = isinstance(error, load_mpi().Exception)
        if not (is_process_failure(error) or (is_of_mpi and rank in self.membership.gone())):
            raise error
        if rank in self.awaited.dispensable:
            self.watchdog.go_on_without((rank,))
        elif self.watchdog.broken is not None:
            raise repeat_of(self.watchdog.broken)
        else:
            self.watchdog.give_up(f"MPI has found that the process of rank {rank} has failed")

    def is_of_this_thread(self) -> bool:
        """Whether this thread makes the group's calls."""
        return not self._is_gone and self._threads.is_of_this_thread()
