"""NCCL's communicators of this process, from birth to a certain end, and NCCL's errors as ours.

NCCL can block for ever wherever a peer is gone: in its constructor, and when a communicator is destroyed, which CuPy
does at garbage collection. So every handle is kept here until it is destroyed or aborted, both happen in a daemon
thread that nobody waits for longer than `LIMIT_SECONDS`, and which holds what does not end.

NCCL wants all communicators of a device aborted together, in one group; one after the other may deadlock.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, final

from mpidist.errors import DeadlineExceededError, PeerFailedError, UnavailableError
from mpidist.transport import arrays, cuda
from mpidist.transport.gpu.background import Background
from mpidist.transport.text import first_line
from mpidist.transport.waiting import never_free

__all__ = [
    "START_SECONDS",
    "Handle",
    "abort_all",
    "destroy",
    "error_text",
    "group_of_calls",
    "num_open",
    "start_init",
    "translated",
    "wait_for_endings",
]

logger = logging.getLogger("mpidist.transport")

START_SECONDS: Final = 120.0  # what NCCL may take to start: some seconds on thousands of GPUs
LIMIT_SECONDS: Final = 10.0  # what an abort or a destruction may take
_REMOTE: Final = (2, 6)  # NCCL's statuses: a call of the system failed; another process or the network did
_LIBRARY: Final = "libnccl.so.2"
_PROMPT_SECONDS: Final = 0.2  # what the caller of `abort_all` waits: it has an error to raise


@final
class Handle:
    """One communicator of NCCL, which CuPy made, with the index of the GPU that it works on."""

    def __init__(self, comm: Any, device: int) -> None:
        self.comm, self.device = comm, device
        self.ended = ""  # why it cannot be used any more
        self.connected: set[Any] = set()  # the kinds of calls for which it has connections: see `DeviceQueue.issue`
        self.keeps: Any = None  # what may not be collected before it
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
        """Raise an error of a kind, if the communicator has ended. `what`: the call, for people.

        Without the lock, as it only looks at a text. It could not be held during the launch that follows: that may
        wait in NCCL for ever, and an abort of another thread is what ends it.
        """
        if self.ended:
            text = f"{what}: the communicator cannot be used any more, because {self.ended}"
            raise kind(f"{text}; call strategy.reset() on all ranks")


_lock: Final = threading.Lock()
_open: Final[list[Handle]] = []
_ending: Final[list[tuple[str, float, threading.Thread]]] = []  # what ends, until when it may, and the thread


def num_open() -> int:
    """Count the communicators that are neither destroyed nor aborted."""
    return len(_open)


def abort_all(reason: str | BaseException, handles: Iterable[Handle] | None = None) -> None:
    """Abort communicators of this process, by default all, in one group, after a failure. Local; returns soon.

    `reason`: the text of later errors, or the failure itself.
    """
    if isinstance(reason, BaseException):
        reason = f"an earlier call failed ({type(reason).__name__}: {first_line(reason)})"
    _end("the abort of communicators", lambda handle: handle.comm.abort(), handles, reason)


def destroy(handles: Iterable[Handle]) -> None:
    """Destroy communicators that nothing is under way in. All their ranks must do so. Waits."""
    _end("the end of communicators", lambda handle: handle.comm.destroy(), handles, "it was freed")
    wait_for_endings()


def wait_for_endings() -> None:
    """Wait for what still ends, as long as it may take; then it is left alone for ever. Local."""
    with _lock:
        endings = _ending[:]
        _ending.clear()
    for what, until, thread in endings:
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            late = "NCCL: %s did not end within %g s; end this process soon, its GPU is not free"
            logger.warning(late, what, LIMIT_SECONDS)


def _end(what: str, end: Callable[[Handle], None], handles: Iterable[Handle] | None, reason: str) -> None:
    """Take handles out of use, all of them for `None`, and end them as a group in a daemon thread, as that may hang."""
    with _lock:
        wanted = set(_open if handles is None else handles)
        taken = [handle for handle in _open if handle in wanted]
        for handle in taken:
            _open.remove(handle)
            handle.ended = reason
    if not taken:
        return

    def run() -> None:
        try:
            with group_of_calls():  # GPUs of one process wait for each other
                for handle in taken:
                    arrays.use_gpu(handle.device)
                    end(handle)
        except Exception as error:
            logger.warning("NCCL: %s failed: %s", what, error_text(error))

    thread = threading.Thread(target=run, name=f"mpidist {what}", daemon=True)
    with _lock:
        _ending.append((what, time.monotonic() + LIMIT_SECONDS, thread))
    thread.start()
    thread.join(_PROMPT_SECONDS)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise NCCL's errors as ours. `what`: which call of which rank, for people.

    Raises:
        PeerFailedError: If another rank or the network failed.
        DeadlineExceededError: If NCCL's own time is up.
        UnavailableError: If NCCL failed in another way.
    """
    try:
        yield
    except cuda.nccl().NcclError as error:
        head = f"{what} failed: {error_text(error)}. "
        if error.status in _REMOTE:
            raise PeerFailedError(
                f"{head}Look for the first error of another rank, and at the network; NCCL_DEBUG=WARN prints more. "
                "After strategy.reset() on all ranks the calls can be made again"
            ) from error
        raise UnavailableError(
            f"{head}NCCL_DEBUG=WARN prints more; MPIDIST_NCCL=0 uses the host instead of NCCL"
        ) from error
    except KeyError as status:
        kind = DeadlineExceededError if status.args == (8,) else UnavailableError
        raise kind(
            f"{what} failed with {error_text(status)}; unset NCCL_COMM_BLOCKING, and see NCCL_DEBUG=WARN's output"
        ) from status


