"""A group of ranks that ask each other for services: requests at any time, no calls in lock step, and one common end.

Where a `SyncGroup` numbers calls that all ranks make, the ranks of this group send messages whenever they like. What a
rank waits for, and when it may stop to wait, its `Watchdog` asks an `Awaited` of the caller's.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast, final

import numpy as np

from mpidist.errors import UnavailableError
from mpidist.transport.failures import Awaited, GroupFlight, OpenGroup, Watchdog, open_groups
from mpidist.transport.group.discovery import (
    agreed_token,
    communicators,
    discover,
    own_settings,
    wait_for_all_ranks,
)
from mpidist.transport.group.membership import Membership
from mpidist.transport.mpi import Intracomm, load_mpi, ranks_in_world
from mpidist.transport.settings import Settings
from mpidist.transport.shared_memory import SharedArena
from mpidist.transport.topology import Topology
from mpidist.transport.waiting import poll_or_keep

__all__ = ["Service", "ServiceGroup", "meet_ranks"]

logger = logging.getLogger("mpidist.transport")

_REMEDY: Final = "Close the strategy, end the job, and start it again"


class Service(ABC):
    """What a rank does in a strategy whose ranks are not in lock step.

    Attributes:
        topology: The ranks that do the same as this one, and their nodes.
        is_chief: Whether this rank writes checkpoints, summaries and progress.
    """

    topology: Topology
    is_chief: bool

    @abstractmethod
    def close(self, error: BaseException | None) -> None:
        """End this rank's part. `error`: the exception that leaves the strategy."""

    @abstractmethod
    def meet_peers(self, call: str, error: Exception | None = None) -> None:
        """Wait until all ranks that do the same as this one make a call, and all that they have changed is changed.

        Args:
            call: What the ranks do, for people.
            error: What went wrong on this rank; raised here, and told to the others.

        Raises:
            InvalidArgumentError: If ranks differ, or another one has an error.
        """


def meet_ranks(comm: Intracomm | None, item: Any) -> tuple[Intracomm, list[Any]]:
    """Wait until all ranks come to build a group, and gather a picklable item of each. Collective.

    Args:
        comm: An intra-communicator of mpi4py; `None` is `MPI.COMM_WORLD`.
        item: What the other ranks shall know of this one.

    Returns:
        The communicator, and the items in rank order.

    Raises:
        TypeError: If `comm` is something else.
        UnavailableError: If there is no MPI.
        TopologyError: If the processes are no ranks of one MPI world.
        DeadlineExceededError: If some ranks do not come within `MPIDIST_TIMEOUT_SECONDS`.
    """
    comm, world = communicators(comm)
    settings = own_settings()
    open_groups.install_job_abort(world, settings.abort_on_error)
    wait_for_all_ranks(comm, settings)
    return comm, comm.allgather(item)


