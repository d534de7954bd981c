"""Follows one launch to its end, and ends it where it does not end by itself."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from signal import Signals
from typing import Any

from mpi_session import stacks
from mpi_session.launch import HANG_SECONDS, Launch
from mpi_session.outer.replay import Replay
from mpi_session.reports import ranks_text
from mpi_session.wire import Event, Reader, exits

_REGULAR = (0, 1, 5)  # pytest's exit statuses: passed, failed, no tests
INTERRUPTED, USAGE_ERROR = 2, 4
# A launcher may take this long to end the ranks when one has died.
DEATH_LIMIT = 3.0


@dataclass
class Ending:
    """How a launch came to its end."""

    problem: str = ""  # empty: all tests of the launch have run
    texts: dict[str, str] = field(default_factory=dict)  # what to show with it, by title
    failures: dict[int, Any] = field(default_factory=dict)  # the ranks' failures in the open test
    test: Event | None = None  # the test that was open
    pytest_status: int | None = None


class Follower:
    """Reads the events of a launch, replays them and watches the time."""

    def __init__(self, launch: Launch, replay: Replay, grace: float) -> None:
        self.launch, self.replay, self.grace = launch, replay, grace
        self.reader = Reader(launch.directory, launch.size)
        self.places: dict[int, tuple[str, int]] = {}
        self.test: Event | None = None
        self.doing, self.limit = "the start and the collection", HANG_SECONDS
        self.begun = time.monotonic()
        self.died_at: float | None = None
        self.statuses: dict[int, int] = {}
        # Failures that one rank saw and all ranks have not judged yet, by node id and phase.
        self.failures: dict[tuple[str, str], dict[int, Any]] = {}
        self.failed_at: dict[tuple[str, str], float] = {}
        self.judged: set[tuple[str, str]] = set()

    def follow(self) -> Generator[None, None, Ending]:
        """Yield as often as there may be something new, until the launch has ended, by itself or by us."""
        try:
            while True:
                status = self.launch.status()  # before reading: no event comes after it
                for rank, event in self.reader.new_events():
                    self._take(rank, event)
                if status is not None or self._has_died(time.monotonic()):
                    return self._ended(status)
                problem = self._overdue(time.monotonic())
                if problem:
                    return self._stuck(problem)
                yield
        finally:
            self.reader.close()

    def _take(self, rank: int, event: Event) -> None:
        kind = event["event"]
        if kind == "hello":
            self.places[rank] = tuple(event["place"])
        elif kind == "failed":
            key = (event["nodeid"], event["when"])
            if key not in self.judged:
                self.failures.setdefault(key, {})[rank] = event["data"]
                self.failed_at.setdefault(key, time.monotonic())
        elif kind == "finished":
            self.statuses[rank] = event["status"]
            if event["status"] not in _REGULAR:
                self.failed_at.setdefault(("", "the session"), time.monotonic())
            if rank == 0:
                self._turn_to(None, "the end of the session", HANG_SECONDS)
        else:
            self._take_step(kind, event)
            getattr(self.replay, f"take_{kind}")(event)

    def _take_step(self, kind: str, event: Event) -> None:
        if kind == "start":
            self._turn_to(event, event["nodeid"], event["limit"])
        elif kind == "report":
            key = (event["data"]["nodeid"], event["data"]["when"])
            self.judged.add(key)
            self.failures.pop(key, None)
            self.failed_at.pop(key, None)
        elif kind in ("end", "collected"):
            self._turn_to(None, "the step to the next test", HANG_SECONDS)

    def _turn_to(self, test: Event | None, doing: str, limit: float) -> None:
        self.test, self.doing, self.limit, self.begun = test, doing, limit, time.monotonic()

    def _overdue(self, now: float) -> str:
        for key, since in self.failed_at.items():
            if now - since > self.grace and self._others(key):
                return self._left_behind(key)
        if now - self.begun > self.limit:
            return f"{self.doing} did not end within its time limit of {self.limit:g} s"
        return ""

    def _left_behind(self, key: tuple[str, str]) -> str:
        others = self._others(key)
        return (
            f"{key[1]} failed on {ranks_text(set(range(self.launch.size)) - others)}, and after {self.grace:g} s "
            f"not all of {ranks_text(others)} have come to its end"
        )

    def _others(self, key: tuple[str, str]) -> set[int]:
        """Return the ranks that have not failed as well. If there is none, only the launcher has to end."""
        return set(range(self.launch.size)) - set(self.failures.get(key, self.statuses))

    def _stuck(self, problem: str) -> Ending:
        shown = stacks.collect(self.launch.directory, self.places, range(self.launch.size))
        self.launch.stop()
        texts = {f"[rank {rank}] was at (most recent call first):": text for rank, text in shown.items()}
        if self.test is None:
            texts |= self._logs()
        return self._ending(f"Stuck: {problem}", texts)

    def _has_died(self, now: float) -> bool:
        if not self._who_died()[1]:
            self.died_at = None
        elif self.died_at is None:
            self.died_at = now
        # A launcher ends the others at once, but not each time under load: then we do.
        return self.died_at is not None and now - self.died_at > DEATH_LIMIT

    def _ended(self, status: int | None) -> Ending:
        whole = len(self.statuses) == self.launch.size and set(self.statuses.values()) <= set(_REGULAR)
        self.launch.stop()
        if whole and status == 0:
            return Ending(pytest_status=self.statuses[0])
        if whole:
            problem = f"all tests have run, then mpiexec ended with exit status {status}"
        elif self.statuses.get(0) not in (None, *_REGULAR):
            problem = f"pytest ended with exit status {self.statuses[0]} on [rank 0]"
        else:
            culprit, known = self._who_died()
            problem = f"{culprit} during {self.doing}"
            if known and self.places:  # then mpiexec's own account, often of another rank, only misleads
                return self._ending(problem, self._logs(mpiexec=False))
            problem += f", mpiexec with exit status {status}"
        return self._ending(problem, self._logs())

    def _ending(self, problem: str, texts: dict[str, str]) -> Ending:
        failures: dict[int, Any] = {}
        if self.test:
            for (nodeid, _), reports in self.failures.items():
                if nodeid == self.test["nodeid"]:
                    failures |= reports
        return Ending(problem, texts, failures, self.test, self.statuses.get(0))

    def _logs(self, mpiexec: bool = True) -> dict[str, str]:
        logs = {f"[rank {rank}]": self.launch.log(f"rank{rank}.log") for rank in range(self.launch.size)}
        if mpiexec:
            logs["mpiexec"] = self.launch.log("mpiexec.log")
        return {f"{who} wrote:": text for who, text in logs.items() if text}

    def _who_died(self) -> tuple[str, bool]:
        ranks = {pid: rank for rank, (_, pid) in self.places.items()}
        for pid, status in exits(self.launch.directory):
            if ranks.get(pid) not in self.statuses:  # the first that ended before its session did
                who = ranks_text([ranks[pid]]) if pid in ranks else "a rank, before its session began,"
                how = f"exit status {status}" if status >= 0 else Signals(-status).name
                return f"{who} ended with {how}", True
        return "a rank ended", False
