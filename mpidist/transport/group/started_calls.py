"""Calls that are started and waited for later. They progress in the order of their start, when a rank advances them."""

from __future__ import annotations

import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import suppress
from contextvars import copy_context
from enum import Enum
from itertools import product
from typing import Any, Final, final

import numpy as np
from greenlet import getcurrent, greenlet

from mpidist.transport.agreement.agreement import Agreement, CallRecord
from mpidist.transport.group.thread_guard import OtherThreadError
from mpidist.transport.mpi.library import load_mpi
from mpidist.transport.stacks import Stack, line_of_start
from mpidist.transport.waiting import complete, is_pausing, never_free, pausing

__all__ = ["Pending", "PendingCalls", "Steps", "Workplace"]

Steps = Generator[int, None, Any]

_PAUSE_SECONDS: Final = 0.0001  # between two polls of the background thread, as long as calls end
_LONGEST_PAUSE_SECONDS: Final = 0.001  # in a long call: polls take the program's core, and sockets hold enough for it
_IDLE_STEPS: Final = 4  # after so many steps without progress, `advance` returns
_MOST_OUTS_BEFORE: Final = 128  # each is compared with all values of calls that would join their comparisons ahead


@final
class Workplace(Enum):
    """Place of a call's work, which determines the thread that may advance the call."""

    HOST = "host"
    GPU = "GPU"  # after an event, on other streams than the caller's: any thread, but one at a time
    CALLER = "caller"  # on the caller's current stream, or on a stack of its thread: the caller's thread alone

    @classmethod
    def of_thread(cls, is_one_node: bool) -> Collection[Workplace]:
        """List the workplaces whose calls a background thread advances. `is_one_node`: whether there is one node."""
        if load_mpi().Query_thread() != load_mpi().THREAD_MULTIPLE:
            return ()
        return (cls.GPU,) if is_one_node else (cls.GPU, cls.HOST)


