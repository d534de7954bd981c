"""Calling a scheduled function, on the rank that does it: bytes to arguments, and its result or error to bytes."""

from __future__ import annotations

import builtins
import traceback
from contextlib import suppress
from typing import Any, Final, final

import numpy as np

from mpidist import errors
from mpidist.coordinator.functions import PerWorkerDatasets, function_named
from mpidist.nest import decode, encode
from mpidist.parameter_server import Servers
from mpidist.transport import text_of

__all__ = ["ADVICE", "Caller", "result_of"]

# What users can do about what cannot be sent.
ADVICE: Final = "what else a function needs, it finds where it is defined"

Array = np.ndarray[Any, Any]

_MAX_TRACE: Final = 8000  # characters


@final
class Caller:
    """Calls functions on this rank.

    Args:
        servers: The servers, to which functions push.
        datasets: The data sets of this worker.
        who: Name of this rank, for errors.
    """

    def __init__(self, servers: Servers, datasets: PerWorkerDatasets, who: str) -> None:
        self._servers, self._datasets, self._who = servers, datasets, who

    def call(self, message: Array, number: int = 0, oldest: int = 0) -> Array:
        """Call the function of a message, wait until its changes are made, and return what `result_of` reads.

        Args:
            message: The function's name, and its arguments.
            number: The number of the call.
            oldest: Calls with lower numbers will not be made again.
        """
        name = "a function"
        try:
            self._servers.begin_call(number, oldest)
            name, arguments = decode(message)
            args, kwargs = decode(arguments, self._datasets.value_of)
            value = function_named(name)(*args, **kwargs)
            self._servers.flush()
            return encode((True, value), f"the result of {name!r}", advice=ADVICE)
        except Exception as error:  # of any kind: the chief raises it
            with suppress(Exception):  # of this function's changes: the next function would raise it
                self._servers.flush()
            text = f"{name!r} failed on {self._who}: {text_of(error)}"
            trace = "".join(traceback.format_exception(error))[-_MAX_TRACE:]
            return encode((False, [kind.__name__ for kind in type(error).__mro__], text, trace), "an error")

    def end(self) -> None:
        """Note that no call follows."""
        self._servers.begin_call(0, 0)


def result_of(message: Array) -> tuple[Any, Exception | None]:
    """Return what a function has returned, or the error that it has raised: of the same kind, if all ranks know it."""
    is_well, *rest = decode(message)
    if is_well:
        return rest[0], None
    names, text, trace = rest
    found = (getattr(errors, name, getattr(builtins, name, None)) for name in names)
    kind = next((one for one in found if isinstance(one, type) and issubclass(one, Exception)), RuntimeError)
    try:
        error = kind(text)
    except TypeError:  # it takes other arguments
        error = RuntimeError(text)
    error.__cause__ = RuntimeError(f"as that rank has it:\n{trace}")
    return None, error
