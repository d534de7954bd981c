"""The chief's view of calls and workers: which wait, who is free, who calls which function, and who has left."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import numpy as np

from mpidist.coordinator.worker import LAST, Letter, Mail, result_of
from mpidist.errors import CancelledError, DeadlineExceededError, PeerFailedError
from mpidist.transport.group.service_group import ServiceGroup
from mpidist.transport.shared_errors import repeat_of
from mpidist.transport.text import first_line, name_ranks
from mpidist.transport.waiting import poll

__all__ = ["Crew", "RemoteValue"]

Array = np.ndarray[Any, Any]
_NOTHING: Final = object()


@final
class RemoteValue:
    """What call `number`, from 1 on, of the function `name` will return. `fetch` waits for it.

    `message` is what a worker of `crew` is sent, until there is a result.
    """

    def __init__(self, number: int, name: str, message: Array, crew: Crew | None) -> None:
        self.number, self.name, self.message = number, name, message
        self._crew = crew
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
        if self._crew is not None and not self.is_ready:  # a result that is here can be read even after losses
            self._crew.wait("fetch()", lambda: self.is_ready)
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
class Crew:
    """The workers that call functions, and the functions that wait for a free one. `on_error` takes their errors."""

    def __init__(self, group: ServiceGroup, ranks: Sequence[int], on_error: Callable[[Exception], None]) -> None:
        self._group, self._awaited, self._on_error = group, group.awaited, on_error
        self._mails = {rank: Mail(group, rank) for rank in ranks}
        self._queue: deque[RemoteValue] = deque()
        self._calls: dict[int, RemoteValue] = {}  # by the rank that makes it
        self._left: dict[int, str] = {}
        self._is_ending = False

    @property
    def is_idle(self) -> bool:
        """Whether no function waits, and none is called."""
        return not self._queue and not self._calls

    @property
    def is_broken(self) -> bool:
        """Whether this rank has failed to wait for others, and cannot wait any more."""
        return self._group.watchdog.broken is not None

    def add(self, call: RemoteValue) -> None:
        """Give a function to a worker that is free, or let it wait for one."""
        self._queue.append(call)
        self.advance()

    def advance(self) -> bool:
        """Receive results, and give functions to workers that are free. Returns whether anything got on."""
        got_on = False
        for rank, mail in self._mails.items():
            letter = None if rank in self._left else mail.receive()
            if letter is not None:
                got_on = True
                self._take(rank, letter)
            elif rank in self._awaited.lost and rank not in self._left:
                self._lose(rank, self._awaited.lost[rank])
            if self._queue and rank not in self._calls and rank not in self._left:
                call = self._calls[rank] = self._queue.popleft()
                oldest = min(one.number for one in self._calls.values())  # those that wait are younger
                mail.send(call.number, oldest, call.message)
                got_on = True
        if self._queue and len(self._left) == len(self._mails) and not self._does_watchdog_raise():
            why = f"no worker is left: {self._reasons()}"
            self._fail(PeerFailedError(f"{self._queue[0].name!r} cannot be called: {why}"), why)
        if got_on:
            self._group.watchdog.restart()
        return got_on

    def look(self, what: str) -> None:
        """Receive what has come, give functions to workers, and raise if a worker is lost. Does not wait."""
        self._advance_far()
        if not self.is_idle:
            self._require_whole()
            self._awaited.begin(what, (), math.inf)
            self._await_workers(what)
            self._group.watchdog.check_peers()
            self._advance_far()

    def wait(self, what: str, condition: Callable[[], bool], timeout: float | None = None) -> None:
        """Give functions to workers until a condition holds, at most so long for one: by default `timeout_seconds`."""

        def is_done() -> bool:
            if self.advance() or not self._awaited.ranks:
                self._await_workers(what)
            return condition()

        self._require_whole()
        self._group.begin_wait(what, (), timeout or self._group.timeout_seconds or None)
        poll(is_done, self._group.watchdog.check_peers)

    def cancel(self, why: str) -> None:
        """Call no function that waits."""
        while self._queue:
            self._queue.popleft().cancel(why)

    def end(self) -> None:
        """Tell the workers that no function follows, and wait until they know it, however long they take."""
        self._is_ending = True
        self.cancel("the coordinator was closed")
        for rank, mail in self._mails.items():
            if not self._left.get(rank):  # one that left because of an error receives nothing
                mail.send_last()
        self.wait("the end of the coordinator", self._have_all_ended, math.inf)
        for mail in self._mails.values():
            mail.abandon()

    def leave(self, reason: str) -> None:
        """End without the workers, because of an error; tell those that no note of the watchdog's tells. Local.

        `reason`: of an exception that the others do not have; "" if this rank has caught why it cannot wait any more.
        """
        broken = self._group.watchdog.broken
        if self._group.may_miss_ranks or (not reason and isinstance(broken, DeadlineExceededError)):
            text = reason or ("" if broken is None else first_line(broken))
            for rank, mail in self._mails.items():
                if rank not in self._left:
                    mail.send_last(text)
        self.cancel("the chief has left its strategy")
        for call in self._calls.values():
            call.cancel("the chief has left its strategy")
        for mail in self._mails.values():
            mail.abandon()

    def _require_whole(self) -> None:
        if self._group.watchdog.broken is not None:
            raise repeat_of(self._group.watchdog.broken)

    def _await_workers(self, what: str) -> None:
        """Let the watchdog ask those that call functions; if none does, all."""
        awaited = self._awaited
        awaited.ranks = tuple(self._calls) or tuple(rank for rank in self._mails if rank not in self._left)
        calls = ", ".join(f"{call.name!r} on rank {rank}" for rank, call in self._calls.items())
        awaited.what = f"{what} (calls: {calls})" if calls else what

    def _advance_far(self) -> None:
        while self.advance():
            pass

    def _have_all_ended(self) -> bool:
        """Whether all workers have left, and those that live have all that was sent to them."""
        if len(self._left) < len(self._mails):
            return False
        living = [rank for rank, why in self._left.items() if not why and rank not in self._awaited.lost]
        return all(self._mails[rank].has_sent_all() for rank in living)

    def _lose(self, rank: int, why: str) -> None:
        """Note that a worker has left, and make its call again."""
        self._left[rank] = why
        lost = self._calls.pop(rank, None)
        if lost is not None and self._is_ending:
            lost.cancel("the coordinator was closed")
        elif lost is not None:
            self._queue = deque(sorted([lost, *self._queue], key=lambda call: call.number))

    def _take(self, rank: int, letter: Letter) -> None:
        number, _, data = letter
        if number == LAST:
            self._lose(rank, data)
            return
        call = self._calls.pop(rank)  # first: the worker is free, whatever it has sent
        value, error = result_of(data)
        call.set(value, error)
        if error is not None:
            self._fail(error, "another function had failed")

    def _fail(self, error: Exception, why: str) -> None:
        """Call no function that waits, because of an error."""
        self._on_error(error)
        self.cancel(why)

    def _does_watchdog_raise(self) -> bool:
        """Whether a worker has left because of an error of which a note of its watchdog tells, with more, or will."""
        return not self._group.may_miss_ranks and any(self._left.values())

    def _reasons(self) -> str:
        texts = [f"{name_ranks([rank])} left: {text}" for rank, text in self._left.items() if text]
        return "; ".join(texts) or "all of them have closed their strategies"
