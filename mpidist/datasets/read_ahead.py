"""Batches that a thread reads ahead of the program."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, final

from mpidist.transport.group.thread_guard import forbid_calls_here

__all__ = ["ReadAhead"]

_ONLY_READS: Final = (
    "in the thread that reads batches ahead: on each rank it would come at another time among the program's own calls. "
    "Let the data set only read, or leave experimental_per_replica_buffer_size at 1"
)


@final
class _Item(NamedTuple):
    """A batch that was read, or the error that ended reading."""

    batch: Any
    error: BaseException | None = None


@final
class _Shelf:
    """What the thread and the program share: batches that are ready, and places for more.

    Args:
        num_places: For how many batches there is place.
    """

    def __init__(self, num_places: int) -> None:
        self.ready: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self.places = threading.Semaphore(num_places)
        self.is_abandoned = False

    def abandon(self) -> None:
        """Let the thread end, also where it waits for a place."""
        self.is_abandoned = True
        self.places.release()


@final
class ReadAhead(Iterator[Any]):
    """One pass over batches that a thread reads ahead.

    The thread only iterates the batches: it makes no collective call. It ends with the pass, or when this object is
    garbage-collected, after the batch that it reads.

    Args:
        batches: The batches.
        num_ahead: Number of batches that the thread reads ahead at most.
    """

    def __init__(self, batches: Iterable[Any], num_ahead: int) -> None:
        self._shelf = _Shelf(num_ahead)
        weakref.finalize(self, self._shelf.abandon)
        arguments = (batches, self._shelf)
        threading.Thread(target=_read, args=arguments, name="mpidist.read_ahead", daemon=True).start()

    def __next__(self) -> Any:
        item = self._shelf.ready.get()
        if item.error is not None:
            self._shelf.ready.put(item)  # later calls raise the error, too
            raise item.error
        self._shelf.places.release()
        return item.batch


def _read(batches: Iterable[Any], shelf: _Shelf) -> None:
    """Put all batches on a shelf, and then the error or the `StopIteration` that ended them."""
    forbid_calls_here(_ONLY_READS)
    try:
        steps = iter(batches)
        while True:
            shelf.places.acquire()
            if shelf.is_abandoned:
                return
            shelf.ready.put(_Item(next(steps)))
    except BaseException as problem:  # of any kind: `next` raises it in the program's thread
        shelf.ready.put(_Item(None, problem))
