"""Waits of a rank: it polls in a spin loop, later yields its core between polls, and at last sleeps between them."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar, final

from mpidist.errors import DeadlineExceededError

__all__ = [
    "SPINS",
    "Patience",
    "complete",
    "is_pausing",
    "never_free",
    "observers",
    "pausing",
    "poll",
    "poll_or_keep",
]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Polls without a pause at the beginning of a wait: less than 10 us. An awaited rank may need this core, and then loses
# this time in each wait of a reduction. If no process needs the core, a yield returns in less than a microsecond.
SPINS: Final = 20
_SPINS_OF_A_MESSAGE: Final = 200  # the same for a message, which mostly arrives sooner than a yield returns
_YIELD_SECONDS: Final = 0.002  # after which time of waiting a rank sleeps between polls instead of yielding
_CHECK_SECONDS: Final = 0.001  # after which time of waiting a rank checks on its peers
_NAP_SECONDS: Final = 0.0002
_SHORT_NAP_SECONDS: Final = 0.00005  # the timer itself adds 50 us
_LONG_NAP_SECONDS: Final = 0.001
_LONG_WAIT_SECONDS: Final = 1.0  # after which time of waiting naps are long
_NAPS_IN_A_WAIT: Final = 64


# Called after each wait of this process, with begin and end in nanoseconds of the monotonic clock.
observers: Final[list[Callable[[int, int], None]]] = []


@final
class _Pausing(threading.local):
    """Setting of `pausing` for the waits of this thread: others advance calls of their own meanwhile."""

    pause: Callable[[bool, bool], None] | None = None


_PAUSING: Final = _Pausing()


@final
@dataclass(frozen=True)
class Patience:
    """How long this process waits for something that no other rank takes part in, such as work of its own GPUs.

    It warns after `stall_seconds` if it has no deadline, `timeout_seconds`; 0 is never.
    """

    stall_seconds: float = 0.0
    timeout_seconds: float | None = None

    def watch(self, what: str, advice: str) -> Callable[[], None]:
        """Begin a wait. Returns the function to call again and again while waiting, as in `poll`."""
        since, has_warned = time.monotonic(), False

        def check() -> None:
            nonlocal has_warned
            waited, timeout = time.monotonic() - since, self.timeout_seconds
            if timeout and waited >= timeout:
                raise DeadlineExceededError(f"{what} did not end within {timeout:g} s; {advice}")
            if not timeout and not has_warned and 0 < self.stall_seconds <= waited:
                has_warned = True
                logger.warning("mpidist: %s has taken %.0f s by now; %s", what, waited, advice)

        return check


@contextmanager
def pausing(pause: Callable[[bool, bool], None]) -> Iterator[None]:
    """Let this thread's waits in the body call a function between two polls, in place of pauses and checks of peers.

    Args:
        pause: Takes whether the wait has progressed since the last call, and whether it is too new to sleep.
    """
    before, _PAUSING.pause = _PAUSING.pause, pause
    try:
        yield
    finally:
        _PAUSING.pause = before


def is_pausing() -> bool:
    """Whether this thread runs a started call, whose waits pause."""
    return _PAUSING.pause is not None


def poll(
    test: Callable[[], bool],
    check_peers: Callable[[], None],
    busy_seconds: float = _YIELD_SECONDS,
    is_message: bool = True,
) -> None:
    """Poll until a test is true, or until `check_peers`, which is called once the wait is long, raises.

    `busy_seconds`: how long to poll without sleeping. `is_message`: `test` tests an MPI message, which progresses only
    while it is tested. Else the core is yielded sooner, and naps grow with the wait, up to one 64th of its time.
    """
    if (pause := _PAUSING.pause) is not None:
        start, has_progressed = time.monotonic(), True
        while not test():
            if is_busy := time.monotonic() - start < busy_seconds:
                os.sched_yield()
            pause(has_progressed, is_busy)
            has_progressed = False
        return
    if observers:
        test = _observed_test(test)
    for _ in range(_SPINS_OF_A_MESSAGE if is_message else SPINS):
        if test():
            return
    start = time.monotonic()
    while not test():
        waited = time.monotonic() - start
        if waited > _CHECK_SECONDS:
            check_peers()
        _pause(waited, busy_seconds, is_message)


def complete(steps: Generator[int, None, _T], check_peers: Callable[[], None]) -> _T:
    """Run a generator that yields, where it has to wait, a number that changes with progress; return its result."""
    at, spun, start, pause = -1, 0, 0.0, _PAUSING.pause
    if observers and pause is None:
        steps = _observed_steps(steps)
    try:
        while True:
            now = next(steps)
            if pause is not None:
                pause(now != at, False)
                at = now
            elif now != at:
                at, spun = now, 0
            elif spun < SPINS:
                spun += 1
            elif spun == SPINS:
                spun, start = spun + 1, time.monotonic()
                os.sched_yield()
            else:
                waited = time.monotonic() - start
                if waited > _CHECK_SECONDS:
                    check_peers()
                _pause(waited)
    except StopIteration as end:
        result: _T = end.value
        return result


def poll_or_keep(
    test: Callable[[], bool],
    check_peers: Callable[[], None],
    memory: tuple[Any, ...],
    busy_seconds: float = _YIELD_SECONDS,
) -> None:
    """Poll a message as `poll` does; if `check_peers` raises, keep `memory`, which MPI may still write."""
    try:
        poll(test, check_peers, busy_seconds)
    except BaseException:
        never_free(memory)
        raise


def never_free(memory: tuple[Any, ...]) -> None:
    """Keep the objects of an abandoned message until the process ends: MPI may still read and write their memory.

    Python would free them before MPI ends, and mpi4py's requests do not hold the buffers of all collectives.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


def _tell_wait(begun: int, ended: int) -> None:
    for observe in tuple(observers):  # one may be the last of a trace, which then ends
        observe(begun, ended)


def _observed_test(test: Callable[[], bool]) -> Callable[[], bool]:
    begun = time.monotonic_ns()

    def observed() -> bool:
        if not test():
            return False
        _tell_wait(begun, time.monotonic_ns())
        return True

    return observed


def _observed_steps(steps: Generator[int, None, _T]) -> Generator[int, None, _T]:
    """Report each wait: from a step that returns a new number to the last one that returns the same."""
    at, begun, called = -1, 0, 0
    try:
        while True:
            called = time.monotonic_ns()
            now = next(steps)
            if now != at:
                if begun:
                    _tell_wait(begun, called)
                at, begun = now, time.monotonic_ns()
            yield now
    except StopIteration as end:
        if begun:
            _tell_wait(begun, called)
        result: _T = end.value
        return result


def _pause(waited: float, busy_seconds: float = _YIELD_SECONDS, is_message: bool = True) -> None:
    """Yield this core, or sleep, between two polls of a wait that has taken `waited` seconds."""
    if waited < busy_seconds:
        os.sched_yield()
    elif is_message:
        time.sleep(_NAP_SECONDS if waited < _LONG_WAIT_SECONDS else _LONG_NAP_SECONDS)
    else:
        time.sleep(min(max(waited / _NAPS_IN_A_WAIT, _SHORT_NAP_SECONDS), _LONG_NAP_SECONDS))