@final
class Pending:
    """One started call.

    Attributes:
        is_waited_for: Whether the caller is blocked in `wait()`: then the steps may block.
        may_block: Whether the steps may block until other ranks arrive: in `wait()`, or in the background thread.
            `is_done()` of a call that works on a GPU never blocks.
        is_launched: Whether all work of the call was launched on this rank's GPU, so that the next call may progress.
        is_ahead: Whether calls before this one are under way.
        has_joined: Whether this rank has joined the comparison of the call, and joins no other one for the call.
        started_at: The line that started the call, if it may be compared in another thread, or on another stack.
        sequence: The number of the call; 0 before this rank has joined the call.
        unread: The first call of the group that has failed; empty for none, also for calls that are started after the
            error of one was read. `is_read`: whether one was.
    """

    def __init__(self, steps: Callable[[Pending], Steps], place: Workplace, values: Any = None, outs: Any = ()) -> None:
        self.is_waited_for = self.may_block = self.is_ahead = self.has_joined = False
        self._values, self._outs = values, outs
        self.is_launched = self.is_done = False
        self.place, self._thread = place, threading.get_ident()
        self.sequence = 0
        self.started_at: Stack | None = None
        self.unread: list[Pending] = []
        self.is_read = False
        self.advance_others: Callable[[], None] = lambda: None
        self._steps = steps(self)
        self._result: Any = None
        self._error: BaseException | None = None

    @property
    def result(self) -> Any:
        """The call's result; raises the call's error."""
        if self._error is not None:
            self.read_error()
            raise self._error
        return self._result

    def read_error(self) -> BaseException | None:
        """Return the call's error, which the caller raises. Local."""
        for failed in self.unread:  # whoever has read of a failure handles it for all calls that are under way
            failed.is_read = True
        return self._error

    def can_join_after(self, before: Iterable[Pending]) -> bool:
        """Whether this rank may join the comparison of the call now, while calls before it are under way. Local."""
        if self._values is None:
            return False
        outs = [out for call in before for out in call._outs if isinstance(out, np.ndarray)]
        return len(outs) <= _MOST_OUTS_BEFORE and not any(
            np.may_share_memory(*its) for its in product(self._values, outs)
        )

    @property
    def is_for_this_thread(self) -> bool:
        """Whether this thread may advance the call."""
        return self.place is not Workplace.CALLER or self._thread == threading.get_ident()

    def advance(self, may_block: bool = False) -> None:
        """Advance the call as far as possible now. Blocks only if `may_block`."""
        if self.is_done:  # by an interrupt, which its caller has caught
            return
        self.is_ahead, self.may_block = False, may_block
        self._advance()

    def join_ahead(self) -> None:
        """Join the comparison of the call, while calls before it are under way. Local."""
        self.is_ahead = True
        self._advance()

    def _advance(self) -> None:
        at, idle = -1, 0
        try:
            with np.errstate(all="ignore"):  # and not in the steps, between which the caller's error state holds
                while idle < _IDLE_STEPS:
                    now = next(self._steps)
                    at, idle = (at, idle + 1) if now == at else (now, 0)
        except StopIteration as end:
            self._end(end.value, None)
        except Exception as error:  # `result` raises it for the caller who waits
            self._end(None, error)
        except BaseException as error:  # Ctrl-C: the call can continue later, unless it was broken off
            if inspect.getgeneratorstate(self._steps) == inspect.GEN_CLOSED:
                self._end(None, error)
            raise

    def conclude(self, agreement: Agreement, record: CallRecord) -> Generator[int, None, bool]:
        """Wait until all ranks have joined the call, and compare: `Agreement.conclude`, in steps."""
        while not (self.is_waited_for or agreement.have_all_arrived()):
            yield 0
        # If calls differ, `conclude` waits for the descriptions of all ranks, and another rank may send its own only
        # once this rank has done something else.
        while not (self.may_block or agreement.can_conclude_now(record)):
            yield 0
        if not self.is_waited_for:  # it blocks from now on, and has done other work since it joined the call
            agreement.restart_clock(record=record)
        record.started_at = self.started_at
        return agreement.conclude(record)

    def finish(self, check_peers: Callable[[], None], to_launch: bool = False) -> None:
        """Finish the call, or its steps before the launch on a GPU. Waits for the other ranks."""
        if self.is_done:  # by an interrupt, which its caller has caught
            return
        self.is_waited_for = self.may_block = True
        self.is_ahead = False
        try:
            with np.errstate(all="ignore"):
                complete(self._rest(to_launch), check_peers)
        except BaseException as error:
            with suppress(BaseException):
                self._steps.throw(error)  # breaks the call off, and so tells the other ranks
                self._steps.close()
            self._end(None, error)
            if not isinstance(error, Exception):  # Ctrl-C is raised here, other errors by `result`
                raise
        if to_launch:  # from now on `advance` for another call continues this call, and must not block
            self.is_waited_for = self.may_block = False

    def abandon(self, why: str) -> None:
        """Give up the call: `result` raises an error."""
        self._steps.close()
        self.unread = []
        self._end(None, RuntimeError(f"this reduction was given up by {why} before it was done; start it again"))

    def _rest(self, to_launch: bool) -> Steps:
        try:
            while not (to_launch and self.is_launched):
                yield next(self._steps)
        except StopIteration as end:
            self._end(end.value, None)

    def _end(self, result: Any, error: BaseException | None) -> None:
        self.is_done, self._values, self._outs = True, None, ()
        self._result, self._error = result, error
        if isinstance(error, Exception) and not self.unread:
            self.unread.append(self)


def _steps_of(body: Callable[[], Any], pending: Pending) -> Steps:
    """Run a function that makes blocking calls on a stack of its own: each poll of its waits is a step.

    Only one thread may advance the steps: their place is `Workplace.CALLER`.
    """
    stack, turns = greenlet(body), 0
    stack.gr_context = copy_context()
    stack.gr_context.run(line_of_start.set, pending.started_at)
    error: BaseException | None = None

    def pause(has_progressed: bool, is_busy: bool) -> None:
        nonlocal turns
        turns += has_progressed or (is_busy and pending.is_waited_for)  # then `complete` does not sleep
        outer.switch()

    while True:
        stack.parent = outer = getcurrent()
        thrown, error = error, None
        with pausing(pause):
            result = stack.switch() if thrown is None else stack.throw(thrown)
        if stack.dead:
            return result
        try:
            yield turns
        except GeneratorExit:
            never_free((stack,))  # MPI may still use the memory of its calls
            raise
        except BaseException as problem:
            error = problem


