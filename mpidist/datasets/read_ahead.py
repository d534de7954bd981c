"""Batches that a thread reads ahead of the program."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, final

from mpidist.transport.group.thread_guard import forbid_calls_here

__all__ = ["ReadAhead"]

_ONLY_READS: Final = (
    "in the thread that reads batches ahead: on each rank it would come at another time among the program's own calls. "
    "Let the data set only read, or leave experimental_per_replica_buffer_size at 1"
)

_Ready = queue.SimpleQueue[tuple[Any, BaseException | None]]  # batches; the last one, the error that ended reading


@final
class ReadAhead(Iterator[Any]):
    """One pass over batches, of which a thread reads up to `num_ahead` ahead.

    The thread only iterates the batches: it makes no collective call. It ends with the pass, or when this object is
    garbage-collected, after the batch that it reads. Where passes share an iterator, it begins when the threads of
    `left` have ended, and is added to them when it is to end.
    """

    def __init__(
        self, batches: Iterable[Any], num_ahead: int, left: Sequence[weakref.WeakSet[threading.Thread]]
    ) -> None:
        ready: _Ready = queue.SimpleQueue()
        self._ready, self._places = ready, threading.Semaphore(num_ahead)
        places, is_left = self._places, threading.Event()
        arguments = (batches, ready, places, is_left, [*chain(*left)])
        thread = threading.Thread(target=_read, args=arguments, name="mpidist.read_ahead", daemon=True)

        def leave() -> None:
            for threads in left:
                threads.add(thread)
            is_left.set()
            places.release()  # the thread may wait for a place

        weakref.finalize(self, leave)
        thread.start()

    def __next__(self) -> Any:
        batch, error = self._ready.get()
        if error is not None:
            self._ready.put((None, error))  # later calls raise the error, too
            raise error
        self._places.release()
        return batch


def _read(
    batches: Iterable[Any],
    ready: _Ready,
    places: threading.Semaphore,
    is_left: threading.Event,
    before: list[threading.Thread],
) -> None:
    """Put all batches into a queue, and then the error or the `StopIteration` that ended them."""
    forbid_calls_here(_ONLY_READS)
    while before:
        before.pop().join()
    try:
        steps = iter(batches)
        while True:
            places.acquire()
            if is_left.is_set():
                return
            ready.put((next(steps), None))
    except BaseException as problem:  # of any kind: `next` raises it in the program's thread
        ready.put((None, problem))