@contextmanager
def group_of_calls() -> Iterator[None]:
    """Make NCCL's calls as one group, which is launched at the end: an error in the middle ends the group, too."""
    nccl = cuda.nccl()
    nccl.groupStart()
    try:
        yield
    finally:
        nccl.groupEnd()


def start_init(size: int, unique_id: bytes | None, devices: Mapping[int, int]) -> Background[list[Handle]]:
    """Start to make communicators in a daemon thread, all in one group: NCCL waits for all ranks, for ever.

    NCCL connects the ranks for collectives then, unless the user disables it. Else the first call of each algorithm
    does that, and waits for the other ranks in `ncclGroupEnd`, without end.

    `unique_id` is NCCL's, of the first rank; `None` makes one, if all ranks are here. `devices` has the GPU of each
    rank of this process; the first one is the current device.
    """
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")

    def make() -> list[Handle]:
        nccl = cuda.nccl()
        comms: list[Any] = []
        try:
            shared = bytes(nccl.get_unique_id()) if unique_id is None else unique_id
            with group_of_calls():
                for rank, device in devices.items():
                    with cuda.cupy().cuda.Device(device):
                        comms.append(nccl.NcclCommunicator(size, shared, rank))
        except BaseException as error:
            never_free(tuple(comms))
            raise UnavailableError(error_text(error)) from error
        return [Handle(comm, device) for comm, device in zip(comms, devices.values(), strict=True)]

    late = "it came too late, or not all ranks could make it"
    return Background("mpidist NCCL", make, lambda handles: abort_all(late, handles))


def error_text(error: BaseException) -> str:
    """Return the text of an error of CuPy's binding, in one line, with NCCL's last warning in this process."""
    is_unknown = isinstance(error, KeyError)  # CuPy has no word for NCCL's newer statuses: 7 in progress, 8 timeout
    text, warning = f"NCCL's status {error}" if is_unknown else first_line(error), _last_warning()
    return f"{text}; NCCL's last warning here: {warning}" if warning else text


def _last_warning() -> str:
    """Return the text that NCCL keeps of its last warning, also without NCCL_DEBUG; nothing if there was none."""
    try:
        library = ctypes.CDLL(_LIBRARY, os.RTLD_NOW | os.RTLD_NOLOAD)  # CuPy's, and never a second one
        get_last_error = library.ncclGetLastError
    except (OSError, AttributeError):  # under another name, or of another maker
        return ""
    get_last_error.argtypes, get_last_error.restype = [ctypes.c_void_p], ctypes.c_char_p
    kept: bytes = get_last_error(None) or b""  # one text for all communicators
    return " ".join(kept.decode(errors="replace").split()).rstrip(".")


@atexit.register
def _keep_from_collection() -> None:
    """Keep all handles to the end of the process: none may be collected, and so destroyed."""
    wait_for_endings()
    never_free(tuple(_open))