@final
class PendingCalls:
    """The started calls of a group, in the order of their start. Only the first call progresses.

    Once a call is launched on a GPU, the next call progresses, and is launched after it. Calls whose comparison carries
    their data are compared while the calls before them are under way.

    Within a node, moving data is work of this rank's core, so calls in host memory progress only when the rank advances
    them. Between nodes, calls mostly wait for the network, so a background thread advances them while the rank
    computes. Calls on a GPU are always advanced by the thread as well: the GPUs of other ranks wait for the launch on
    this rank, which may itself wait for those ranks, in a barrier of the user's program.

    Attributes:
        queue: The calls that are not launched.
        launched: The calls that are launched on a GPU, and not over.

    Args:
        in_thread: The workplaces whose calls a background thread advances, too.
        use_gpu: Makes the GPU of the calls the current device of the thread that calls it.
    """

    def __init__(
        self, agreement: Agreement, in_thread: Collection[Workplace] = (), use_gpu: Callable[[], None] = lambda: None
    ) -> None:
        self._agreement = agreement
        self._unread: list[Pending] = []
        self._in_thread, self._use_gpu = in_thread, use_gpu
        self.queue: deque[Pending] = deque()
        self.launched: deque[Pending] = deque()
        self._lock = threading.RLock()
        self._has_work = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def start(
        self,
        steps: Callable[[Pending], Steps],
        place: Workplace = Workplace.HOST,
        values: Sequence[Any] | None = None,
        outs: Sequence[Any] = (),
    ) -> Pending:
        """Append a call, and advance the first. Local.

        Args:
            steps: Make the steps of the call.
            place: Where the call does its work.
            values: The arrays that the call sends, if its comparison may be joined ahead; else `None`.
            outs: The arrays that the call writes.
        """
        if self._unread and self._unread[0].is_read:
            self._unread = []
        call = Pending(steps, place, values, outs)
        call.advance_others, call.unread = self.advance, self._unread
        if place in self._in_thread or place is Workplace.CALLER:
            call.started_at = Stack.of_program()
        self.queue.append(call)
        self.advance()
        return call

    def start_function(self, function: Callable[[], Any]) -> Pending:
        """Append a call that a function makes, which may block: see `_steps_of`. Local."""

        def steps(started: Pending) -> Steps:
            started.sequence = self._agreement.sequence + 1
            return (yield from _steps_of(function, started))

        return self.start(steps, Workplace.CALLER)

    def advance(self, may_block: bool = False) -> None:
        """Advance the calls as far as other ranks allow. Local.

        With `may_block` until other ranks arrive, if no background thread advances the calls.
        """
        if self._lock.acquire(blocking=False):  # else the background thread is advancing them
            try:
                self._advance(may_block and Workplace.HOST not in self._in_thread, is_caller=True)
                self._join_ahead()
                self._mark_started()
            finally:
                self._lock.release()
        self._wake()

    def finish(self, last: Pending | None = None) -> None:
        """Finish the call `last` and all calls before it; all calls if `last` is `None`. Waits for other ranks.

        Does nothing in the steps of `_steps_of`, which are part of a started call themselves.
        """
        if is_pausing():
            return
        with self._lock:
            self._agreement.mark_started(False)
            while last is None or not last.is_done:
                if not all(call.is_for_this_thread for call in (*self.launched, *self.queue)):
                    raise OtherThreadError("a call that another thread started is not over: wait for it in that thread")
                self._join_ahead()
                if self.queue and self.queue[0].place is not Workplace.HOST and (last is None or last in self.queue):
                    self._finish_first(self.queue, to_launch=True)
                elif self.launched:
                    self._finish_first(self.launched)
                elif self.queue:
                    self._finish_first(self.queue)
                else:
                    break
            self._mark_started()
        self._wake()

    def read_error(self) -> BaseException | None:
        """Return the error of the first call that has failed, if nobody has read it, for the caller to raise. Local."""
        return self._unread[0].read_error() if self._unread and not self._unread[0].is_read else None

    def last_done(self) -> int:
        """Return the number of the last call in which this rank has done its part, as in all calls before it. Local.

        Does not wait for the background thread: it may wait for ranks that have not noticed yet that this rank leaves.
        """
        self.advance()
        joined = self._agreement.sequence  # read first, as the thread may join another call at any time
        return min([joined, *(call.sequence - 1 for call in (*self.launched, *self.queue) if call.sequence)])

    def last_made(self) -> int:
        """Return the number of the last call that the program has made or started, joined or not yet. Local.

        It is equal on all ranks at one place of the program: which calls are joined depends on the other ranks' times.
        """
        with self._lock:
            return self._agreement.sequence + sum(not call.sequence for call in (*self.launched, *self.queue))

    def abandon(self, why: str) -> None:
        """Abandon the calls, and end the thread. `why`: the reason, for errors."""
        with self._lock:
            for call in (*self.launched, *self.queue):
                call.abandon(why)
            self.launched.clear()
            self.queue.clear()
            self._is_closed = True
            self._has_work.set()
        if self._thread is not None:
            self._thread.join()

    def _mark_started(self) -> None:
        """Record that the caller does other work, if no background thread advances the first call meanwhile."""
        if self.queue and self.queue[0].place not in self._in_thread:
            self._agreement.mark_started()

    def _finish_first(self, calls: deque[Pending], to_launch: bool = False) -> None:
        """Finish the first call, or only launch it, so that later calls can progress. Waits for the other ranks."""
        call = calls.popleft()
        self._agreement.restart_clock()
        try:
            call.finish(self._agreement.check_peers, to_launch)
        finally:
            if not call.is_done:
                self.launched.append(call)

    def _advance(self, may_block: bool, is_caller: bool) -> None:
        """Advance launched calls, which only the caller does, then the first calls up to one that cannot progress."""
        while is_caller and self.launched and self.launched[0].is_for_this_thread:
            self.launched[0].advance()
            if not self.launched[0].is_done:
                break
            self.launched.popleft()
        while self.queue and (is_caller or self.queue[0].place in self._in_thread):
            call = self.queue[0]
            if not call.is_for_this_thread:
                return
            if is_caller:
                call.advance(may_block and call.place is Workplace.HOST)
            else:
                if call.place is Workplace.GPU:
                    self._use_gpu()
                call.advance(may_block)
            if not (call.is_done or call.is_launched):
                return
            self.queue.popleft()
            if not call.is_done:
                self.launched.append(call)

    def _join_ahead(self) -> None:
        """Join the comparisons of calls behind the first, in the order of calls, as far as there is room. Local."""
        before = list(self.launched)
        for at in range(len(self.queue)):  # another thread may append a call
            call = self.queue[at]
            if at and not call.has_joined:
                if not (self._agreement.can_join_ahead and call.can_join_after(before)):
                    return
                call.join_ahead()
            if not call.has_joined:
                return
            before.append(call)

    def _wake(self) -> None:
        """Start the background thread, or wake it, if there is a call that it may advance."""
        if self.queue and self.queue[0].place in self._in_thread and not self._is_closed:
            self._has_work.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_thread, name="mpidist.pending", daemon=True)
                self._thread.start()

    def _run_thread(self) -> None:
        pause = _PAUSE_SECONDS
        while True:
            self._has_work.wait()
            with self._lock:
                if self._is_closed:
                    return
                first = id(self.queue[0]) if self.queue else 0  # the call itself would keep arrays of the caller
                self._advance(may_block=True, is_caller=False)
                self._join_ahead()
                if not self.queue or self.queue[0].place not in self._in_thread:
                    self._has_work.clear()
                is_same = bool(self.queue) and id(self.queue[0]) == first
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS) if is_same else _PAUSE_SECONDS
            time.sleep(pause)
