"""Replicas of one rank take turns: each runs until it makes a call that joins replicas, where it waits for the others.

All replicas of a rank run on the rank's own thread, one at a time, each on a stack of its own (a greenlet). When all of
them wait at the same call, the rank makes that call once, for all of its replicas. So the order of calls, the thread
that talks to MPI and the current device are those of a program with one replica on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from types import FrameType
from typing import Any, Final, NamedTuple, final

from greenlet import GreenletExit, getcurrent, greenlet

from mpidist import context_stack
from mpidist.errors import InvalidArgumentError
from mpidist.replica_context.pending_writes import PendingWrites
from mpidist.transport import arrays
from mpidist.transport.array_libraries.torch_modes import change_modes, current_modes
from mpidist.transport.devices import Device, are_several_gpus
from mpidist.transport.stacks import caller_frames

__all__ = ["CarryOut", "Turns"]

_MAX_REFUSED: Final = 1000
_AFTER_CONFLICT: Final = (
    "Other ranks may have kept what their replicas assigned since the last call: after strategy.reset() on all ranks, "
    "assign the variable again, such as what strategy.broadcast returns"
)

# Makes a call for all replicas of this rank, given the argument of each replica, and returns a result for each. If an
# error is given, arguments of some replicas may be missing, and the call raises an error on all ranks.
CarryOut = Callable[[Sequence[Any], "Exception | None"], Sequence[Any]]


@final
class _Meeting(NamedTuple):
    """The call in which a replica waits for the other replicas of its rank: see `Turns.meet`."""

    call: str
    carry_out: CarryOut
    argument: Any
    is_settled: bool
    modes: Any  # of PyTorch, in which the replica waits


@final
class _Replica:
    """One replica: its stack, its contexts, and where it stands. The stack is kept from run to run.

    `meeting`: the call in which the replica waits; `None` before its first turn and after its end. `error`: what ended
    the replica. `result`: that of the run's function. `outcome`: that of the replica's call, for its next turn.
    """

    def __init__(self, replica_id: int) -> None:
        self.replica_id = replica_id
        self._stack = greenlet(_run_each)
        self._stack.switch()

    @property
    def frame(self) -> FrameType | None:
        """The innermost frame of the replica while it waits."""
        return self._stack.gr_frame

    def begin(self, body: Callable[[], Any], device: Device | None) -> None:
        """Prepare a run of `body`, with `device` current in each turn; `None` if all replicas of the rank have one."""
        self.meeting: _Meeting | None = None
        self.error: BaseException | None = None
        self.result: Any = None
        self.has_ended = False
        self._body, self._device = body, device
        self._stack.gr_context = copy_context()  # context variables, such as NumPy's error state
        self._contexts = context_stack.copy_entries()
        self.outcome: Any = self._run
        self._refusal: tuple[Any, ...] | None = None

    def refuse(self, error: BaseException) -> None:
        """Store an exception, which the replica's call raises at its next turn."""
        self._refusal = error, None, error.__traceback__  # as it is now: each replica that raises it adds frames

    def take_result(self) -> Any:
        """Return the result of the run's function, and drop it, and the values of its context variables."""
        result, self.result, self._stack.gr_context = self.result, None, None
        return result

    def take_turn(self) -> None:
        """Run the replica up to its next meeting, or to its end."""
        if self._device is not None:
            self._device.use()
        outcome, refusal = self.outcome, self._refusal
        self.meeting = self.outcome = self._refusal = None
        outer = context_stack.exchange_entries(self._contexts)
        try:
            if refusal is not None:
                self._stack.throw(*refusal)
            else:
                self._stack.switch(outcome)
        finally:
            self._contexts = context_stack.exchange_entries(outer)
            if self._device is not None:  # other devices read what the replica wrote
                arrays.wait_for_stream()

    def describe(self) -> str:
        """Describe the replica's state, for errors."""
        if self.error is not None:
            return f"replica {self.replica_id} raised {type(self.error).__name__}: {self.error}"
        did = "returned from the function" if self.meeting is None else f"called {self.meeting.call}"
        return f"replica {self.replica_id} {did}"

    def _run(self) -> None:
        try:
            self.result = self._body()
        except GreenletExit:  # thrown by `Turns.run`, which ends this replica because another one failed
            self.result = None
        except BaseException as error:
            self.error = error
        self.has_ended = True
        del self._body


def _run_each() -> None:
    """Run the functions given to a replica's stack, one in each run; between runs it refers to no replica."""
    rank_stack: Any = getcurrent().parent
    while True:
        run = rank_stack.switch()
        run()
        del run


