"""One verdict of all ranks on each phase of each test."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from mpi_session.reports import ranks_text
from mpi_session.selection import refused_skip

_POLL = 0.0002


class Agreement:
    """Gathers from all ranks and hands out one answer, on a communicator of its own.

    The ranks poll and never block in MPI: who watches them sees where they wait, and can end them.
    """

    def __init__(self, world: MPI.Comm) -> None:
        self._comm = world.Dup()
        self._rank, self._size = world.rank, world.size

    def reach(self, mine: Any, decide: Callable[[list[Any]], Any], waiting: Callable[[float], None]) -> Any:
        """Return on all ranks what rank 0 decides on what all have sent; ``waiting`` hears the seconds."""
        begin = time.monotonic()
        if self._rank:
            sent = self._comm.isend(mine, dest=0)
            answer = self._receive(0, begin, waiting)[1]
            sent.wait()
            return answer
        gathered = {0: mine}
        while len(gathered) < self._size:
            source, value = self._receive(MPI.ANY_SOURCE, begin, waiting)
            gathered[source] = value
        answer = decide([gathered[rank] for rank in range(self._size)])
        for rank in range(1, self._size):
            self._comm.send(answer, dest=rank)
        return answer

    def _receive(self, source: int, begin: float, waiting: Callable[[float], None]) -> tuple[int, Any]:
        status = MPI.Status()
        while not self._comm.iprobe(source=source, status=status):
            waiting(time.monotonic() - begin)
            time.sleep(_POLL)
        return status.source, self._comm.recv(source=status.source)


@dataclass(frozen=True)
class Outcome:
    """How one phase of a test ended on one rank."""

    state: str  # passed, failed, skipped, xfailed, xpassed
    reason: str = ""
    report: Any = None  # of a failure, serialised

    @classmethod
    def of(cls, report: Any, serialised: Any) -> Outcome:
        """Return the outcome that a report tells."""
        if hasattr(report, "wasxfail"):
            return cls("xfailed" if report.skipped else "xpassed", report.wasxfail)
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            return cls("skipped", reason.removeprefix("Skipped: "))
        # xfail_strict makes a failure of a test that passed against expectation
        if report.failed and str(report.longrepr).startswith("[XPASS(strict)]"):
            return cls("xpassed", "", serialised)
        return cls(report.outcome, "", serialised if report.failed else None)


@dataclass(frozen=True)
class Verdict:
    """What a report has to say instead of what its rank saw."""

    failures: dict[int, Any]  # serialised reports by rank
    text: str = ""
    xfail_reason: str | None = None


def judge(outcomes: list[Outcome], accepted_skips: Sequence[str]) -> Verdict | None:
    """Return the verdict on one phase of a test, None where every rank's own report is right."""
    states = {outcome.state for outcome in outcomes}
    failures = {rank: outcome.report for rank, outcome in enumerate(outcomes) if outcome.report is not None}
    if "xfailed" in states and states <= {"xfailed", "xpassed", "passed"}:
        # A test that is expected to fail does so by failing on one rank: so it is with real failures.
        reason = next(outcome.reason for outcome in outcomes if outcome.state == "xfailed")
        return None if states == {"xfailed"} else Verdict({}, xfail_reason=reason)
    if failures:
        return Verdict(failures)
    if "skipped" in states and len(states) > 1:
        skips = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome.state == "skipped"}
        others = set(range(len(outcomes))) - set(skips)
        reason = next(iter(skips.values())).reason
        return Verdict(
            {},
            f"skipped on some ranks only: {ranks_text(skips)} with the reason {reason!r}, but not "
            f"{ranks_text(others)}: skip on all ranks or on none",
        )
    if states == {"skipped"} and (refusal := refused_skip(outcomes[0].reason, accepted_skips)):
        return Verdict({}, refusal)
    return None
