"""Membership of the workers on a server: which are alive, have left (and why), are lost, or wait for the others."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, Final, final

from mpidist.parameter_server.messages.ends import Connection
from mpidist.parameter_server.messages.protocol import Outcome
from mpidist.transport.group.service_group import ServiceGroup
from mpidist.transport.text import name_ranks

__all__ = ["Membership"]

logger = logging.getLogger("mpidist.parameter_server")

_QUIET_SECONDS: Final = 0.05  # after which nothing more comes from a rank that is lost

Answer = tuple[int, str]


@final
class Membership:
    """The workers of a cluster, how many steps they have done, and the call of all workers that they have begun.

    `staleness` is how many steps a worker may be ahead of the slowest one when it reads; `None` for any number.
    """

    def __init__(self, group: ServiceGroup, ranks: tuple[int, ...], staleness: int | None) -> None:
        self.ranks = ranks  # by worker
        self.live = set(range(len(ranks)))  # which may still make requests
        self.steps = [0] * len(ranks)
        self.left: dict[int, str] = {}  # because of an error
        self.resting: set[int] = set()  # in a call of all workers, where they hold nobody up
        self._group, self._staleness, self._timeout = group, staleness, group.timeout_seconds
        self._has_warned_of_ends = False
        self._last_warning = ""  # of workers that are late at a step
        self._meeting = _Meeting()

    @property
    def live_ranks(self) -> list[int]:
        """The ranks of the workers that may still make requests."""
        return [self.ranks[worker] for worker in sorted(self.live)]

    def end(self, worker: int, why: str | None = None) -> None:
        """Note that a worker makes no request any more. `why`: the error, if there was one."""
        self._group.awaited.end(self.ranks[worker])
        self.live.discard(worker)
        if why is not None:
            self.left[worker] = why

    def drop_lost(self, connections: Iterable[Connection], advance: Callable[[Connection], bool]) -> None:
        """Drop the workers that are lost, as the watchdog has found, after what they have requested.

        `advance` gives a worker one turn, and returns whether it made progress.
        """
        lost = self._group.awaited.lost
        for connection in connections if lost else ():
            until = time.monotonic() + _QUIET_SECONDS
            while connection.rank in lost and not connection.has_ended:
                if advance(connection):
                    until = time.monotonic() + _QUIET_SECONDS
                elif connection.steps is not None and connection.is_making:
                    break  # nothing of the change is missing: the next check comes back to it
                elif time.monotonic() > until:
                    self.drop(connection)

    def drop(self, connection: Connection) -> None:
        """End the part of a lost worker. What it has not sent whole is dropped, and changes nothing."""
        if connection.has_ended:
            return
        worker, rank, was_cut_off = connection.worker, connection.rank, connection.steps is not None
        why = self._group.awaited.lost[rank]
        connection.abandon()
        self.end(worker, why)
        cut_off = ", in the middle of a request" if was_cut_off else ""
        logger.warning("mpidist: worker %d (rank %d) is lost%s: %s", worker, rank, cut_off, why)

    def may_read(self, worker: int) -> bool:
        """Whether the slowest worker is near enough for this one to read."""
        if self._staleness is None:
            return True
        slowest = min((self.steps[other] for other in self._busy()), default=self.steps[worker])
        return self.steps[worker] - slowest <= self._staleness

    def wait_to_read(self, worker: int) -> Generator[bool, None, Answer | None]:
        """Wait as long as a worker must not read yet. Returns the answer to a worker that has waited too long."""
        until, warn_at = self._deadline(), self._stalls_at(self._timeout)
        while not self.may_read(worker):
            now = time.monotonic()
            if now > until:
                return self._too_late(worker, *self._slowest(worker))
            if now > warn_at:
                warn_at = math.inf
                self._warn_of_slowest(worker)
            yield False
        return None

    def meet(self, worker: int, call: str, fields: Mapping[str, str], chief: bool) -> Generator[bool, None, Answer]:
        """Wait until all live workers make a call, or also the chief, with equal fields. Returns the answer to all."""
        meeting, until = self._meeting, self._deadline()
        meeting.arrived[worker] = {"call": call, **fields}
        meeting.warn_at = meeting.warn_at or self._stalls_at(self._timeout)
        while meeting.answer is None:
            if chief and 0 not in self.live:
                meeting.answer = Outcome.FAILED, f"the servers: the chief, rank {self.ranks[0]}, has ended its part"
            elif self.live <= set(meeting.arrived):
                meeting.answer = self._compare(meeting)
            elif time.monotonic() > until:
                text, late = self._absent()
                text += ". Let every worker make the same calls, or set a longer timeout_seconds"
                meeting.answer = self._too_late(worker, text, late)
            else:
                if time.monotonic() > meeting.warn_at:
                    meeting.warn_at = math.inf
                    self._warn(call, meeting.arrived, *self._absent())
                yield False
                continue
            self._meeting = _Meeting()
        return meeting.answer

    def wait_for_ends(self) -> Iterator[bool]:
        """Wait as long as a worker may still make requests."""
        warn_at = self._stalls_at(None)
        while self.live:
            if time.monotonic() > warn_at and not self._has_warned_of_ends:
                self._has_warned_of_ends = True
                late, others = self.live_ranks, {*self.live, *self.left}
                ended = (worker for worker in range(len(self.ranks)) if worker not in others)
                self._warn("close()", ended, f"{name_ranks(late)} did not close the strategy", late)
            yield False

    def _absent(self) -> tuple[str, list[int]]:
        """Name the workers that do not make the call of all workers, and list their ranks."""
        late = [self.ranks[other] for other in sorted(self.live) if other not in self._meeting.arrived]
        return f"{name_ranks(late)} did not make this call, which all workers make together", late

    def _slowest(self, worker: int) -> tuple[str, list[int]]:
        """Explain why a worker must not read yet, and list the ranks of the slowest workers."""
        busy = self._busy()
        slowest = min(self.steps[other] for other in busy)
        late = [self.ranks[other] for other in busy if self.steps[other] == slowest]
        ahead = f"rank {self.ranks[worker]} had done {self.steps[worker]}"
        text = f"{name_ranks(late)} had done {slowest} steps, and {ahead}"
        return f"{text}, which is more than staleness={self._staleness} allows", late

    def _too_late(self, worker: int, text: str, late: list[int]) -> Answer:
        """Reply that a worker has waited too long; others that wait with it, perhaps for less, get the same."""
        text = f"{name_ranks([self.ranks[worker]])} waited {self._timeout or 0:g} s, and {text}"
        return Outcome.TOO_LATE, "\n  ".join([text, *self._group.membership.status_lines(late)])

    def _warn_of_slowest(self, worker: int) -> None:
        """Warn that a worker waits to read; of the workers that are late at a step, once."""
        text, late = self._slowest(worker)
        who = text.partition(", and ")[0]
        if who != self._last_warning:
            self._last_warning = who
            self._warn("a read", (worker,), text, late)

    def _warn(self, call: str, workers: Iterable[int], text: str, late: list[int]) -> None:
        who = name_ranks([self.ranks[worker] for worker in sorted(workers)])
        reason = "; ".join([text, *self._group.membership.status_lines(late)])
        logger.warning(
            "mpidist: %s of %s has waited for %.0f s, and %s", call, who, self._group.settings.stall_seconds, reason
        )

    def _busy(self) -> list[int]:
        """List the workers that may do a step: those that wait in a call of all workers cannot."""
        waiting = self._meeting.arrived
        return [worker for worker in sorted(self.live) if worker not in waiting and worker not in self.resting]

    def _compare(self, meeting: _Meeting) -> Answer:
        """Reply with the fields that differ between workers, a line for each field: the value of each rank.

        If a worker passes an "error", or if calls differ, the reply has this field alone.
        """
        everyone = {self.ranks[worker]: meeting.arrived[worker] for worker in sorted(meeting.arrived)}
        names = list(dict.fromkeys(name for fields in everyone.values() for name in fields))
        head = "the workers did not make the same calls in the same order, with the same arguments"
        if "error" in names:
            names, head = ["error"], "an error on a worker"
        elif len({fields["call"] for fields in everyone.values()}) > 1:
            names = ["call"]
        lines = []
        for name in names:
            groups: dict[str, list[int]] = {}
            for rank, fields in everyone.items():
                groups.setdefault(fields.get(name, "none"), []).append(rank)
            if len(groups) > 1 or name == "error":
                lines += [f"  {name}: {value} on {name_ranks(ranks)}" for value, ranks in groups.items()]
        if not lines:
            return Outcome.OK, ""
        call = next(iter(everyone.values()))["call"]
        return Outcome.REFUSED, "\n".join([f"{call}: {head}", *lines])

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout if self._timeout else math.inf

    def _stalls_at(self, timeout: float | None) -> float:
        """Return when to warn of a wait that begins now: never, if it has a deadline."""
        seconds = self._group.settings.stall_seconds
        return time.monotonic() + seconds if seconds and not timeout else math.inf


@final
class _Meeting:
    """A call that workers have begun to make."""

    def __init__(self) -> None:
        self.arrived: dict[int, dict[str, Any]] = {}  # what each worker passes
        self.answer: Answer | None = None
        self.warn_at = 0.0  # when to warn of the workers that are late; 0 before the first worker has come
