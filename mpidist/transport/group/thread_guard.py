"""Guard of a group's calls: only one thread makes them; two would use another order on each rank."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, final

from mpidist.transport.failures import job_abort
from mpidist.transport.mpi.library import load_mpi

__all__ = ["IN_A_FORK", "OtherThreadError", "ThreadGuard", "forbid_calls_here", "waits_for_autograd"]

IN_A_FORK: Final = (  # behind the name of a call
    "in a forked process: a strategy belongs to the process that made it; make its calls in the parent alone, or start "
    "workers with multiprocessing.get_context('spawn')"
)

_forbidden: Final = threading.local()

_CALLS: Final = (
    "mpidist.collectives.",
    "mpidist.coordinator.",
    "mpidist.cross_device_ops.",
    "mpidist.parameter_server.",
    "mpidist.transport.",
)
_END_SECONDS: Final = 10.0  # how long a call of another thread may take once the program has ended
# How long a function may take that garbage collection calls, as to give back memory, or a thread to end.
_MOMENT_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.02
_ADVICE: Final = "join it before the program ends"
_QUIET_POLLS: Final = 5  # after so many without a call, the thread makes none: between two it is in none for a moment
_LEVELS: Final = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


class OtherThreadError(RuntimeError):
    """A call is left to the thread that makes the group's calls, and is not over."""


def forbid_calls_here(why: str) -> None:
    """Refuse all calls of any strategy in this thread from now on; errors give `why` after the call's name. Local."""
    _forbidden.why = why


@final
class _Here(threading.local):
    """What each thread has of a guard. `token`: the one that it got when it was admitted last."""

    token: object = None


@final
class ThreadGuard:
    """Refuses calls of a second thread while the first thread is alive.

    The thread that builds a strategy may hand its calls over to a second thread, and take them back when that one has
    ended. Hooks of PyTorch make calls in threads of autograd, for which the thread waits in `backward()`. If MPI does
    not allow calls from several threads at a time, one thread makes the calls of all groups.
    """

    _of_process: ThreadGuard | None = None

    def __init__(self) -> None:
        self._owner = threading.current_thread()
        self.here = _Here()
        self._may_be_taken_over = True
        self._waiting: threading.Thread | None = None  # in `backward()`, while a thread of autograd makes the calls
        self._is_lent = self._is_in_fork = self._is_at_end = False
        # Of two threads that check at once, both would be let in. A signal handler may make a call meanwhile.
        self._change = threading.RLock()
        self._admit()

    @classmethod
    def of_group(cls) -> ThreadGuard:
        """Return the guard for a new group."""
        if _level() == "MULTIPLE":
            return cls()
        if cls._of_process is None:
            cls._of_process = cls()
        return cls._of_process

    def is_of_this_thread(self) -> bool:
        """Whether this thread makes the group's calls. Local."""
        return threading.current_thread() is self._owner  # another one may have its number once it has ended

    def take_over(self, call: str) -> None:
        """Move the group's calls to this thread from another thread, which makes none any more. Local."""
        why = IN_A_FORK if self._is_in_fork else getattr(_forbidden, "why", "")
        if why:
            raise RuntimeError(f"{call} {why}")
        with self._change:
            if self._waiting is not None and not self._waiting.is_alive():  # its last call was in a hook
                self._owner, self._waiting = self._waiting, None
            self._require_free(call)
            if self.is_of_this_thread():  # which has lent its calls
                pass
            elif self._is_of_autograd():
                is_back = self._waiting is threading.current_thread()
                self._waiting = None if is_back else self._waiting or self._owner
            else:
                self._may_be_taken_over, self._waiting = not self._owner.is_alive(), _in_backward()
            self._admit()

    def end(self) -> None:
        """Make the calls in this thread, in which the program ends, and refuse them in all others from now on. Local.

        Waits for a call that another thread makes, and ends the job if that takes too long: two calls at once would
        take each other's messages. An uncaught error of that thread still ends the job meanwhile.
        """
        if self.is_of_this_thread():
            return
        with self._change:
            self._is_at_end, self.admitted = True, object()
        until, quiet = time.monotonic() + _END_SECONDS, 0 if self._owner.is_alive() else _QUIET_POLLS
        while quiet < _QUIET_POLLS:
            time.sleep(_POLL_SECONDS)
            quiet = 0 if _is_in_a_call(self._owner) else quiet + 1
            if time.monotonic() > until:
                job_abort.end_job(f"thread {self._owner.name!r} still makes this strategy's calls: {_ADVICE}")
        if self._owner.is_alive() and not isinstance(self._owner, threading._DummyThread):  # which Python did not start
            job_abort.write_line(f"thread {self._owner.name!r} made this strategy's calls, and still runs: {_ADVICE}")
        self._waiting = None
        self._admit()

    def disown(self) -> None:
        """Refuse all calls, in a forked process. Local."""
        self._is_in_fork, self.admitted = True, object()

    @contextmanager
    def lend(self, call: str, lender: threading.Thread) -> Iterator[None]:
        """Make calls in this thread for `lender`, which waits for it, as if they were that thread's own. Local."""
        with self._change:
            if self._waiting is lender:  # its last call was in a hook
                self._owner, self._waiting = lender, None
            self._require_free(call, lender)
            if self._owner is not lender:
                self._may_be_taken_over = not self._owner.is_alive()
            self._is_lent = True
            self._admit()
        try:
            yield
        finally:
            self._owner, self._is_lent, self.admitted = lender, False, object()

    def _admit(self) -> None:
        self._owner = threading.current_thread()
        self.here.token = self.admitted = object()

    def _require_free(self, call: str, lender: threading.Thread | None = None) -> None:
        new, level = threading.current_thread(), _level()
        if self._is_at_end:
            raise RuntimeError(
                f"{call} in thread {new.name!r} after the program has ended: join the thread before its end"
            )
        if level in ("SINGLE", "FUNNELED") and new is not threading.main_thread():
            raise RuntimeError(
                f"{call} in thread {new.name!r}: MPI was started with THREAD_{level}, so only the main thread may make "
                "calls; set mpi4py.rc.thread_level = 'multiple' before anything starts MPI"
            )
        if self._is_lent or (self._owner is not new and self._owner.is_alive() and not self._may_come(lender)):
            who, owner = lender or new, self._waiting or self._owner  # the program's, and not those of libraries
            what = "a strategy" if level == "MULTIPLE" else f"strategies (THREAD_{level})"
            jax = "; only one thread may run functions that call mpidist.jax" if "mpidist.jax" in sys.modules else ""
            torch = " (torch.distributed.new_group() for PyTorch's calls)" if "mpidist.torch" in sys.modules else ""
            raise OtherThreadError(
                f"{call} in thread {who.name!r}, but thread {owner.name!r} makes this strategy's calls: only one "
                f"thread at a time may use {what}: two threads would issue calls in a different order on each rank. "
                f"Build one strategy for each thread, in the same order on all ranks{torch}{jax}"
            )

    def _may_come(self, lender: threading.Thread | None) -> bool:
        """Whether this thread may make calls, or those of `lender`, though another thread that made some is alive."""
        if self._owner is lender if lender else self._is_of_autograd():
            return True
        if self._may_be_taken_over and self._waiting is None and not _stays_in_a_call(self._owner):
            return True
        return _ends(self._owner)

    def _is_of_autograd(self) -> bool:
        """Whether this is a thread of autograd that another one waits for, or that one again; and no hook calls now."""
        new, waiting = threading.current_thread(), self._waiting
        if waiting is not None and self._owner is not new and self._owner.ident in sys._current_frames():
            return False
        return new is waiting or (
            isinstance(new, threading._DummyThread) and waits_for_autograd((waiting or self._owner).ident)
        )


