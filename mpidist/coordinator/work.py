"""A worker's part: it calls functions until the chief ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import final

import numpy as np

from mpidist.coordinator.calling import Caller
from mpidist.coordinator.mail import Kind, Letter, Mail
from mpidist.transport import AwaitedPeers, ServiceGroup, poll

__all__ = ["Work"]

logger = logging.getLogger("mpidist.coordinator")


@final
class Work:
    """What a worker does for the chief.

    Args:
        group: The workers and servers.
        awaited: What the watchdog of `group` asks.
        mail: Letters from and to the chief.
        caller: Calls the functions.
    """

    def __init__(self, group: ServiceGroup, awaited: AwaitedPeers, mail: Mail, caller: Caller) -> None:
        self._group, self._awaited, self._mail, self._caller = group, awaited, mail, caller
        self._has_chief_ended = False
        self._has_chief_left = False  # because of an error: it receives nothing
        self._has_left = False

    def serve(self) -> None:
        """Call functions until the chief ends."""
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
            what = "close() of the coordinator"
            while not self._has_chief_ended:  # other workers make the calls that are under way to this one
                letter = self._next_letter(what)
                if letter.kind == Kind.END:
                    self._take_end(what, letter)
            if not self._has_chief_left:
                self._wait(what, self._mail.has_sent_all)
        self._mail.abandon()

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
        awaited, watchdog = self._awaited, self._group.watchdog
        awaited.ranks, awaited.what, awaited.is_ended_by_program = (self._mail.rank,), what, False
        awaited.timeout = float("inf")  # a chief that schedules nothing is no stall
        watchdog.begin()
        poll(test, watchdog.check_peers)
