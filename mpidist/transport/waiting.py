"""How a rank waits: it spins for what comes soon, then yields its core, then naps."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Generator
from typing import Any, Final, TypeVar, final

__all__ = ["complete", "never_free", "poll", "poll_or_keep", "set_crowded"]

_T = TypeVar("_T")

_SPINS: Final = 200  # a message inside a node takes a few tests; a yield costs more than that
_SPINS_IN_A_CROWD: Final = 20  # where another rank waits for this core
_YIELD_SECONDS: Final = 0.002
_CHECK_SECONDS: Final = 0.001
_NAP_SECONDS: Final = 0.0002
_LONG_NAP_SECONDS: Final = 0.001
_LONG_WAIT_SECONDS: Final = 1.0


@final
class _SpinLimit:
    spins = _SPINS


def set_crowded(num_ranks: int) -> None:
    """Say how many ranks this machine has to run. With more than it has cores, they give up theirs sooner."""
    _SpinLimit.spins = _SPINS_IN_A_CROWD if num_ranks > (os.cpu_count() or 1) else _SPINS


def poll(test: Callable[[], bool], check_peers: Callable[[], None], busy_seconds: float = _YIELD_SECONDS) -> None:
    """Test until what this rank waits for has come.

    Args:
        test: Says whether it has come.
        check_peers: Called now and then, from when the wait is long on. Raises where there is no sense in waiting on.
        busy_seconds: How long to test without a nap between: messages get on by being tested.
    """
    for _ in range(_SpinLimit.spins):
        if test():
            return
    start = time.monotonic()
    while not test():
        waited = time.monotonic() - start
        if waited > _CHECK_SECONDS:
            check_peers()
        _rest(waited, busy_seconds)


def complete(steps: Generator[int, None, _T], check_peers: Callable[[], None]) -> _T:
    """Drive work that waits for other ranks, to its end.

    Args:
        steps: The work. It yields whenever it can do nothing now: a number that changes as it gets on.
        check_peers: As in `poll`.

    Returns:
        What the work returns.
    """
    at, spun, start, spins = -1, 0, 0.0, _SpinLimit.spins
    try:
        while True:
            now = next(steps)
            if now != at:
                at, spun = now, 0
            elif spun < spins:
                spun += 1
            elif spun == spins:
                spun, start = spun + 1, time.monotonic()
                os.sched_yield()
            else:
                waited = time.monotonic() - start
                if waited > _CHECK_SECONDS:
                    check_peers()
                _rest(waited)
    except StopIteration as end:
        result: _T = end.value
        return result


def poll_or_keep(
    test: Callable[[], bool],
    check_peers: Callable[[], None],
    memory: tuple[Any, ...],
    busy_seconds: float = _YIELD_SECONDS,
) -> None:
    """Test until a message is through, as `poll` does; `check_peers` raises, and then MPI may still write `memory`."""
    try:
        poll(test, check_peers, busy_seconds)
    except BaseException:
        never_free(memory)
        raise


def never_free(memory: tuple[Any, ...]) -> None:
    """Keep a message that nobody waits for any more, with the memory that MPI may still read and write.

    Python would free it before MPI ends, and mpi4py's requests do not hold the buffers of all collectives.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


def _rest(waited: float, busy_seconds: float = _YIELD_SECONDS) -> None:
    if waited < busy_seconds:
        os.sched_yield()
    else:
        time.sleep(_NAP_SECONDS if waited < _LONG_WAIT_SECONDS else _LONG_NAP_SECONDS)
