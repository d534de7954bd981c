"""The time that mpidist sees, which a test may put forward: deadlines pass at once, however slow the machine is."""

import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from types import ModuleType

import pytest

from mpidist.transport import waiting
from mpidist.transport.agreement.agreement import Progress
from mpidist.transport.agreement.mpi_agreement import MpiAgreement
from mpidist.transport.failures import watchdog
from mpidist.transport.failures.flight_recorder import MAX_CALLS, FlightRecorder

__all__ = ["LONG_SECONDS", "Clock", "clock", "come_late", "given_up", "let_time_pass", "wait_for_late_rank"]

LONG_SECONDS = 1000.0  # longer than any deadline of a test that has a clock


class Clock:
    """The module `time` as all modules of mpidist have it.

    Attributes:
        in_wait: Called whenever this rank looks at the time while it waits for others.
    """

    def __init__(self, patch):
        self._ahead = 0.0
        patch.setattr(watchdog, "_ANSWER_SECONDS", 2.0)  # for ranks of other nodes, which live
        self.in_wait: Callable[[], None] = lambda: None
        really, own = MpiAgreement.join_at_once, self._join_at_once
        patch.setattr(MpiAgreement, "join_at_once", lambda agreement, *given: own(really, agreement, *given))
        for name, module in list(sys.modules.items()):
            if not name.startswith("mpidist."):
                continue
            if vars(module).get("time") is time:
                patch.setattr(module, "time", _Time(self, self.now_in_wait if module is waiting else self.now))
            if vars(module).get("_now") is time.monotonic_ns:
                patch.setattr(module, "_now", self.now_ns)

    def go_on(self, seconds=LONG_SECONDS):
        self._ahead += seconds

    def go_on_in_wait(self, then=lambda: None):
        """Put the clock forward once, when this rank next waits for others; `then` is called when it looks at it again.

        It has checked its deadline meanwhile.
        """
        self.do_in_wait(self.go_on, then)

    def do_in_wait(self, *actions):
        """Do something each time that this rank looks at the time while it waits for others, one after the other."""
        left = iter(actions)
        self.in_wait = lambda: next(left, lambda: None)()

    def _join_at_once(self, really, agreement, *given):
        progress = really(agreement, *given)
        if progress != Progress.NOT_JOINED:  # compiled code has read the time itself
            recorder = FlightRecorder(agreement.flight)
            recorder.rows[(recorder.count - 1) % MAX_CALLS, 2] += round(self._ahead * 1e9)
        return progress

    def now(self):
        return time.monotonic() + self._ahead

    def now_ns(self):
        return time.monotonic_ns() + round(self._ahead * 1e9)

    def now_in_wait(self):
        now = self.now()
        self.in_wait()
        return now


class _Time(ModuleType):
    def __init__(self, clock, monotonic):
        super().__init__("time")
        self.monotonic, self.monotonic_ns = monotonic, clock.now_ns

    def __getattr__(self, name):
        return getattr(time, name)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def wait_for_late_rank(clock, comm, late, has_told):
    """Let time pass in the next wait once all other ranks wait, too, and let the late rank come once this one has told.

    The late rank calls `let_time_pass`, all others call this.
    """

    def steps():
        comm.send(None, late)
        while not comm.Iprobe(late):
            yield
        comm.recv(source=late)
        clock.go_on()
        while not has_told():
            yield
        for _ in range(3):  # in which this rank might tell it again
            clock.go_on()
            yield
        comm.send(None, late)

    its = steps()
    clock.in_wait = lambda: next(its, None)


def let_time_pass(comm):
    """Once all other ranks wait for this one, let the time pass for them."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    for other in others:
        comm.recv(source=other)
    for other in others:
        comm.send(None, other)


def come_late(clock, comm, late, has_told=lambda: True):
    """Let a rank come to the next call once all others have waited for it for long, and have told it."""
    if comm.rank != late:
        wait_for_late_rank(clock, comm, late, has_told)
        return
    let_time_pass(comm)
    for other in range(comm.size):
        if other != comm.rank:
            comm.recv(source=other)


@contextmanager
def given_up(clock, comm, late):
    """Let a rank come to the call in the body once all others have given it up."""
    if comm.rank == late:
        let_time_pass(comm)
        comm.Barrier()
    else:
        wait_for_late_rank(clock, comm, late, lambda: False)
    yield
    clock.in_wait = lambda: None  # else it goes on in the waits that follow, on a machine so busy that they come late
    if comm.rank != late:
        comm.Barrier()
