"""Worker's loop: it calls functions for the chief, and sends their results or errors, until the chief ends."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from contextlib import suppress
from typing import Any, Final, final

import numpy as np

from mpidist.coordinator.functions import PerWorkerDatasets, function_named
from mpidist.errors import OutOfRangeError, PeerFailedError
from mpidist.nest.encoding import decode, encode
from mpidist.parameter_server.client import ParameterClient
from mpidist.parameter_server.messages.ends import Connection
from mpidist.parameter_server.messages.protocol import Header, Op, Outcome
from mpidist.transport.group.service_group import ServiceGroup
from mpidist.transport.mpi.library import load_mpi
from mpidist.transport.text import name_ranks, text_of
from mpidist.transport.tracebacks import traceback_text
from mpidist.transport.waiting import complete, poll

__all__ = ["ADVICE", "Caller", "Work", "result_of"]

logger = logging.getLogger("mpidist.coordinator")

# What users can do about what cannot be sent.
ADVICE: Final = "what else a function needs, it finds where it is defined"

Array = np.ndarray[Any, Any]

_MAX_TRACE: Final = 8000  # characters
_QUIET_SECONDS: Final = 0.05  # after which nothing more comes from a chief that is lost


@final
class Caller:
    """Calls functions on this rank, which push to `servers` and use this worker's data sets."""

    def __init__(self, servers: ParameterClient, datasets: PerWorkerDatasets, who: str) -> None:
        self.servers, self._datasets, self._who = servers, datasets, who
        self._pid = os.getpid()

    def call(self, message: Array, number: int = 0, oldest: int = 0) -> Array:
        """Call the function of a message, wait until its changes are made, and return what `result_of` reads."""
        name = "a function"
        try:
            self.servers.begin_call(number, oldest)
            name, arguments = decode(message)
            args, kwargs = decode(arguments, self._datasets.value_of)
            outer, self.servers.function = self.servers.function, name  # calls of all workers are refused
            try:
                value = function_named(name)(*args, **kwargs)
            finally:
                self.servers.function = outer
            self._require_rank(name)
            self.servers.flush()
            return encode((True, value), f"the result of {name!r}", advice=ADVICE)
        except (Exception, SystemExit) as error:  # of any kind: the chief raises it
            if os.getpid() != self._pid:
                raise
            text = text_of(error)
            if isinstance(error, SystemExit):
                code = "" if error.code is None else repr(error.code)
                text = f"it called sys.exit({code}), which would end this worker; return from the function"
            return self._failed(name, error, text)

    def _require_rank(self, name: str) -> None:
        """Raise in a process that the function has forked: it must not send the chief a result in the worker's name."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{name!r} has returned in a process that it has forked on {self._who}: end the process with os._exit()"
            )

    def _failed(self, name: str, error: BaseException, text: str) -> Array:
        with suppress(Exception):  # of this function's changes: the next function would raise it
            self.servers.flush()
        trace = traceback_text(error)[-_MAX_TRACE:]
        kinds = [(kind.__module__, kind.__qualname__) for kind in type(error).__mro__]
        return encode((False, kinds, f"{name!r} failed on {self._who}: {text}", trace), "an error")


@final
class Work:
    """Worker's loop: it answers the chief's requests, each for a call, until the chief ends.

    A worker that leaves reports it in place of a result, also before a request for one.
    """

    def __init__(self, group: ServiceGroup, chief: int, caller: Caller) -> None:
        self._group, self._caller = group, caller
        self._connection = Connection(group.comm, chief, 0)
        self._has_chief_ended = self._has_left = False
        self._is_quiet_at = math.inf

    def serve(self) -> None:
        """Call functions until the chief ends."""
        self._caller.servers.require_no_function("serve() of a coordinator")
        result = None
        while not self._has_chief_ended:
            header, data = self._next_request("serve() of the coordinator", result)
            if header.op == Op.CALL:
                result = self._caller.call(data, header.variables, header.rows)
                continue
            self._leave("")
            self._caller.servers.begin_call(0, 0)  # no call follows

    def close(self, reason: str | None) -> None:
        """Notify the chief that this worker calls no more functions; without an error, wait until the chief ends.

        `reason`: of an exception that the others do not have.
        """
        broken = self._group.watchdog.broken
        self._leave(reason or str(broken or ""))
        try:
            while not self._has_chief_ended and reason is None and broken is None:
                self._next_request("close() of the coordinator")  # another worker makes the call
        except PeerFailedError as error:
            if self._group.watchdog.broken is not None:
                raise
            logger.warning("mpidist: %s", error)  # the chief alone is lost, and the group goes on without it
        if not self._has_chief_ended:
            self._connection.abandon()
        self._connection.close()

    def _leave(self, reason: str) -> None:
        if not self._has_left:
            self._has_left = True
            with suppress(load_mpi().Exception):  # the chief is lost, as the next wait finds
                self._connection.answer_text(Outcome.FAILED, reason)

    def _next_request(self, what: str, result: Array | None = None) -> tuple[Header, Array]:
        """Answer the last request, if there is a result, and wait for the next one."""
        group, connection = self._group, self._connection
        try:
            if result is not None:
                next(connection.answer_all(result), None)
                connection.sequence += 1  # of the request that is answered next, also before it comes
            group.begin_wait(what, (connection.rank,), math.inf)  # a chief that schedules nothing is no stall
            poll(lambda: not connection.has_ended and connection.has_request(), self._check_chief)
            header = connection.begin_steps()
            data = complete(connection.receive_all(), self._check_chief)
            connection.listen()
        except load_mpi().Exception as error:
            connection.abandon()
            group.lose(connection.rank, error)
            return self._next_request(what)  # which raises, as the chief is lost
        self._has_chief_ended = header.op == Op.LEAVE
        if self._has_chief_ended and data.size:
            logger.warning("mpidist: %s ends, as the chief has left: %s", what, data.tobytes().decode(errors="replace"))
        return header, data

    def _check_chief(self) -> None:
        """Raise if waiting further cannot help, also where the group goes on without the chief."""
        awaited, chief = self._group.awaited, self._connection.rank
        self._group.watchdog.check_peers()
        if chief not in awaited.lost:
            return
        awaited.ranks = ()  # that its process is gone, too, is no news to the watchdog
        now = time.monotonic()
        self._is_quiet_at = min(self._is_quiet_at, now + _QUIET_SECONDS)
        if now >= self._is_quiet_at:
            raise PeerFailedError(f"{awaited.what}: the chief, {name_ranks([chief])}, is lost: {awaited.lost[chief]}")


def result_of(message: Array) -> tuple[Any, Exception | None]:
    """Return the result of a function, or the error that it has raised.

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
