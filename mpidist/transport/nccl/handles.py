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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, final

from mpidist.errors import UnavailableError
from mpidist.transport.cuda import Cuda
from mpidist.transport.gpu import Background
from mpidist.transport.waiting import never_free

__all__ = [
    "LIMIT_SECONDS",
    "Handle",
    "abort_all",
    "destroy",
    "num_open",
    "start_init",
    "start_init_in_one_process",
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


_lock: Final = threading.Lock()
_open: Final[list[Handle]] = []
_ending: Final[list[_Ending]] = []


@final
class _Ending:
    """Something that may hang, done by a daemon thread.

    Args:
        what: For people.
        work: The work.
        keeps: What must not be collected before it is done.
    """

    def __init__(self, what: str, work: Callable[[], None], keeps: Iterable[Any]) -> None:
        self.what = what
        self._work = work
        self._keeps = tuple(keeps)
        self._error: Exception | None = None
        self._until = time.monotonic() + LIMIT_SECONDS
        self._thread = threading.Thread(target=self._run, name=f"mpidist {what}", daemon=True)
        _ending.append(self)
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Wait for at most so long; say whether it is done."""
        self._thread.join(min(seconds, max(0.0, self._until - time.monotonic())))
        if self._thread.is_alive():
            return False
        if self._forget() and self._error is not None:
            logger.warning("NCCL: %s failed: %s", self.what, self._error)
        return True

    def cancel(self) -> None:
        """Leave it alone for ever."""
        never_free((self._keeps, self))
        if self._forget():
            logger.warning(
                "NCCL: %s did not end within %g s; end this process soon, its GPU is not free", self.what, LIMIT_SECONDS
            )

    def _forget(self) -> bool:
        """Take this end off the list of ends that are waited for; say whether it was there."""
        with _lock:  # two threads may see it end
            was_waited_for = self in _ending
            if was_waited_for:
                _ending.remove(self)
        return was_waited_for

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._error = error


def num_open() -> int:
    """Count the communicators that are neither destroyed nor aborted."""
    return len(_open)


def abort_all(reason: str) -> None:
    """Abort all communicators of this process, in one group, after a failure. Local; returns soon.

    Args:
        reason: What the error of a later use says.
    """
    handles = _take(None, reason)
    if handles:
        _Ending("the abort of communicators", lambda: _abort(handles), handles).join(_PROMPT_SECONDS)


def destroy(handles: Iterable[Handle]) -> None:
    """Destroy communicators that nothing is under way in. All their ranks must do so. Waits."""
    taken = _take(list(handles), "it was freed")
    if not taken:
        return
    ending = _Ending("the end of communicators", lambda: _destroy(taken), taken)
    if not ending.join(LIMIT_SECONDS):
        ending.cancel()


def wait_for_endings() -> None:
    """Wait for aborts that still go on, as long as they may take. Local."""
    for ending in list(_ending):
        if not ending.join(LIMIT_SECONDS):
            ending.cancel()


def _take(handles: list[Handle] | None, reason: str) -> list[Handle]:
    """Take handles out of use; all of them, for `None`."""
    with _lock:
        taken = [handle for handle in _open if handles is None or handle in handles]
        for handle in taken:
            _open.remove(handle)
            handle.ended = reason
    return taken


def _abort(handles: list[Handle]) -> None:
    nccl = handles[0].cuda.nccl
    handles[0].cuda.cupy.cuda.Device(handles[0].device).use()
    nccl.groupStart()
    for handle in handles:
        handle.comm.abort()
    nccl.groupEnd()


def _destroy(handles: list[Handle]) -> None:
    nccl = handles[0].cuda.nccl
    nccl.groupStart()  # GPUs of one process wait for each other
    for handle in handles:
        handle.cuda.cupy.cuda.Device(handle.device).use()
        handle.comm.destroy()
    nccl.groupEnd()


def _connect_at_start() -> None:
    """Let NCCL connect the ranks for collectives in its constructor, unless the user says otherwise.

    Else the first call of each algorithm does that, and waits for the other ranks in `ncclGroupEnd`, without end.
    """
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")


def start_init(cuda: Cuda, size: int, unique_id: bytes, rank: int, device: int) -> Background[Handle]:
    """Start to make one communicator in a daemon thread: NCCL's constructor waits for all ranks, for ever.

    Args:
        cuda: What makes it.
        size: Number of ranks.
        unique_id: NCCL's, which the first of the ranks made.
        rank: This rank.
        device: The index of its GPU, the current device.
    """

    def make() -> Handle:
        _connect_at_start()
        try:
            return Handle(cuda, cuda.nccl.NcclCommunicator(size, unique_id, rank), device)
        except KeyError as status:  # CuPy has no word for NCCL's newer ones
            raise UnavailableError(f"NCCL's status {status}") from status

    return Background(cuda, "mpidist NCCL", make, lambda handle: _discard([handle]))


def start_init_in_one_process(cuda: Cuda, devices: Sequence[int]) -> Background[list[Handle]]:
    """Start to make the communicators of several GPUs of this process, all in one group, in a daemon thread.

    Args:
        cuda: What makes them.
        devices: The indices of the GPUs. The first one is the current device.
    """

    def make() -> list[Handle]:
        comms: list[Any] = []
        _connect_at_start()
        unique_id = bytes(cuda.nccl.get_unique_id())
        try:
            cuda.nccl.groupStart()
            try:
                for rank, device in enumerate(devices):
                    cuda.cupy.cuda.Device(device).use()
                    comms.append(cuda.nccl.NcclCommunicator(len(devices), unique_id, rank))
            finally:
                cuda.cupy.cuda.Device(devices[0]).use()
                cuda.nccl.groupEnd()
        except BaseException as error:
            never_free(tuple(comms))
            if isinstance(error, KeyError):  # CuPy has no word for NCCL's newer ones
                raise UnavailableError(f"NCCL's status {error}") from error
            raise
        return [Handle(cuda, comm, device) for comm, device in zip(comms, devices, strict=True)]

    return Background(cuda, "mpidist NCCL", make, _discard)


def _discard(handles: list[Handle]) -> None:
    """Abort communicators that came too late, or that not all ranks could make, if `abort_all` has not."""
    taken = _take(handles, "it came too late, or not all ranks could make it")
    if taken:
        _Ending("the abort of communicators", lambda: _abort(taken), taken).join(_PROMPT_SECONDS)


@atexit.register
def _keep_from_collection() -> None:
    """Leave what is still there to the end of the process: nothing may be collected, and so destroyed."""
    wait_for_endings()
    never_free(tuple(_open))
