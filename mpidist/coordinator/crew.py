"""The chief's view of calls and workers: which wait, who is free, who calls which function, and who has left."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, final

import numpy as np

from mpidist.coordinator.worker import result_of
from mpidist.errors import CancelledError, DeadlineExceededError, PeerFailedError, UnavailableError
from mpidist.parameter_server.messages.ends import Channel
from mpidist.parameter_server.messages.protocol import Op, Outcome
from mpidist.transport.group.service_group import ServiceGroup
from mpidist.transport.mpi.library import load_mpi
from mpidist.transport.shared_errors import repeat_of
from mpidist.transport.text import first_line, name_ranks
from mpidist.transport.waiting import poll

__all__ = ["Crew", "RemoteValue"]

Array = np.ndarray[Any, Any]
_INTERRUPTED: Final = (
    "the coordinator was interrupted while it gave a worker a function, or took a result, which may be lost: close the "
    "strategy, and make a new one on all ranks"
)
_NOTHING: Final = object()


@final
class RemoteValue:
    """Future result of call `number`, from 1 on, of the function `name`. `fetch` waits for it.

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
        """Store the result of the function, or the reason why there is none."""
        self._value, self._error, self.message = value, error, np.empty(0, np.uint8)

    def cancel(self, why: str) -> None:
        """Note that the function will not be called."""
        self.set(None, CancelledError(f"{self.name!r} was not called: {why}"))

    def fetch(self) -> Any:
        """Wait for the function, and return its result. On the chief.

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
        """Wait for the function, and return its result, as `fetch`."""
        return self.fetch()

    def __repr__(self) -> str:
        state = "waits" if not self.is_ready else repr(self._value) if self._error is None else repr(self._error)
        return f"<RemoteValue: {state}>"


@final
class Crew:
    """The workers that call functions, and the functions that wait for a free one. `on_error` takes their errors."""

    def __init__(self, group: ServiceGroup, ranks: Sequence[int], on_error: Callable[[Exception], None]) -> None:
        self._group, self._awaited, self._on_error = group, group.awaited, on_error
        self._channels = [Channel(group, rank, f"rank {rank}", is_server=False) for rank in ranks]
        self._queue: deque[RemoteValue] = deque()
        self._calls: dict[int, RemoteValue] = {}  # by the rank that makes it
        self._left: dict[int, str] = {}
        self._is_ending = False
        self._is_exchanging = False  # for ever after an interrupt in the middle: a call or a result may be lost

    @property
    def is_idle(self) -> bool:
        """Whether no function waits, and none is called."""
        return not self._queue and not self._calls

    @property
    def is_broken(self) -> bool:
        """Whether this rank has failed to wait for others, and cannot wait any more."""
        return self._is_exchanging or self._group.watchdog.broken is not None

    def add(self, call: RemoteValue) -> None:
        """Give a function to a worker that is free, or let it wait for one."""
        self._queue.append(call)
        self.advance()

    def advance(self) -> bool:
        """Receive results, and give functions to workers that are free. Returns whether anything got on."""
        if self._is_exchanging:
            self._require_whole()
            raise UnavailableError(_INTERRUPTED)
        got_on = False
        for channel in self._channels:
            if channel.rank not in self._left:
                got_on |= self._advance(channel)
                self._is_exchanging = False
        if self._queue and len(self._left) == len(self._channels) and not self._does_watchdog_raise():
            why = f"no worker is left: {self._reasons()}"
            self._fail(PeerFailedError(f"{self._queue[0].name!r} cannot be called: {why}"), why)
        if got_on:
            self._group.watchdog.restart()
        return got_on

    def _advance(self, channel: Channel) -> bool:
        """Receive a worker's result, and give it a function, if it is free. Returns whether anything got on."""
        rank = channel.rank
        try:
            is_free, has_answer = bool(self._queue) and rank not in self._calls, channel.has_answer()
            self._is_exchanging = is_free or has_answer
            answer = channel.receive() if has_answer else None
            if answer is not None:
                self._take(rank, *answer)
            elif rank in self._awaited.lost:
                channel.abandon()
                self._lose(rank, self._awaited.lost[rank])
            if not self._queue or rank in self._calls or rank in self._left:
                return answer is not None
            call = self._calls[rank] = self._queue.popleft()
            oldest = min(one.number for one in self._calls.values())  # those that wait are younger
            channel.start(f"call of {call.name!r}", Op.CALL, call.number, [call.message], rows=oldest)
            return True
        except load_mpi().Exception as error:
            channel.abandon(error)
            self._group.lose(rank, error)
            return True

    def look(self, what: str) -> None:
        """Receive results, send functions to workers, and raise if a worker is lost. Does not wait."""
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

        self._group.enter(what)
        self._require_whole()
        self._group.begin_wait(what, (), timeout or self._group.timeout_seconds or None)
        poll(is_done, self._group.watchdog.check_peers)

    def cancel(self, why: str) -> int:
        """Call no function that waits. Returns how many wait."""
        num_waiting = len(self._queue)
        while self._queue:
            self._queue.popleft().cancel(why)
        return num_waiting

    def end(self) -> int:
        """Notify the workers that no function follows, and wait until they have received it, without a deadline.

        Returns how many functions are not called.
        """
        self._is_ending = True
        num_dropped = self.cancel("the coordinator was closed")
        self._tell_end("")
        self.wait("the end of the coordinator", lambda: len(self._left) == len(self._channels), math.inf)
        for channel in self._channels:
            channel.close()
        return num_dropped

    def leave(self, reason: str) -> None:
        """End without the workers, because of an error; notify those that no watchdog's note reaches. Local.

        `reason`: of an exception that the others do not have; "" if this rank has caught why it cannot wait any more.
        """
        broken = self._group.watchdog.broken
        is_interrupted = self._is_exchanging and broken is None
        if is_interrupted:
            self._group.tell_leaving(reason or _INTERRUPTED)
        elif self._group.may_miss_ranks or (not reason and isinstance(broken, DeadlineExceededError)):
            self._tell_end(reason or ("" if broken is None else first_line(broken)))
        self._queue.extend(self._calls.values())
        self.cancel("the chief has left its strategy")
        for channel in self._channels:
            channel.abandon()
        if is_interrupted and not reason:  # servers drop this rank, and so answer nothing more
            raise UnavailableError(_INTERRUPTED)

    def _tell_end(self, why: str) -> None:
        for channel in self._channels:
            if not self._left.get(channel.rank):  # one that left because of an error receives nothing
                with suppress(load_mpi().Exception):  # this one is lost
                    channel.leave(why)

    def _require_whole(self) -> None:
        if self._group.watchdog.broken is not None:
            raise repeat_of(self._group.watchdog.broken)

    def _await_workers(self, what: str) -> None:
        """Let the watchdog check the workers that call functions; if none does, all."""
        awaited = self._awaited
        awaited.ranks = tuple(self._calls) or tuple(one.rank for one in self._channels if one.rank not in self._left)
        calls = ", ".join(f"{call.name!r} on rank {rank}" for rank, call in self._calls.items())
        awaited.what = f"{what} (calls: {calls})" if calls else what

    def _advance_far(self) -> None:
        while self.advance():
            pass

    def _lose(self, rank: int, why: str) -> None:
        """Note that a worker has left, and make its call again."""
        self._left[rank] = why
        lost = self._calls.pop(rank, None)
        if lost is not None and self._is_ending:
            lost.cancel("the coordinator was closed")
        elif lost is not None:
            self._queue = deque(sorted([lost, *self._queue], key=lambda call: call.number))

    def _take(self, rank: int, outcome: int, data: Array) -> None:
        if outcome != Outcome.OK:
            self._lose(rank, data.tobytes().decode(errors="replace"))
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
        """Whether a worker has left because of an error that a note of its watchdog reports in more detail, or will."""
        return not self._group.may_miss_ranks and any(self._left.values())

    def _reasons(self) -> str:
        texts = [f"{name_ranks([rank])} left: {text}" for rank, text in self._left.items() if text]
        return "; ".join(texts) or "all of them have closed their strategies"
