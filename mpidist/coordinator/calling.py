"""Calling a scheduled function, on the rank that does it: bytes to arguments, and its result or error to bytes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, final

import numpy as np

from mpidist.coordinator.functions import PerWorkerDatasets, function_named
from mpidist.errors import OutOfRangeError
from mpidist.nest.encoding import decode, encode
from mpidist.parameter_server.client import ParameterClient
from mpidist.transport.text import text_of
from mpidist.transport.tracebacks import traceback_text

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

    def __init__(self, servers: ParameterClient, datasets: PerWorkerDatasets, who: str) -> None:
        self._servers, self._datasets, self._who = servers, datasets, who
        self._pid = os.getpid()

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
            with self._named(name):
                value = function_named(name)(*args, **kwargs)
            self._require_rank(name)
            self._servers.flush()
            return encode((True, value), f"the result of {name!r}", advice=ADVICE)
        except Exception as error:  # of any kind: the chief raises it
            if os.getpid() != self._pid:
                raise
            return self._failed(name, error, text_of(error))
        except SystemExit as error:
            if os.getpid() != self._pid:
                raise
            code = "" if error.code is None else repr(error.code)
            text = f"it called sys.exit({code}), which would end this worker; return from the function"
            return self._failed(name, error, text)

    def _require_rank(self, name: str) -> None:
        """Raise in a process that the function has forked: it must not send the chief a result in the worker's name."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{name!r} has returned in a process that it has forked on {self._who}: end the process with os._exit()"
            )

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Let calls of all workers be refused, as this worker alone would make them."""
        outer, self._servers.function = self._servers.function, name
        try:
            yield
        finally:
            self._servers.function = outer

    def _failed(self, name: str, error: BaseException, text: str) -> Array:
        with suppress(Exception):  # of this function's changes: the next function would raise it
            self._servers.flush()
        trace = traceback_text(error)[-_MAX_TRACE:]
        kinds = [(kind.__module__, kind.__qualname__) for kind in type(error).__mro__]
        return encode((False, kinds, f"{name!r} failed on {self._who}: {text}", trace), "an error")

    def require_no_function(self, call: str) -> None:
        """Raise if a call is made in a function that the chief has scheduled."""
        self._servers.require_no_function(call)

    def end(self) -> None:
        """Note that no call follows."""
        self._servers.begin_call(0, 0)


def result_of(message: Array) -> tuple[Any, Exception | None]:
    """Return what a function has returned, or the error that it has raised.

    The error is of the same kind, if this rank has imported it, and it can be made from a text; else of its next base.
    A `StopIteration` becomes an `OutOfRangeError`.
    """
    is_well, *rest = decode(message)
    if is_well:
        return rest[0], None
    kinds, text, trace = rest
    error = next((error for kind in kinds if (error := _made(kind, text)) is not None), RuntimeError(text))
    if isinstance(error, StopIteration):  # it would end a loop of the chief, which then seems to have done all its work
        error = OutOfRangeError(text)
    error.__cause__ = RuntimeError(f"as that rank has it:\n{trace}")
    return None, error


def _made(kind_of: tuple[str, str], text: str) -> Exception | None:
    """Make an error of a kind that a module of this rank has; `None` if there is no such kind, or it refuses a text."""
    module, name = kind_of
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return None
    try:
        return kind(text)
    except Exception:  # of any kind: it is code of the program
        return None
