"""One call that was scheduled, and its result, which the chief receives later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

import numpy as np

from mpidist.errors import CancelledError

__all__ = ["Closure", "RemoteValue"]

Array = np.ndarray[Any, Any]
_NOTHING: Final = object()


@final
class RemoteValue:
    """What a scheduled function will return. `fetch` waits for it.

    Args:
        wait: Waits until a condition holds.
    """

    def __init__(self, wait: Callable[[Callable[[], bool]], None]) -> None:
        self._wait = wait
        self._value: Any = _NOTHING
        self._error: Exception | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the function has returned, has failed, or was cancelled."""
        return self._value is not _NOTHING or self._error is not None

    def set(self, value: Any) -> None:
        """Note what the function has returned."""
        self._value = value

    def fail(self, error: Exception) -> None:
        """Note why there is no value."""
        self._error = error

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


@final
class Closure:
    """A call that was scheduled.

    Args:
        number: The number of the call, from 1 on. Also an attribute.
        name: The name of the function. Also an attribute.
        message: What a worker is sent. Also an attribute.
        value: Where the result goes. Also an attribute.
    """

    __slots__ = ("message", "name", "number", "value")

    def __init__(self, number: int, name: str, message: Array, value: RemoteValue) -> None:
        self.number, self.name, self.message, self.value = number, name, message, value

    def cancel(self, why: str) -> None:
        """Note that the function will not be called."""
        self.value.fail(CancelledError(f"{self.name!r} was not called: {why}"))
