"""Work that takes long, or never ends, in a thread of its own, while the ranks wait for it together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, final

from mpidist.transport.cuda import Cuda
from mpidist.transport.text import first_line

__all__ = ["Background"]

_T = TypeVar("_T")


@final
class Background(Generic[_T]):
    """Does work in a daemon thread, on the device that is current here, while this rank tells the others how it goes.

    Args:
        cuda: What this process has of CuPy.
        name: Of the thread.
        work: The work.
        discard: Ends a result that was made in spite of `cancel`.
    """

    def __init__(
        self, cuda: Cuda, name: str, work: Callable[[], _T], discard: Callable[[_T], None] = lambda result: None
    ) -> None:
        self._cuda: Any = cuda.cupy.cuda
        self._work, self._discard = work, discard
        self._device = int(self._cuda.runtime.getDevice())
        self._lock = threading.Lock()
        self._is_over = self._is_cancelled = False
        self._results: list[_T] = []
        self._problem: Exception | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def outcome(self) -> tuple[bool, str]:
        """Say whether the work is over, and what went wrong. Local."""
        with self._lock:
            problem = self._problem
            return self._is_over, "" if problem is None else first_line(problem) or type(problem).__name__

    def take(self) -> _T:
        """Return what the work has made, once it is over.

        Raises:
            Exception: What the work raised.
        """
        if self._problem is not None:
            raise self._problem
        return self._results[0]

    def cancel(self) -> None:
        """Discard what the work has made, or will ever make. Returns soon."""
        with self._lock:
            self._is_cancelled = True
            results = self._results
        for result in results:
            self._discard(result)

    def _run(self) -> None:
        results: list[_T] = []
        problem: Exception | None = None
        try:
            self._cuda.Device(self._device).use()  # a thread begins with the first one
            results.append(self._work())
        except Exception as error:
            problem = error
        with self._lock:
            self._results, self._problem, self._is_over = results, problem, True
            is_cancelled = self._is_cancelled
        if is_cancelled:
            for result in results:
                self._discard(result)
