"""The part of a rank's group that stays the same through every reset: the ranks, the status board, the exit barrier."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final, cast, final

import numpy as np

from mpidist.errors import DeadlineExceededError, PeerFailedError, UnavailableError
from mpidist.transport.failures import job_abort, open_groups
from mpidist.transport.failures.call_watchdog import CallWatchdog
from mpidist.transport.failures.flight_files import GroupFlight, flight_folder
from mpidist.transport.failures.flight_recorder import FlightRecorder
from mpidist.transport.failures.status_board import RESET, StatusBoard
from mpidist.transport.failures.stragglers import Awaited, Stragglers
from mpidist.transport.failures.watchdog import PROBES, Watchdog
from mpidist.transport.group.exit_barrier import ExitBarrier
from mpidist.transport.group.levels import on_node
from mpidist.transport.mpi.child_process import launcher_or_parent
from mpidist.transport.mpi.library import (
    Intracomm,
    failed_ranks,
    is_process_failure,
    last_round,
    load_mpi,
    numbers_in_world,
)
from mpidist.transport.settings import Settings
from mpidist.transport.stacks import places_text
from mpidist.transport.text import name_ranks
from mpidist.transport.topology import Topology
from mpidist.transport.trace.trace import Gather, Trace, begin_trace, end_trace
from mpidist.transport.waiting import poll_or_keep

__all__ = ["Membership"]

_EXIT_SECONDS: Final = 30.0  # how long a rank waits for others to end their work, after a call that failed
_LOST_SECONDS: Final = 1.0  # the same, if a rank is known to have ended
_LOST_CHECK_SECONDS: Final = 0.5  # between two checks of the processes of all ranks of the node


@final
class Membership:
    """One rank's membership in a group. Making it is collective.

    Args:
        comm: The ranks. This object owns and frees the communicator.
        token: A name of the group, the same on all ranks.

    Attributes:
        world_rank: This rank, as it is numbered in the whole job.
        folder: The folder of the flight recorders; `None` if none are kept.
    """

    def __init__(self, comm: Intracomm, topology: Topology, token: str, settings: Settings) -> None:
        self.comm = comm
        self.folder: Path | None = flight_folder(os.environ, token)
        self._topology = topology
        self._stall_seconds = settings.stall_seconds
        self._token = token
        self._world_ranks = numbers_in_world(comm)
        self.world_rank = self._world_ranks[comm.rank]
        with on_node(comm, topology) as node:
            self._board = StatusBoard(node, topology.nodes[topology.node])
        self._exit_comm = comm.Dup()  # for the one barrier at exit: no call was ever abandoned in it
        if topology.size == 1:
            open_groups.alone.add(self)
        self._reset_watchdog = self.make_call_watchdog(comm, "End the job, and start it again")
        self.trace: Trace | None = None
        if settings.trace:
            try:
                self.begin_trace(Path(settings.trace), comm.allgather, is_of_job=True)
            except UnavailableError:
                self.free()
                raise

    @property
    def recorder(self) -> FlightRecorder:
        """This rank's flight recorder."""
        return self._board.recorder

    def in_world(self, ranks: Iterable[int]) -> frozenset[int]:
        """Number some ranks as they are numbered in the whole job. Local."""
        return frozenset(self._world_ranks[rank] for rank in ranks)

    def gone(self) -> tuple[int, ...]:
        """List the ranks of this node whose processes are gone. Local."""
        return self._board.gone()

    def status_lines(self, ranks: Iterable[int]) -> list[str]:
        """Describe the state of each of some ranks, if it is on this node. Local."""
        statuses = {rank: self._board.status(rank) for rank in ranks if rank in self._board.ranks}
        return [f"rank {rank}: {status}" for rank, status in self._board.located(statuses).items()]

    def make_call_watchdog(self, comm: Intracomm, remedy: str) -> CallWatchdog:
        """Make the watchdog of calls in a communicator of the same ranks. Local."""
        hostnames = self._topology.hostnames
        return CallWatchdog(comm, self._board, hostnames, self._stall_seconds, remedy, open_groups.save_flights)

    def make_watchdog(self, awaited: Awaited, comm: Intracomm, remedy: str) -> Watchdog:
        """Make the watchdog of a rank whose calls are not in lock step, in a communicator of the same ranks. Local."""
        hostnames, save = self._topology.hostnames, open_groups.save_flights
        return Watchdog(awaited, comm, self._board, hostnames, self._stall_seconds, remedy, save)

    def all_gather_at_reset(
        self, flags: tuple[int, int], timeout: float | None, calls: Watchdog | None
    ) -> list[tuple[int, int]]:
        """Wait until all ranks call `reset`, and all-gather two numbers of each. Collective.

        `calls`: the watchdog of the calls before the reset, which receives the notes of ranks that have left.
        """
        call_watchdog, watchdog = self._reset_watchdog, self._reset_watchdog.watchdog

        def check_peers() -> None:
            if calls is not None:
                calls.require_nobody_left()
            call_watchdog.check_peers()

        if calls is not None:
            calls.require_nobody_left(PROBES)
        if watchdog.broken is not None:
            raise type(watchdog.broken)(f"an earlier reset() failed: {watchdog.broken}")
        call_watchdog.begin(RESET, "reset()", "", timeout)
        watchdog.require_no_notes(PROBES)
        own, gathered = np.array(flags, np.int64), np.empty((self.comm.size, 2), np.int64)
        try:
            for _ in range(2):  # a rank that arrives after others gave up completes the first round, not the second
                request = self.comm.Iallgather(own, gathered)
                poll_or_keep(request.Test, check_peers, (request, own, gathered))
        except (DeadlineExceededError, PeerFailedError, load_mpi().Exception):
            raise
        except BaseException as error:  # Ctrl-C, for example: the next reset() would join the round of this one
            watchdog.break_off(error, f"reset() was interrupted by {type(error).__name__}")
            raise
        self._board.recorder.end()
        return [(first, second) for first, second in gathered.tolist()]

    def wait_for_peers_at_exit(self) -> str | None:
        """See `OpenGroup.wait_for_peers_at_exit`."""
        start, has_told = time.monotonic(), False
        next_check = _LOST_SECONDS

        def check_peers() -> None:
            nonlocal has_told, next_check
            waited = time.monotonic() - start
            if waited < next_check:
                return
            next_check = waited + _LOST_CHECK_SECONDS
            lost = self._lost_ranks()
            if lost.known:
                raise PeerFailedError(f"a call failed before, and not all ranks can end: {'; '.join(lost.lines())}")
            if waited > _EXIT_SECONDS:
                what = "other ranks did not come to their end"
                raise DeadlineExceededError(f"a call failed before, and {what} within {_EXIT_SECONDS:g} s")
            if not has_told:
                has_told = True
                job_abort.write_line(
                    f"waits up to {_EXIT_SECONDS:g} s for other ranks to end, because a call failed before"
                )

        try:
            request, memory = last_round(self._exit_comm, False)
            poll_or_keep(request.Test, check_peers, (request, memory.base))
        except (PeerFailedError, DeadlineExceededError) as error:
            return str(error)
        except load_mpi().Exception as error:
            if not is_process_failure(error):
                raise
            failed = name_ranks(failed_ranks(self._exit_comm, self.comm)) or "another rank"
            return f"a call failed before, and MPI has found that {failed} cannot end: its process has failed"
        return None

    def shrink(self) -> Intracomm:
        """Make a communicator of the ranks that live, once all of them make this call. Collective over these.

        MPI's part of it blocks: it can neither be interrupted nor name the ranks that it waits for.
        """
        self.wait_for_live_peers_at_exit("shrink()")
        return cast("Intracomm", self.comm.Shrink())  # mpi4py's stubs call it a Comm

    def wait_for_live_peers_at_exit(self, place: str = "its end") -> str | None:
        """See `OpenGroup.wait_for_peers_at_exit`. Waits for ever, but not for ranks that are lost."""
        board, write_line = self._board, job_abort.write_line
        barrier = ExitBarrier(
            self._exit_comm, board.found_gone, self._stall_seconds, write_line, board.gone(), self._places_of, place
        )
        return barrier.wait()

    def flights(self) -> dict[int, GroupFlight]:
        """Read the flight recorders of this rank, and of ranks of its node that are late, by rank of the world."""
        board, size = self._board, self._topology.size
        own = board.status(board.rank)
        at = 0 if own.last is None else own.last.sequence
        statuses = board.statuses()
        joined = [rank for rank, status in statuses.items() if status.has_joined(at)]
        is_speaker = board.rank == min(joined, default=board.rank)
        behind = [rank for rank in statuses if rank not in joined] if is_speaker else []
        return {
            self._world_ranks[rank]: GroupFlight(
                self._token, rank, size, statuses[rank].process, statuses[rank].pid, board.entries(rank)
            )
            for rank in sorted({board.rank, *behind})
        }

    def begin_trace(self, folder: Path, gather: Gather, is_of_job: bool = False) -> Trace:
        """Begin to record this rank's calls: `trace.begin_trace`. Collective."""
        self.trace = begin_trace(self.comm, folder, self._token, self.recorder, gather, is_of_job)
        return self.trace

    def end_trace(self) -> None:
        """End the trace, if there is one. Collective."""
        trace, self.trace = self.trace, None
        if trace is not None:
            end_trace(self.comm, trace)

    def free(self) -> None:
        """Free the communicator and the board. Collective."""
        open_groups.alone.discard(self)
        self.end_trace()
        self._exit_comm.Free()
        self.comm.Free()
        self._board.free()

    def _places_of(self, ranks: Collection[int]) -> str:
        return places_text(launcher_or_parent(), self.in_world(ranks))

    def _lost_ranks(self) -> Stragglers:
        """Return the ranks of this node whose processes have ended or stopped."""
        lost = {rank: status for rank, status in self._board.statuses().items() if not status.is_able}
        return Stragglers(lost, (), self._topology.hostnames)
