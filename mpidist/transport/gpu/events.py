"""Streams of a GPU, events that mark places in them, and the work that is launched there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

from mpidist.errors import UnavailableError
from mpidist.transport import cuda

__all__ = ["Launched", "is_complete", "new_event", "new_stream", "on_stream", "record_event"]

_PRIORITY: Final = -1  # above that of other streams, 0, whose kernels would else fill the GPU first
_NOT_READY: Final = 600  # CUDA's status of an event that is not complete


def is_complete(event: Any, what: str, way: str) -> bool:
    """Whether the GPU has completed an event. Never waits. `what` and `way`: the call and how it goes, for errors.

    Not `Event.done`, which takes an error of CUDA for an event that is not complete.

    Raises:
        UnavailableError: If CUDA has failed, in this work or any before it.
    """
    status = cuda.cupy().cuda.runtime.eventQuery(event.ptr)
    if status not in (0, _NOT_READY):
        raise UnavailableError(
            f"{what} {way} failed: CUDA's status {status}. The GPU's context is lost: end the job, look for memory "
            "errors with `dmesg` and compute-sanitizer, and start it again"
        )
    return bool(status == 0)


def new_stream() -> Any:
    """Make a stream that waits for no other one by itself, and whose kernels begin before those of the user's."""
    return cuda.cupy().cuda.Stream(non_blocking=True, priority=_PRIORITY)


@contextmanager
def on_stream(stream: Any) -> Iterator[Any]:
    """Make a stream current for the body of a `with` statement, and yield the one that was.

    CuPy's own `with stream:` goes back to the last stream that was entered so, not to one made current by `use`.
    """
    before = cuda.cupy().cuda.get_current_stream()
    stream.use()
    try:
        yield before
    finally:
        before.use()


def new_event() -> Any:
    """Make an event of the current device, which is complete until it is recorded."""
    return cuda.cupy().cuda.Event(disable_timing=True)


def record_event() -> Any:
    """Record a new event after the work that the current stream holds now."""
    return cuda.cupy().cuda.get_current_stream().record(new_event())


@final
@dataclass(slots=True, eq=False)
class Launched:
    """Work on the GPU that the host may not have waited for."""

    what: str  # the call, for errors
    result: Any  # of the function that launched the work
    event: Any  # is complete when the work is done
    memory: Any  # must live as long as the work
