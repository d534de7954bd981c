"""NCCL's communicators of this process, from birth to a certain end.

NCCL can block for ever wherever a peer is gone: in its constructor, and when a communicator is destroyed, which CuPy
does at garbage collection. So every handle is kept here until it is destroyed or aborted, both happen in a daemon
thread that nobody waits for longer than `LIMIT_SECONDS`, and what does not end is never collected.

NCCL wants all communicators of a device aborted together, in one group; one after the other may deadlock.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, final

from mpidist.errors import UnavailableError
from mpidist.transport.cuda import Cuda
from mpidist.transport.gpu import Background
from mpidist.transport.text import first_line
from mpidist.transport.waiting import never_free

__all__ = [
    "LIMIT_SECONDS",
    "Handle",
    "abort_all",
    "destroy",
    "group_of_calls",
    "num_open",
    "start_init",
    "wait_for_endings",
]

logger = logging.getLogger("mpidist.transport")

LIMIT_SECONDS: Final = 10.0  # what an abort or a destruction may take
_PROMPT_SECONDS: Final = 0.2  # what the caller of `abort_all` waits: it has an error to raise


@final
class Handle:
    """One communicator of NCCL, with the device that it works on.

    Attributes:
        cuda: What made it.
        comm: CuPy's `NcclCommunicator`.
        device: The index of its GPU.
        ended: Why it cannot be used any more; empty while it can.
        connected: The kinds of calls for which it has its connections to other ranks: see `DeviceQueue.issue`.
        keeps: What may not be collected before it.
    """

    def __init__(self, cuda: Cuda, comm: Any, device: int) -> None:
        self.cuda = cuda
        self.comm = comm
        self.device = device
        self.ended = ""
        self.connected: set[Any] = set()
        self.keeps: Any = None
        with _lock:
            _open.append(self)

    def check(self) -> None:
        """Raise NCCL's error, if there is one, and the communicator is still in use. Never waits.

        Another thread may abort it at any time: not between the look at `ended` and NCCL's, which reads its memory.
        """
        with _lock:
            if not self.ended:
                self.comm.check_async_error()

    def require_usable(self, what: str, kind: type[Exception] = RuntimeError) -> None:
        """Raise an error of a kind, if the communicator has ended. `what`: the call, for people."""
        if self.ended:
            raise kind(
                f"{what}: the communicator cannot be used any more, because {self.ended}; call strategy.reset() on all "
                "ranks"
            )


_lock: Final = threading.Lock()
_open: Final[list[Handle]] = []
_ending: Final[list[_Ending]] = []


@final
class _Ending(threading.Thread):
    """The end of communicators, which may hang, in a daemon thread. `work`: does it, with the handles."""

    def __init__(self, what: str, work: Callable[[list[Handle]], None], handles: list[Handle]) -> None:
        super().__init__(name=f"mpidist {what}", daemon=True)
        self._what, self._work, self._handles = what, work, handles
        self._until = time.monotonic() + LIMIT_SECONDS
        with _lock:
            _ending.append(self)
        self.start()

    def run(self) -> None:
        try:
            self._work(self._handles)
        except Exception as error:
            logger.warning("NCCL: %s failed: %s", self._what, error)

    def wait(self, seconds: float) -> None:
        """Wait for at most so long. After all the time that it may take, it is left alone for ever."""
        self.join(min(seconds, max(0.0, self._until - time.monotonic())))
        is_late = self.is_alive()
        if is_late and time.monotonic() < self._until:
            return
        with _lock:  # two threads may see it end
            if self not in _ending:
                return
            _ending.remove(self)
        if is_late:
            never_free((self,))
            late = "NCCL: %s did not end within %g s; end this process soon, its GPU is not free"
            logger.warning(late, self._what, LIMIT_SECONDS)


def num_open() -> int:
    """Count the communicators that are neither destroyed nor aborted."""
    return len(_open)


def abort_all(reason: str | BaseException, handles: Iterable[Handle] | None = None) -> None:
    """Abort communicators of this process, in one group, after a failure. Local; returns soon.

    Args:
        reason: What the error of a later use says, or the failure itself.
        handles: Those that are aborted, if nothing has ended them yet; by default all.
    """
    if isinstance(reason, BaseException):
        reason = f"an earlier call failed ({type(reason).__name__}: {first_line(reason)})"
    _end("the abort of communicators", _abort, handles, reason, _PROMPT_SECONDS)


def destroy(handles: Iterable[Handle]) -> None:
    """Destroy communicators that nothing is under way in. All their ranks must do so. Waits."""
    _end("the end of communicators", _destroy, handles, "it was freed", LIMIT_SECONDS)


def wait_for_endings() -> None:
    """Wait for aborts that still go on, as long as they may take. Local."""
    for ending in list(_ending):
        ending.wait(LIMIT_SECONDS)


def _end(
    what: str, work: Callable[[list[Handle]], None], handles: Iterable[Handle] | None, reason: str, seconds: float
) -> None:
    """Take handles out of use, all of them for `None`, let `work` end them, and wait for so long."""
    with _lock:
        wanted = set(_open if handles is None else handles)
        taken = [handle for handle in _open if handle in wanted]
        for handle in taken:
            _open.remove(handle)
            handle.ended = reason
    if taken:
        _Ending(what, work, taken).wait(seconds)


@contextmanager
def group_of_calls(nccl: Any) -> Iterator[None]:
    """Make NCCL's calls as one group, which is launched at the end: an error in the middle ends the group, too."""
    nccl.groupStart()
    try:
        yield
    finally:
        nccl.groupEnd()


