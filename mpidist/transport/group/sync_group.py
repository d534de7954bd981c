"""A group of ranks that make the same calls: its topology, its communicators, and its end."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from threading import Thread
from typing import Any, Final, final

from mpidist.errors import DeadlineExceededError, PeerFailedError, TopologyError, UnavailableError
from mpidist.transport.agreement.agreement import CLOSE, END, Agreement, Call, CallRecord, SoloAgreement
from mpidist.transport.agreement.fingerprint import StepExit
from mpidist.transport.agreement.mpi_agreement import MpiAgreement
from mpidist.transport.agreement.slow_ranks import SlowRanks
from mpidist.transport.costs.cost_model import CostModel
from mpidist.transport.failures import job_abort, open_groups
from mpidist.transport.failures.exit_code import ends_normally
from mpidist.transport.failures.open_groups import OpenGroup
from mpidist.transport.failures.process_end import end_without_mpi
from mpidist.transport.failures.watchdog import Watchdog
from mpidist.transport.group.device_levels import DeviceLevels
from mpidist.transport.group.discovery import agreed_cost_model, await_ranks, discover
from mpidist.transport.group.levels import Levels
from mpidist.transport.group.membership import Membership
from mpidist.transport.group.started_calls import PendingCalls, Workplace
from mpidist.transport.group.thread_guard import IN_A_FORK, ThreadGuard
from mpidist.transport.host_memory.result_memory import ResultMemory, most_result_bytes
from mpidist.transport.mpi.library import Intracomm, is_process_failure, load_mpi, ranks_in_world, survives_losses
from mpidist.transport.node_memory.symmetric import SharedArrays
from mpidist.transport.settings import Settings
from mpidist.transport.shared_errors import following_of, is_shared_by, mark_shared
from mpidist.transport.text import text_of
from mpidist.transport.topology import Topology

__all__ = ["SyncGroup"]

# What may follow the loss of a rank, and what people can do after a call that failed.
_REMEDIES: Final = {
    "end": "The strategy is unusable until strategy.reset() is called on all ranks",
    "shrink": "The strategy is unusable: the surviving ranks can continue with strategy.shrink()",
}


@final
class SyncGroup(OpenGroup):
    """Ranks that make the same calls in the same order. `solo` and `from_mpi` make groups.

    Attributes:
        topology: The nodes of the ranks.
        levels: The communicators of the topology, for host memory; `levels_of` returns those for device memory.
        devices: The communicators for device memory, which are made at their first use.
        shared: The arrays in shared memory of the node.
        result_memory: Memory for results in host memory.
        forms: What calls keep by the form of their arguments, until a reset.
        settings: The settings that were read from the environment.
        cost_model: The speeds of the machine.
        calls: The started calls that are not done.
        membership: What stays the same through every reset; `None` for a group of one without MPI.
        trace: The trace of this rank's calls; `None` if they are not traced.
        agreement: Checks that all ranks make the same calls.
        on_rank_lost: What may follow the loss of a rank: the argument of the strategy.
    """

    membership: Membership | None

    def __init__(
        self, membership: Membership | None, topology: Topology, settings: Settings, cost_model: CostModel
    ) -> None:
        self.membership, self.topology, self.settings, self.cost_model = membership, topology, settings, cost_model
        self.trace = None if membership is None else membership.trace
        self._threads = None if membership is None else ThreadGuard.of_group()
        self._handled_exception = sys.exc_info()[1]  # the exception that the program was handling in the last call
        self._is_finalized: Callable[[], bool] = bool if membership is None else load_mpi().Is_finalized
        self._is_closed = self._is_forked = False  # forked: this process is a child of the one that made the group
        self.on_rank_lost = "end"
        self._sequence = 0  # the number of the last call before a reset
        self.calls: PendingCalls
        self.levels: Levels
        self.devices: DeviceLevels
        self.agreement: Agreement
        limit = settings.result_bytes
        self.result_memory = ResultMemory(most_result_bytes(topology.local_size) if limit is None else limit)
        self._connect()
        self.shared = SharedArrays(self.levels.within_node)

    @classmethod
    def solo(cls) -> SyncGroup:
        """Make the group of this process alone. Needs no MPI."""
        settings = Settings.from_environment(os.environ)
        settings.apply_log_level()
        return cls(None, Topology(0, (0,), (socket.gethostname(),)), settings, CostModel())

    @classmethod
    def from_mpi(cls, comm: Intracomm | None) -> SyncGroup:
        """Make the group of an MPI communicator's ranks. Collective over it.

        Args:
            comm: An intra-communicator of mpi4py; `None` is `MPI.COMM_WORLD`.

        Raises:
            TypeError: If `comm` is something else.
            UnavailableError: If there is no MPI.
            TopologyError: If the processes are no ranks of one MPI world, if settings or versions differ, or if this
                process is a child of a rank.
            ValueError: If an `MPIDIST_` variable cannot be understood.
        """
        comm = await_ranks(comm)
        ranks = ranks_in_world(comm)
        try:
            return cls._of_duplicate(comm.Dup())
        except load_mpi().Exception as error:  # on all ranks, where there is no communicator left
            if is_process_failure(error):
                raise
            raise open_groups.no_communicators_left(error, ranks) from error
        except (ValueError, TopologyError, UnavailableError) as error:
            mark_shared(error, ranks)
            raise

    @classmethod
    def _of_duplicate(cls, comm: Intracomm) -> SyncGroup:
        """Make the group of all ranks of a communicator, which the group will own and free. Collective."""
        settings, topology, token = discover(comm)
        model = agreed_cost_model(comm, topology)
        membership = Membership(comm, topology, token, settings)
        try:
            return cls(membership, topology, settings, model)
        except UnavailableError:
            membership.free()
            raise

    def require_open(self, call: str) -> None:
        """Check that the group is open, and that this process made it.

        Raises:
            RuntimeError: If the group is closed, or belongs to the parent of this process.
        """
        if self._is_forked:
            raise RuntimeError(f"{call} {IN_A_FORK}")
        if self._is_closed:
            raise RuntimeError(f"{call} on a closed {self.owner}: it was closed, make a new one")
        if self._is_finalized():
            self.require_mpi(call)

    def require_mpi(self, call: str) -> None:
        """Check that the program has not finalized MPI.

        Raises:
            RuntimeError: If MPI was finalized.
        """
        if self._is_finalized():
            advice = "close strategies before, or leave ending MPI to mpidist"
            raise RuntimeError(f"{call} after MPI.Finalize(): the program has ended MPI; {advice}")

    def levels_of(self, device: bool, nccl_everywhere: bool = False) -> Levels:
        """Return the communicators for host or device memory. Collective at the first use for device memory.

        Args:
            device: Whether to return those for device memory.
            nccl_everywhere: Whether to require NCCL also between nodes: `DeviceLevels.levels`.
        """
        return self.devices.levels(nccl_everywhere) if device else self.levels

    def host_levels_of(self, device: bool) -> Levels:
        """Return the communicators that use no NCCL, for host or device memory. Local."""
        return self.devices.staged if device else self.levels

    @property
    def overflowed(self) -> int:
        """Number of finite values that this rank rounded to an infinite float16, since the last reset."""
        return self.levels.overflowed + self.devices.overflowed

    def enter(self, call: str) -> None:
        """Check that this rank can make a call: the group is open, and this thread makes its calls. Local.

        Raises:
            RuntimeError: If the rank cannot. Other ranks do not raise.
        """
        if self._is_closed or self._is_finalized():
            self.require_open(call)
        if self._threads is not None and self._threads.here.token is not self._threads.admitted:
            self._threads.take_over(call)
        if self.agreement.waiting_thread:
            self.agreement.require_no_wait(call)
        if self.trace is not None:
            self.trace.enter()
        self._handled_exception = sys.exc_info()[1]

    def lent_to_this_thread(self, call: str, lender: Thread) -> AbstractContextManager[None]:
        """Make calls in this thread for `lender`, which waits for it, as if they were that thread's own. Local."""
        return nullcontext() if self._threads is None else self._threads.lend(call, lender)

    def agree(self, record: CallRecord) -> bool:
        """Finish started calls, then `Agreement.join`: compare the call on all ranks. Collective; after `enter`."""
        if self.calls.queue or self.calls.launched:
            self.calls.finish()
        with self.breaking_off():
            return self.agreement.join(record)

    @contextmanager
    def call(self, record: CallRecord) -> Iterator[bool]:
        """Agree on a call with all ranks; the body does this rank's part. Yields what `agree` returns. Collective."""
        self.enter(record.name)
        if self.calls.queue or self.calls.launched:  # started calls get their sequence numbers before this call
            self.calls.finish()
        with self.data_phase():
            yield self.agreement.join(record)

    def break_off(self, error: BaseException) -> None:
        """Break off a call because of this rank's error, and notify the other ranks: `Agreement.break_off`. Local."""
        if isinstance(error, PeerFailedError) and (cause := self.calls.read_error()) not in (None, error):
            error.__cause__ = cause
        if not self._is_closed:
            self.agreement.break_off(error)

    @contextmanager
    def breaking_off(self) -> Iterator[None]:
        """Break off if the body raises: this rank has begun a call that other ranks make, too. Local."""
        try:
            yield
        except GeneratorExit:  # `reset` or `close` has abandoned the call
            raise
        except BaseException as error:
            self.break_off(error)
            raise

    @contextmanager
    def data_phase(self) -> Iterator[None]:
        """End a call after the body, which joins the call and does this rank's part; break off if the body raises."""
        number = self.agreement.sequence + 1
        with self.breaking_off():
            yield
            if self.agreement.sequence == number:  # else another call was joined since the launch on a GPU
                self.agreement.end()

    def disown(self) -> None:
        """Mark the group as closed in a forked child: it belongs to the parent process. Local."""
        self._is_forked = self._is_closed = True
        self.calls = PendingCalls(self.agreement)

    def reset(self) -> None:
        """Replace the communicators by new ones. Collective over all ranks.

        If the group failed on any rank, the old communicators are not freed: messages of the failed call may still be
        incomplete.

        Raises:
            DeadlineExceededError: If not all ranks call `reset` in time.
            PeerFailedError: If a rank's process has ended.
        """
        self.enter("reset()")
        if self.calls.queue or self.calls.launched:  # other ranks may wait for this rank in started calls
            self.agreement.break_off(RuntimeError("reset() gave up a call that was started"))
        self.calls.abandon("reset()")
        if self.membership is not None:
            if self.watchdog is not None:
                self.watchdog.tell_reset()
            state = self.agreement.broken is not None, self.agreement.sequence
            flags = self.membership.all_gather_at_reset(state, self.settings.timeout_seconds, self.watchdog)
            self._sequence = max(sequence for _, sequence in flags)
            if any(failed for failed, _ in flags):
                self.result_memory.clear()
                self.devices.abandon()
                self.levels.abandon()
                self.agreement.abandon()
            else:
                self._free_levels()
        self._connect()
        self.shared.within_node = self.levels.within_node

    def choose_on_rank_lost(self, choice: object) -> None:
        """Choose the policy after the loss of a rank. Local; once.

        Raises:
            ValueError: If it is neither "end" nor "shrink".
            UnavailableError: If MPI cannot continue without a lost process.
        """
        if choice not in tuple(_REMEDIES):
            raise ValueError(f"on_rank_lost must be {' or '.join(map(repr, _REMEDIES))}, got {choice!r}")
        if choice == "shrink" and self.membership is not None and not survives_losses():
            raise UnavailableError(
                "on_rank_lost='shrink' needs Open MPI, started with `mpirun --with-ft ulfm`: this MPI ends with a lost "
                "process. With every MPI, `mpidist run --max-restarts` starts the ranks that are left again"
            )
        self.on_rank_lost = str(choice)
        if self.watchdog is not None:
            self.watchdog.remedy = _REMEDIES[self.on_rank_lost]

    def shrink(self) -> Intracomm:
        """Leave the group, in which a call has failed, with the other ranks that live. Collective over these.

        Returns:
            A communicator of the ranks that live, in the order of the group.

        Raises:
            RuntimeError: If the strategy was not made for this, or no call has failed.
        """
        self.enter("shrink()")
        if self.on_rank_lost != "shrink":
            raise RuntimeError('shrink() on a strategy that was not made with on_rank_lost="shrink"')
        if self.membership is None or self.agreement.broken is None:
            raise RuntimeError("shrink() follows a call that raised PeerFailedError, and none of this strategy has")
        self._is_closed = True
        self.calls.abandon("shrink()")
        self._give_up(awaits_peers=False)
        end_without_mpi(watches=not self.settings.abort_on_error)
        return self.membership.shrink()

    def close(self, timeout_seconds: float | None = None, error: BaseException | None = None) -> None:
        """Free the communicators. Collective; a second call does nothing.

        If an exception of this rank alone leaves the strategy, this rank waits for no other, but reports to them the
        exception.

        Args:
            timeout_seconds: How long to wait for the other ranks; `None` is the group's own deadline, 0 for ever.
            error: The exception that leaves the strategy; `None` for none.

        Raises:
            PeerFailedError: If another rank makes another call, or has left because of an exception.
            Exception: That of a started call for whose result nobody has asked, if no exception leaves the strategy.
            DeadlineExceededError: If not all ranks close in time.
            RuntimeError: If the program has finalized MPI.
        """
        if self._is_closed:
            return
        if error is not None and self.watchdog is not None and self._is_own(error):
            self._leave(self.watchdog, error)
            return
        try:
            self.require_mpi(CLOSE)
        except RuntimeError:
            self._is_closed = True
            open_groups.remove(self, has_failed=False)
            raise
        calls = self.calls
        why = {} if error is None or ends_normally(error) else {"exception": text_of(error)}
        self._close(Call(CLOSE, describe=lambda: why, timeout_seconds=timeout_seconds, is_last=True))
        if error is None and (unread := calls.read_error()) is not None:
            raise unread

    def end_with_program(self) -> BaseException | None:
        """See `OpenGroup.end_with_program`. No deadline: other ranks may have hours of local work left."""
        if self._threads is not None:
            self._threads.end()
        calls = self.calls
        with suppress(DeadlineExceededError):  # other ranks have given up waiting
            self._close(Call(END, timeout_seconds=0.0, is_last=True))
        return calls.read_error()

    def record_step_exit(self, step: int, error: BaseException) -> None:
        """Record that an exception left a step on this rank, for this rank's next call to compare. Local.

        Args:
            step: The number of the step.
            error: The exception.
        """
        is_own = not (self.agreement.has_raised(error) or is_shared_by(error, self.agreement.ranks))
        self.agreement.step_exit = StepExit(step, text_of(error), is_own).after(self.agreement.step_exit)

    def _is_own(self, error: BaseException) -> bool:
        """Whether an exception is a failure of this rank alone, to be reported to the other ranks."""
        if error is self._handled_exception or ends_normally(error):
            return False
        return not (self.agreement.has_raised(error) or is_shared_by(error, self.agreement.ranks))

    def _leave(self, watchdog: Watchdog, error: BaseException) -> None:
        """Leave the group because of an exception of this rank, and notify the other ranks. Local."""
        if not self._is_finalized():
            follows = following_of(error) is not None
            watchdog.tell_leaving(text_of(error), done=self.calls.last_done(), follows=follows)
        self.calls.abandon("an exception that left the strategy")
        self._is_closed = True
        self._give_up()

    def _close(self, leaving: CallRecord) -> None:
        self.agreement.require_no_wait(leaving.name)
        if (self.calls.queue or self.calls.launched) and self.agreement.broken is None:
            self.calls.finish()
        self.calls.abandon(leaving.name)
        self._is_closed = True
        try:
            if self.agreement.broken is None:
                self.agreement.join(leaving)
                self.agreement.end()
            if self.agreement.broken is None:
                open_groups.remove(self, has_failed=False)
                self.shared.free()
                self._free_levels()  # may fail, too: a rank may break off that has done its part in the call
        finally:
            if has_failed := self.agreement.broken is not None:
                self._give_up()
        if has_failed:
            return
        if self.membership is not None:
            self.membership.free()

    def _give_up(self, awaits_peers: bool = True) -> None:
        """Abandon what only all ranks together could free. Local."""
        open_groups.remove(self, has_failed=awaits_peers and self.membership is not None)
        if awaits_peers and self.watchdog is not None and not self._is_finalized():
            self.watchdog.tell_closed()
        if self.trace is not None:
            self.trace.end()
        self.result_memory.clear()
        self.devices.abandon()
        self.levels.abandon()
        self.agreement.abandon()
        self._connect_alone()  # drops the old levels, and so their memory; the membership stays until the program ends
        self.shared = SharedArrays(self.levels.within_node)

    def advance(self) -> None:
        """See `OpenGroup.advance`."""
        if (self.calls.queue or self.calls.launched) and self.is_of_this_thread():
            self.calls.advance()

    def is_dispensable(self) -> bool:
        """See `OpenGroup.is_dispensable`."""
        return self.on_rank_lost == "shrink" and self.topology.size > 1

    def leave(self, error: BaseException) -> None:
        """See `OpenGroup.leave`. The other ranks shrink the group; MPI_Abort hangs where they can."""
        job_abort.end_as_lost_rank(error)

    def is_of_this_thread(self) -> bool:
        """Whether this thread makes the group's calls."""
        return self._threads is not None and self._threads.is_of_this_thread()

    def _free_levels(self) -> None:
        self.result_memory.clear()
        self.devices.free()
        self.agreement.restart_clock()  # the wait begins now, and not with the last call
        self.agreement.free()
        self.levels.free()

    def _connect(self) -> None:
        self.forms: dict[Hashable, Any] = {}
        membership, settings = self.membership, self.settings
        if membership is None or self.topology.size == 1:
            self._connect_alone()
            return
        comm, check, timeout = membership.comm, settings.check, settings.timeout_seconds
        self.levels = Levels.from_mpi(comm, self.topology, settings.transport, self.cost_model)
        comm, fused = comm.Dup(), self.levels.fused
        barrier = None if fused is None or fused.spans_nodes else fused.slots.barrier
        call_watchdog = membership.make_call_watchdog(comm, _REMEDIES[self.on_rank_lost])
        self.watchdog = watchdog = call_watchdog.watchdog
        watchdog.advance_others = partial(open_groups.advance_others, self)
        slow_ranks = SlowRanks(call_watchdog.recorder, self.topology, settings.straggler_seconds)
        self.agreement = MpiAgreement(comm, call_watchdog, slow_ranks, check, timeout, barrier, self._sequence)
        self.levels.set_wait_hook(call_watchdog.check_peers)
        self.devices = self._device_levels()
        self.calls = PendingCalls(self.agreement, Workplace.of_thread(barrier is not None), self.devices.use)
        open_groups.add(self)

    def _connect_alone(self) -> None:
        self.levels, self.agreement = Levels.solo(), SoloAgreement(self.trace and self.trace.recorder)
        self.devices, self.calls = self._device_levels(), PendingCalls(self.agreement)

    def _device_levels(self) -> DeviceLevels:
        return DeviceLevels(self.levels, self.topology, self.agreement, self.settings, self.cost_model)
