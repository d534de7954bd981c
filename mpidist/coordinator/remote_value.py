"""One call that was scheduled, and its result, which the chief receives later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

import numpy as np

from mpidist.errors import CancelledError

__all__ = ["RemoteValue"]

Array = np.ndarray[Any, Any]
_NOTHING: Final = object()


@final
class RemoteValue:
    """What a scheduled function will return. `fetch` waits for it.

    Args:
        number: The number of the call, from 1 on. Also an attribute.
        name: The name of the function. Also an attribute.
        message: What a worker is sent. Also an attribute, until there is a result.
        wait: Waits until a condition holds.
    """

    def __init__(self, number: int, name: str, message: Array, wait: Callable[[Callable[[], bool]], None]) -> None:
        self.number, self.name, self.message = number, name, message
        self._wait = wait
        self._value: Any = _NOTHING
        self._error: Exception | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the function has returned, has failed, or was cancelled."""
        return self._value is not _NOTHING

    def set(self, value: Any, error: Exception | None) -> None:
        """Note what the function has returned, or why there is no value."""
        self._value, self._error, self.message = value, error, np.empty(0, np.uint8)

    def cancel(self, why: str) -> None:
        """Note that the function will not be called."""
        self.set(None, CancelledError(f"{self.name!r} was not called: {why}"))

    def fetch(self) -> Any:
        """Wait for the function, and return what it has returned. On the chief.

        Raises:
            CancelledError: If the function was not called, because another one had failed.
            Exception: What the function has raised.
        """
        if not self.is_ready:  # what is here can be read even if workers or servers are lost since
            self._wait(lambda: self.is_ready)
        if self._error is not None:
            raise self._error
        return self._value

    def get(self) -> Any:
        """Wait for the function, and return what it has returned: `fetch`."""
        return self.fetch()

    def __repr__(self) -> str:
        state = "waits" if not self.is_ready else repr(self._value) if self._error is None else repr(self._error)
        return f"<RemoteValue: {state}>"
