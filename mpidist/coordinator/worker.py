"""What a worker does for the chief: it calls functions, and sends their results or errors, until the chief ends."""

from __future__ import annotations

import logging
import math
import os
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, final

import numpy as np

from mpidist.coordinator.functions import PerWorkerDatasets, function_named
from mpidist.errors import OutOfRangeError, PeerFailedError
from mpidist.nest.encoding import decode, encode
from mpidist.parameter_server.client import ParameterClient
from mpidist.transport.group.service_group import ServiceGroup
from mpidist.transport.mpi.library import load_mpi
from mpidist.transport.text import name_ranks, text_of
from mpidist.transport.tracebacks import traceback_text
from mpidist.transport.waiting import never_free, poll

__all__ = ["ADVICE", "LAST", "Caller", "Letter", "Mail", "Work", "result_of"]

logger = logging.getLogger("mpidist.coordinator")

# What users can do about what cannot be sent.
ADVICE: Final = "what else a function needs, it finds where it is defined"

Array = np.ndarray[Any, Any]

_MAX_TRACE: Final = 8000  # characters
_QUIET_SECONDS: Final = 0.05  # after which nothing more comes from a chief that is lost
_TAG: Final = 11  # a tag that no server and no request uses
_HEADER: Final = struct.Struct("=qq")
_MAX_REASON: Final = 1000  # bytes
LAST: Final = 0  # in place of a call's number

# The number of a call, which older calls will not be made again, and the function with its arguments, or its result.
# Or a letter after which no call and no result comes, with the text of an error that is the cause; "" for none.
Letter = tuple[int, int, Any]


@final
class Mail:
    """The letters of this rank to and from another one. All methods are local.

    Where MPI says that the process of the other rank has failed, nothing is sent and received any more: the group's
    `awaited.lost` says so, or an error does, if the group does not go on without the other rank.
    """

    def __init__(self, group: ServiceGroup, rank: int) -> None:
        mpi = load_mpi()
        self.rank = rank
        self._group, self._has_failed = group, False
        self._comm, self._byte, self._status = group.comm, mpi.BYTE, mpi.Status()
        self._sends: list[tuple[Any, Array]] = []
        self._incoming: tuple[Any, Array] | None = None

    def send_last(self, reason: str = "") -> None:
        """Send the last letter, and do not wait."""
        self.send(LAST, 0, np.frombuffer(reason.encode(errors="backslashreplace")[:_MAX_REASON], np.uint8))

    def send(self, number: int, oldest: int, data: Array) -> None:
        """Send a call or a result, and do not wait."""
        if self._has_failed:
            return
        letter = np.concatenate([np.frombuffer(_HEADER.pack(number, oldest), np.uint8), data])
        try:
            self._sends.append((self._comm.Isend([letter, self._byte], self.rank, _TAG), letter))
        except load_mpi().Exception as error:
            self._fail(error)

    def has_sent_all(self) -> bool:
        """Whether MPI has done with the memory of all letters. MPI sends large ones while they are tested."""
        try:
            self._sends = [send for send in self._sends if not send[0].Test()]
        except load_mpi().Exception as error:
            self._fail(error)
        return not self._sends

    def receive(self) -> Letter | None:
        """Return the next letter, if there is one."""
        self.has_sent_all()
        try:
            return None if self._has_failed else self._receive()
        except load_mpi().Exception as error:
            self._fail(error)
            return None

    def _receive(self) -> Letter | None:
        if self._incoming is None:
            message = self._comm.Improbe(self.rank, _TAG, self._status)
            if message is None:
                return None
            data = np.empty(self._status.Get_count(self._byte), np.uint8)
            self._incoming = message.Irecv([data, self._byte]), data
        request, data = self._incoming
        if not request.Test():
            return None
        self._incoming = None
        number, oldest = _HEADER.unpack_from(data.data)
        content = data[_HEADER.size :]
        return number, oldest, content if number != LAST else content.tobytes().decode(errors="replace")

    def abandon(self) -> None:
        """Keep what MPI may still read and write."""
        if self._sends or self._incoming:
            never_free((self._sends, self._incoming))

    def _fail(self, error: Exception) -> None:
        """Note that the process of the other rank has failed, if an error of MPI's comes of that."""
        if not self._group.shows_loss(error, self.rank):
            raise error
        self._has_failed = True
        self.abandon()
        self._sends, self._incoming = [], None
        self._group.lose(self.rank)


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
    """What a worker does for the chief."""

    def __init__(self, group: ServiceGroup, mail: Mail, caller: Caller) -> None:
        self._group, self._mail, self._caller = group, mail, caller
        self._has_chief_ended = False
        self._has_chief_left = False  # because of an error: it receives nothing
        self._is_quiet_at = math.inf
        self._has_left = False

    def serve(self) -> None:
        """Call functions until the chief ends."""
        self._caller.servers.require_no_function("serve() of a coordinator")
        while not self._has_chief_ended:
            number, oldest, data = self._next_letter("serve() of the coordinator")
            if number != LAST:
                self._mail.send(number, oldest, self._caller.call(data, number, oldest))
                continue
            self._leave("")
            self._caller.servers.begin_call(0, 0)  # no call follows

    def close(self, reason: str | None) -> None:
        """Tell the chief that this worker calls no function any more; if there was no error, wait until the chief ends.

        `reason`: of an exception that the others do not have.
        """
        broken = self._group.watchdog.broken
        self._leave(reason or str(broken or ""))
        if reason is None and broken is None:
            try:
                self._wait_for_end("close() of the coordinator")
            except PeerFailedError as error:
                if self._group.watchdog.broken is not None:
                    raise
                logger.warning("mpidist: %s", error)  # the chief alone is lost, and the group goes on without it
        self._mail.abandon()

    def _wait_for_end(self, what: str) -> None:
        while not self._has_chief_ended:  # other workers make the calls that are under way to this one
            self._next_letter(what)
        if not self._has_chief_left:
            self._wait(what, self._mail.has_sent_all)

    def _leave(self, reason: str) -> None:
        if not self._has_left:
            self._has_left = True
            self._mail.send_last(reason)

    def _next_letter(self, what: str) -> Letter:
        found: list[Letter] = []

        def has_letter() -> bool:
            letter = self._mail.receive()
            if letter is not None:
                found.append(letter)
            return letter is not None

        self._wait(what, has_letter)
        number, _, reason = found[0]
        self._has_chief_ended |= number == LAST
        if number == LAST and reason:
            self._has_chief_left = True
            logger.warning("mpidist: %s ends, as the chief has left: %s", what, reason)
        return found[0]

    def _wait(self, what: str, test: Callable[[], bool]) -> None:
        self._group.begin_wait(what, (self._mail.rank,), math.inf)  # a chief that schedules nothing is no stall
        poll(test, self._check_chief)

    def _check_chief(self) -> None:
        """Raise if waiting further cannot help, also where the group goes on without the chief."""
        awaited, chief = self._group.awaited, self._mail.rank
        self._group.watchdog.check_peers()
        if chief not in awaited.lost:
            return
        awaited.ranks = ()  # that its process is gone, too, is no news to the watchdog
        now = time.monotonic()
        self._is_quiet_at = min(self._is_quiet_at, now + _QUIET_SECONDS)
        if now >= self._is_quiet_at:
            raise PeerFailedError(f"{awaited.what}: the chief, {name_ranks([chief])}, is lost: {awaited.lost[chief]}")


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