def waits_for_autograd(ident: int | None) -> bool:
    """Whether a thread is in `backward()` of PyTorch, whose threads do the work of GPUs, and call hooks."""
    frame = sys._current_frames().get(ident or 0)
    return frame is not None and frame.f_globals.get("__name__") == "torch.autograd.graph"


def _in_backward() -> threading.Thread | None:
    """Return the one thread in `backward()`, if this may be a thread of autograd; `None` if several threads are."""
    if not isinstance(threading.current_thread(), threading._DummyThread):
        return None
    threads = [its for its in threading.enumerate() if not isinstance(its, threading._DummyThread)]
    found = [thread for thread in threads if waits_for_autograd(thread.ident)]
    return found[0] if len(found) == 1 else None


def _stays_in_a_call(thread: threading.Thread) -> bool:
    """Whether a thread is in a call of the library, and not in a function that garbage collection calls in it."""
    until = time.monotonic() + _MOMENT_SECONDS
    while _is_in_a_call(thread):
        if time.monotonic() > until:
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _ends(thread: threading.Thread) -> bool:
    """Whether a thread ends in a moment, as one of a pool of threads whose last result the program has waited for."""
    if not isinstance(thread, threading._DummyThread):  # which Python did not start, and does not see end
        thread.join(_MOMENT_SECONDS)
    return not thread.is_alive()


def _is_in_a_call(thread: threading.Thread) -> bool:
    """Whether a thread is in a function of the library that makes calls."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(_CALLS):
        frame = frame.f_back
    return frame is not None


def _level() -> str:
    mpi = load_mpi()
    levels = (mpi.THREAD_SINGLE, mpi.THREAD_FUNNELED, mpi.THREAD_SERIALIZED, mpi.THREAD_MULTIPLE)
    return _LEVELS[levels.index(mpi.Query_thread())]