@final
class Turns:
    """Runs the replicas of this rank by turns, which meet in calls. For one `Strategy.run` at a time.

    `pending`: the writes of the replicas to arrays that they share: checked when all replicas have met, committed
    when the ranks have agreed on the call, and when all replicas have returned.
    """

    def __init__(self, replica_ids: Sequence[int], devices: Sequence[Device], pending: PendingWrites) -> None:
        self._ids, self._devices, self.pending = replica_ids, devices, pending
        self.has_several_gpus = are_several_gpus(devices)
        self._rank_stack = getcurrent()  # the greenlet of `run`
        self._idle: list[_Replica] = []  # those of the last run: to make a stack takes as long as a small call
        self._running: _Replica | None = None
        self._is_over = False
        self._num_refused = 0  # calls that replicas made after they were ended
        self._modes: Any = None  # of PyTorch, in which `run` was called

    def use_device(self, at: int) -> None:
        """Make the device of a replica of this rank current, if the replicas have different ones."""
        if self.has_several_gpus:
            self._devices[at].use()

    def run(self, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run a function for each replica of this rank; return their results. As collective as the functions are.

        If replicas make different calls, or write different values to an array that they share, it is an error on all
        ranks that make the next call. So is what a function raises while other replicas of the rank wait in a call.
        """
        if len(bodies) == 1:
            try:
                return [bodies[0]()]
            finally:
                self.pending.commit()
        replicas = self._begin(bodies)
        if self.has_several_gpus:  # replicas read what was written on the first device
            arrays.wait_for_stream()
        try:
            while not self._take_turns(replicas):
                self._meet(replicas)
        finally:
            self._is_over = True
            for replica in replicas:
                if not replica.has_ended:
                    replica.refuse(GreenletExit())
                    self._resume(replica)
            self.pending.discard()
            self.use_device(0)
        self._idle = replicas  # not after an exception, which may have left one behind
        return [replica.take_result() for replica in replicas]

    def _begin(self, bodies: Sequence[Callable[[], Any]]) -> list[_Replica]:
        """Take the replicas of the run before, or make some, and prepare their first turns."""
        self._is_over, self._num_refused, self._modes = False, 0, current_modes()
        if self._rank_stack is not getcurrent():
            self._rank_stack, self._idle = getcurrent(), []
        replicas, self._idle = self._idle or list(map(_Replica, self._ids)), []
        for replica, body, device in zip(replicas, bodies, self._devices, strict=True):
            replica.begin(body, device if self.has_several_gpus else None)
        return replicas

    def meet(self, call: str, carry_out: CarryOut, argument: Any, is_settled: bool = True) -> Any:
        """Wait until all replicas of this rank make a call, and return this replica's result. Collective.

        `carry_out` makes the call for all of them, given what each passes. `is_settled`: whether all ranks have agreed
        on the call when it returns; if not, what the replicas have written stays pending.
        """
        meeting = _Meeting(call, carry_out, argument, is_settled, self._running and current_modes())
        if self._running is None:  # the rank carries one replica
            return self._make(meeting, [argument], None)[0]
        if self._is_over:
            self._num_refused += 1
            if self._num_refused > _MAX_REFUSED:  # a loop that catches every error: never resume this replica again
                self._rank_stack.switch()
            raise RuntimeError(f"{call}: replica {self._running.replica_id} was ended, as another replica has failed")
        self._running.meeting = meeting
        if meeting.modes == self._modes:
            return self._rank_stack.switch()
        with change_modes(meeting.modes, self._modes):
            return self._rank_stack.switch()

    def _take_turns(self, replicas: Sequence[_Replica]) -> bool:
        """Run every replica to its next meeting or to its end. Returns whether all have returned."""
        for replica in replicas:
            if not replica.has_ended:
                self._resume(replica)
                if replica.error is not None and not isinstance(replica.error, Exception):
                    raise replica.error  # such as KeyboardInterrupt
        if not all(replica.has_ended for replica in replicas):
            return False
        self.use_device(0)
        conflict = self.pending.conflict()
        if conflict is None:  # also if replicas raised: what all of them wrote before stays written
            self.pending.commit()
        _raise_first(replicas)
        if conflict is not None:  # other ranks do not learn of it here, and may have committed
            conflict.args = (f"{conflict}. {_AFTER_CONFLICT}",)
            raise conflict
        return True

    def _meet(self, replicas: Sequence[_Replica]) -> None:
        """Make the call that the replicas wait for, once for all."""
        waiting = [(replica, replica.meeting) for replica in replicas if replica.meeting is not None]
        first, refusal = waiting[0][1], None
        arguments = [meeting.argument for _, meeting in waiting if meeting.call == first.call]
        self.use_device(0)
        try:
            with change_modes(self._modes, first.modes):
                outcomes = self._make(first, arguments, _mismatch(replicas))
        except Exception as error:
            refusal = error
        if refusal is not None:
            _raise_first(replicas)
            for replica, _ in waiting:
                replica.refuse(refusal)
            return
        if self.has_several_gpus:
            arrays.wait_for_stream()
        for (replica, _), outcome in zip(waiting, outcomes, strict=True):
            replica.outcome = outcome

    def _make(self, meeting: _Meeting, arguments: Sequence[Any], error: Exception | None) -> Sequence[Any]:
        """Make a call; then commit the replicas' writes, or drop them if the call is refused."""
        if not (meeting.is_settled and self.pending.written):
            return meeting.carry_out(arguments, error)
        try:
            outcomes = meeting.carry_out(arguments, error or self.pending.conflict())
        except BaseException:  # on all ranks
            self.pending.discard()
            raise
        self.pending.commit()
        return outcomes

    def _resume(self, replica: _Replica) -> None:
        self._running = replica
        try:
            replica.take_turn()
        finally:
            self._running = None


# The line of a call of replicas is that of the first one that waits.
caller_frames[Turns._meet.__code__] = lambda meet: meet.f_locals["waiting"][0][0].frame


def _raise_first(replicas: Sequence[_Replica]) -> None:
    """Raise the exception of the lowest replica that has one."""
    for replica in replicas:
        if replica.error is not None:
            raise replica.error


def _mismatch(replicas: Sequence[_Replica]) -> InvalidArgumentError | None:
    """Return an error with the differences between the calls of replicas; `None` if there are none."""
    if len({replica.meeting and replica.meeting.call for replica in replicas}) == 1:
        return None
    waiting = next(replica for replica in replicas if replica.meeting is not None)
    other = next((replica for replica in replicas if replica.error is not None), None)
    if other is None:
        assert waiting.meeting is not None
        call = waiting.meeting.call
        other = next(replica for replica in replicas if replica.meeting is None or replica.meeting.call != call)
    return InvalidArgumentError(
        f"{other.describe()}, while {waiting.describe()}; all replicas must make the same calls in the same order"
    )