def _abort(handles: list[Handle]) -> None:
    first = handles[0]
    first.cuda.cupy.cuda.Device(first.device).use()
    with group_of_calls(first.cuda.nccl):
        for handle in handles:
            handle.comm.abort()


def _destroy(handles: list[Handle]) -> None:
    with group_of_calls(handles[0].cuda.nccl):  # GPUs of one process wait for each other
        for handle in handles:
            handle.cuda.cupy.cuda.Device(handle.device).use()
            handle.comm.destroy()


def start_init(cuda: Cuda, size: int, unique_id: bytes | None, devices: Mapping[int, int]) -> Background[list[Handle]]:
    """Start to make communicators in a daemon thread, all in one group: NCCL waits for all ranks, for ever.

    NCCL connects the ranks for collectives then, unless the user says otherwise. Else the first call of each algorithm
    does that, and waits for the other ranks in `ncclGroupEnd`, without end.

    Args:
        cuda: What makes them.
        size: Number of ranks.
        unique_id: NCCL's, which the first of the ranks made; `None` to make one, if all ranks are here.
        devices: The index of the GPU of each rank of this process. The first one is the current device.
    """
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")

    def make() -> list[Handle]:
        comms: list[Any] = []
        device_of = cuda.cupy.cuda.Device
        try:
            shared = bytes(cuda.nccl.get_unique_id()) if unique_id is None else unique_id
            with group_of_calls(cuda.nccl):
                for rank, device in devices.items():
                    device_of(device).use()
                    comms.append(cuda.nccl.NcclCommunicator(size, shared, rank))
                device_of(next(iter(devices.values()))).use()
        except BaseException as error:
            never_free(tuple(comms))
            if isinstance(error, KeyError):  # CuPy has no word for NCCL's newer ones
                raise UnavailableError(f"NCCL's status {error}") from error
            raise
        return [Handle(cuda, comm, device) for comm, device in zip(comms, devices.values(), strict=True)]

    late = "it came too late, or not all ranks could make it"
    return Background(cuda, "mpidist NCCL", make, lambda handles: abort_all(late, handles))


@atexit.register
def _keep_from_collection() -> None:
    """Leave what is still there to the end of the process: nothing may be collected, and so destroyed."""
    wait_for_endings()
    never_free(tuple(_open))
