"""Work that takes long, or never ends, in a thread of its own, while the ranks wait for it together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar, final

from mpidist.transport import cuda
from mpidist.transport.text import first_line
from mpidist.transport.waiting import poll

__all__ = ["Background"]

_T = TypeVar("_T")


@final
class Background(Generic[_T]):
    """Does work in a daemon thread, on the device that is current here, while this rank reports to the others.

    `discard` ends a result that was made in spite of `cancel`.
    """

    def __init__(self, name: str, work: Callable[[], _T], discard: Callable[[_T], None] = lambda result: None) -> None:
        self._work, self._discard = work, discard
        self._device = cuda.cupy().cuda.Device()
        self._outcome: Future[_T] = Future()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def outcome(self) -> tuple[bool, str]:
        """Return whether the work is over, and its error. Local."""
        if not self._outcome.done():
            return False, ""
        problem = self._outcome.exception()
        return True, "" if problem is None else first_line(problem) or type(problem).__name__

    def wait(self, look: Callable[[], None] = lambda: None) -> _T:
        """Return the result of the work, once it is over, or raise its error. `look`: called meanwhile."""
        poll(self._outcome.done, look, is_message=False)
        return self._outcome.result()

    def cancel(self) -> None:
        """Discard the result of the work, also a later one. Returns soon."""
        self._outcome.add_done_callback(lambda its: self._discard(its.result()) if its.exception() is None else None)

    def _run(self) -> None:
        try:
            self._device.use()  # a thread begins with the first one
            result = self._work()
        except Exception as error:
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(result)
