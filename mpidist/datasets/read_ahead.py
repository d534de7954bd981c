"""Batches that a thread reads ahead of the program."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, final

__all__ = ["ReadAhead"]

_WAKE_SECONDS: Final = 0.1  # between two looks of the thread at whether anybody wants more


@final
class _Read(NamedTuple):
    """What came of reading one batch."""

    batch: Any
    error: BaseException | None = None


@final
class ReadAhead(Iterator[Any]):
    """One pass over batches, of which a thread reads some before they are asked for.

    The thread only iterates the source: it makes no collective call. It ends with the pass, or when nobody holds this
    object any more.

    Args:
        source: The batches.
        num_ahead: How many may be ready at a time.
    """

    def __init__(self, source: Iterable[Any], num_ahead: int) -> None:
        self._ready: queue.Queue[_Read] = queue.Queue(num_ahead)
        is_unwanted = threading.Event()
        weakref.finalize(self, is_unwanted.set)
        arguments = (source, self._ready, is_unwanted)
        threading.Thread(target=_read, args=arguments, name="mpidist.read_ahead", daemon=True).start()

    def __next__(self) -> Any:
        read = self._ready.get()
        if read.error is not None:
            self._ready.put(read)  # what is over stays over
            raise read.error
        return read.batch


def _read(source: Iterable[Any], ready: queue.Queue[_Read], is_unwanted: threading.Event) -> None:
    """Read batches to their end, as far as there is place for them."""
    error: BaseException = StopIteration()
    try:
        for batch in source:
            if not _hand_over(_Read(batch), ready, is_unwanted):
                return
    except BaseException as problem:  # whatever reading runs into, it is the program's who asks for the batch
        error = problem
    _hand_over(_Read(None, error), ready, is_unwanted)


def _hand_over(read: _Read, ready: queue.Queue[_Read], is_unwanted: threading.Event) -> bool:
    while not is_unwanted.is_set():
        try:
            ready.put(read, timeout=_WAKE_SECONDS)
        except queue.Full:
            continue
        return True
    return False
