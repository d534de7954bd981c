"""A worker's part: it calls functions until the chief ends."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Final, final

import numpy as np

from mpidist.coordinator.calling import Caller
from mpidist.coordinator.mail import Kind, Letter, Mail
from mpidist.errors import PeerFailedError
from mpidist.transport.group.service_group import ServiceGroup
from mpidist.transport.text import name_ranks
from mpidist.transport.waiting import poll

__all__ = ["Work"]

logger = logging.getLogger("mpidist.coordinator")

_QUIET_SECONDS: Final = 0.05  # after which nothing more comes from a chief that is lost


@final
class Work:
    """What a worker does for the chief.

    Args:
        group: The workers and servers.
        mail: Letters from and to the chief.
        caller: Calls the functions.
    """

    def __init__(self, group: ServiceGroup, mail: Mail, caller: Caller) -> None:
        self._group, self._mail, self._caller = group, mail, caller
        self._has_chief_ended = False
        self._has_chief_left = False  # because of an error: it receives nothing
        self._is_quiet_at = math.inf
        self._has_left = False

    def serve(self) -> None:
        """Call functions until the chief ends.

        Raises:
            PeerFailedError: If the chief is lost.
            RuntimeError: In a function that the chief has scheduled.
        """
        self._caller.require_no_function("serve() of a coordinator")
        while not self._has_chief_ended:
            letter = self._next_letter("serve() of the coordinator")
            if letter.kind == Kind.END:
                self._take_end("serve() of the coordinator", letter)
                self._leave("")
                self._caller.end()
            else:
                result = self._caller.call(letter.data, letter.number, letter.oldest)
                self._mail.send(Kind.RESULT, letter.number, data=result)

    def close(self, reason: str | None) -> None:
        """Tell the chief that this worker calls no function any more; if there was no error, wait until the chief ends.

        Args:
            reason: Of an exception that the others do not have.
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
            letter = self._next_letter(what)
            if letter.kind == Kind.END:
                self._take_end(what, letter)
        if not self._has_chief_left:
            self._wait(what, self._mail.has_sent_all)

    def _take_end(self, what: str, letter: Letter) -> None:
        self._has_chief_ended = True
        if letter.data.size:
            self._has_chief_left = True
            reason = letter.data.tobytes().decode(errors="replace")
            logger.warning("mpidist: %s ends, as the chief has left: %s", what, reason)

    def _leave(self, reason: str) -> None:
        if not self._has_left:
            self._has_left = True
            self._mail.send(Kind.LEFT, data=np.frombuffer(reason.encode()[:1000], np.uint8))

    def _next_letter(self, what: str) -> Letter:
        found: list[Letter] = []

        def has_letter() -> bool:
            letter = self._mail.receive()
            if letter is not None:
                found.append(letter)
            return letter is not None

        self._wait(what, has_letter)
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