@final
class ServiceGroup(OpenGroup):
    """Ranks that send each other requests. `from_mpi` makes one, on all its ranks.

    Args:
        membership: The ranks, and what they know of each other.
        topology: The nodes of the ranks.
        settings: The settings that were read from the environment.
        awaited: What this rank waits for, whenever it waits.

    Attributes:
        topology: The nodes of the ranks.
        settings: The settings.
        comm: The communicator of the requests.
        ranks: The ranks, as they are numbered in the whole job.
        watchdog: What a rank checks while it waits.
        arena: Memory that the ranks of this node share; `None` before `share_memory`, or where they share none.
        end: Ends this rank's part; called if the program ends and has not done so itself.
        may_miss_ranks: Whether the group goes on without ranks that have left, and waits for them at the very end.
    """

    def __init__(self, membership: Membership, topology: Topology, settings: Settings, awaited: Awaited) -> None:
        self.topology, self.settings = topology, settings
        self._membership = membership
        self.comm = membership.comm.Dup()
        self._notes_comm = membership.comm.Dup()
        self.ranks = ranks_in_world(self.comm)
        self.watchdog: Watchdog = membership.make_watchdog(awaited, self._notes_comm, _REMEDY)
        self.arena: SharedArena | None = None
        self.end: Callable[[], None] = lambda: None
        self.may_miss_ranks = False
        self._is_gone = False  # freed, abandoned or forked
        open_groups.add(self)

    @classmethod
    def from_mpi(cls, comm: Intracomm, members: Sequence[int], awaited: Awaited) -> ServiceGroup | None:
        """Make the group of some ranks of a communicator. Collective over the communicator.

        Args:
            comm: What `meet_ranks` returned.
            members: The ranks, in the order that numbers them in the group.
            awaited: What this rank waits for, whenever it waits.

        Returns:
            The group; `None` on ranks that are no members.

        Raises:
            ValueError: If an `MPIDIST_` variable cannot be understood. On every member.
            TopologyError: If settings or versions differ. On every member.
        """
        mpi = load_mpi()
        is_member = comm.rank in members
        color, key = (0, members.index(comm.rank)) if is_member else (mpi.UNDEFINED, 0)
        own = comm.Split(color, key)
        if not is_member:
            return None
        own = cast("Intracomm", own)
        world = mpi.COMM_WORLD
        settings, topology = discover(own, world)
        token = agreed_token(own)
        return cls(Membership(own, topology, world, token, settings.stall_seconds), topology, settings, awaited)

    def share_memory(self, nbytes: int) -> None:
        """Let the ranks of each node share memory, if they can, on all nodes or none: set `arena`. Collective.

        Args:
            nbytes: How much memory this rank takes at once, from the start of its part.

        Raises:
            UnavailableError: If shared memory is required and not available. On every rank.
        """
        topology, transport = self.topology, self.settings.transport
        if transport == "mpi" or max(topology.node_sizes) == 1:
            return
        node = cast("Intracomm", self._membership.comm.Split(topology.node, topology.rank))
        reason = None
        try:
            self.arena = SharedArena(node, nbytes) if node.size > 1 else None
        except UnavailableError as error:
            reason = f"rank {topology.rank}: {error}"
        node.Free()
        reasons = [text for text in self._membership.comm.allgather(reason) if text is not None]
        if not reasons:
            return
        if self.arena is not None:
            self.arena.free()
            self.arena = None
        if transport == "shared_memory":
            self.free()
            raise UnavailableError(f"MPIDIST_TRANSPORT=shared_memory cannot be followed: {reasons[0]}")
        if topology.rank == 0:
            logger.warning("ranks of a node send messages instead of sharing memory, which is slower: %s", reasons[0])

    @property
    def is_open(self) -> bool:
        """Whether this rank may still send and receive in the group."""
        return not self._is_gone and not load_mpi().Is_finalized()

    def free(self) -> None:
        """Free the communicators, with all ranks. Collective; every rank has ended its part before."""
        if not self.is_open:
            self.abandon()
            return
        notes = self.watchdog.stop_answering()
        own, united = np.array([any(notes.sent)], np.int64), np.empty(1, np.int64)
        request = self.comm.Iallreduce(own, united, load_mpi().BOR)
        self.watchdog.begin()
        poll_or_keep(request.Test, self.watchdog.check_peers, (request, own, united))
        if united[0]:  # MPI frees no communicator with messages left in it
            self.abandon()
            return
        self._is_gone = True
        open_groups.remove(self, has_failed=False)
        if self.arena is not None:
            self.arena.free()
        self.comm.Free()
        self._notes_comm.Free()
        self._membership.free()

    def abandon(self) -> None:
        """Leave to the end of the program what only all ranks together could free. Local."""
        if not self._is_gone:
            self._is_gone = True
            open_groups.remove(self, has_failed=True)

    def end_with_program(self) -> None:
        """See `OpenGroup.end_with_program`."""
        try:
            self.end()
        finally:
            self.abandon()

    def wait_for_peers_at_exit(self) -> str | None:
        """See `OpenGroup.wait_for_peers_at_exit`. Where ranks may be missed, the others may have hours of work left."""
        if self.may_miss_ranks:
            return self._membership.wait_for_peers_at_exit(float("inf"))
        return self._membership.wait_for_peers_at_exit()

    def disown(self) -> None:
        """See `OpenGroup.disown`."""
        self._is_gone = True

    def advance(self) -> None:
        """See `OpenGroup.advance`: nothing is started that others wait for."""

    def tell_end(self, text: str) -> None:
        """See `OpenGroup.tell_end`."""
        if self.is_open:
            self.watchdog.tell_end(text)

    def has_lower_rank_ended(self) -> bool:
        """See `OpenGroup.has_lower_rank_ended`."""
        return not load_mpi().Is_finalized() and self.watchdog.has_lower_rank_ended()

    def flights(self) -> Mapping[int, GroupFlight]:
        """See `OpenGroup.flights`."""
        return self._membership.flights()

    @property
    def folder(self) -> Path | None:
        """The folder of the flight recorders."""
        return self._membership.folder

    def is_of_this_thread(self) -> bool:
        """Whether this thread makes the group's calls: a process has one thread that does."""
        return os.getpid() > 0 and not self._is_gone
