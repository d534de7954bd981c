"""Streams of a GPU, events that mark places in them, and the work that is launched there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

from mpidist.errors import UnavailableError
from mpidist.transport.cuda import Cuda

__all__ = ["Events", "Launched", "is_complete", "new_stream", "on_stream"]

_PRIORITY: Final = -1  # above that of other streams, 0, whose kernels would else fill the GPU first
_NOT_READY: Final = 600  # CUDA's status of an event that is not complete


def is_complete(cupy: Any, event: Any, what: str, way: str) -> bool:
    """Say whether the GPU has come to an event. Never waits.

    Not `Event.done`, which takes an error of CUDA for an event that is not complete.

    Args:
        cupy: CuPy.
        event: The event.
        what: The call, for errors.
        way: How it goes, for errors.

    Raises:
        UnavailableError: If CUDA has failed, in this work or any before it.
    """
    status = cupy.cuda.runtime.eventQuery(event.ptr)
    if status not in (0, _NOT_READY):
        raise UnavailableError(
            f"{what} {way} failed: CUDA's status {status}. The GPU's context is lost: end the job, look for memory "
            "errors with `dmesg` and compute-sanitizer, and start it again"
        )
    return bool(status == 0)


def new_stream(cuda: Any) -> Any:
    """Make a stream that waits for no other one by itself, and whose kernels begin before those of the user's.

    Args:
        cuda: The module `cupy.cuda`.
    """
    return cuda.Stream(non_blocking=True, priority=_PRIORITY)


@contextmanager
def on_stream(cupy: Any, stream: Any) -> Iterator[Any]:
    """Make a stream current for the body of a `with` statement, and yield the one that was.

    CuPy's own `with stream:` goes back to the last stream that was entered so, not to one made current by `use`.
    """
    before = cupy.cuda.get_current_stream()
    stream.use()
    try:
        yield before
    finally:
        before.use()


@final
class Events:
    """CUDA events, used again: a stream that waits for an event waits for the place that the event marked then.

    Args:
        cuda: What this process has of CuPy.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._free: list[Any] = []

    def record(self) -> Any:
        """Mark what the current stream holds now."""
        cuda = self._cuda.cupy.cuda
        try:
            event = self._free.pop()
        except IndexError:  # not asked before: another thread may take the last one
            event = cuda.Event(disable_timing=True)
        event.record(cuda.get_current_stream())
        return event

    def give_back(self, event: Any) -> None:
        """Let an event that nobody waits for any more be recorded anew."""
        self._free.append(event)

    def follow(self, event: Any) -> None:
        """Let the current stream wait for an event, and give it back."""
        self._cuda.cupy.cuda.get_current_stream().wait_event(event)
        self.give_back(event)


@final
@dataclass(slots=True, eq=False)
class Launched:
    """Work on the GPU that the host may not have waited for.

    Attributes:
        what: The call, for errors.
        result: What the function that launched the work returned.
        event: Is complete when the work is done.
        memory: What must live as long as the work.
    """

    what: str
    result: Any
    event: Any
    memory: Any
