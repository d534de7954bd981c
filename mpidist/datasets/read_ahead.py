"""Batches that a thread reads ahead of the program."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, final

__all__ = ["ReadAhead"]

_WAKE_SECONDS: Final = 0.1  # how often a thread whose queue is full checks whether the pass was abandoned


@final
class _Item(NamedTuple):
    """A batch that was read, or the error that ended reading."""

    batch: Any
    error: BaseException | None = None


@final
class ReadAhead(Iterator[Any]):
    """One pass over batches that a thread reads ahead.

    The thread only iterates the batches: it makes no collective call. It ends with the pass, or when this object is
    garbage-collected.

    Args:
        batches: The batches.
        num_ahead: Number of batches that the thread reads ahead at most.
    """

    def __init__(self, batches: Iterable[Any], num_ahead: int) -> None:
        self._ready: queue.Queue[_Item] = queue.Queue(num_ahead)
        abandoned = threading.Event()
        weakref.finalize(self, abandoned.set)
        arguments = (batches, self._ready, abandoned)
        threading.Thread(target=_read, args=arguments, name="mpidist.read_ahead", daemon=True).start()

    def __next__(self) -> Any:
        item = self._ready.get()
        if item.error is not None:
            self._ready.put(item)  # later calls raise the error, too
            raise item.error
        return item.batch


def _read(batches: Iterable[Any], ready: queue.Queue[_Item], abandoned: threading.Event) -> None:
    """Put all batches into a queue, and then the error or the `StopIteration` that ended them."""
    error: BaseException = StopIteration()
    try:
        for batch in batches:
            if not _put(_Item(batch), ready, abandoned):
                return
    except BaseException as problem:  # of any kind: `next` raises it in the program's thread
        error = problem
    _put(_Item(None, error), ready, abandoned)


def _put(item: _Item, ready: queue.Queue[_Item], abandoned: threading.Event) -> bool:
    """Wait for room in a queue. Returns False if the pass was abandoned meanwhile."""
    while not abandoned.is_set():
        try:
            ready.put(item, timeout=_WAKE_SECONDS)
        except queue.Full:
            continue
        return True
    return False
