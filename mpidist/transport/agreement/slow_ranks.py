"""Rank that the others wait for: found from the waits of the last calls, and logged once a minute at most."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, final

import numpy as np

from mpidist.transport.communicator import Array
from mpidist.transport.failures.flight_recorder import FlightRecorder
from mpidist.transport.text import name_ranks
from mpidist.transport.topology import Topology

__all__ = ["SlowRanks", "WaitReport"]

logger = logging.getLogger("mpidist.transport")

_MAX_CALLS: Final = 512  # of a report
_LEAST_SHARE: Final = 0.05  # of the time; a shorter wait is of no account
_LEAST_PART: Final = 0.8  # of the calls with waits, in which a slow rank comes last
_LEAST_CALLS: Final = 3  # with waits: in a single one, a rank may have saved a checkpoint

_now = time.monotonic_ns


@final
class WaitReport(NamedTuple):
    """Waits of a rank for others in the last calls before the one in which ranks exchange their reports.

    Attributes:
        seconds: From the begin of the first of these calls until now.
        waits: [calls] seconds that the rank waited in each; 0 if all others had joined before, or soon after.
        reads: [calls] seconds that the rank read data before each.
    """

    is_asked_for: bool
    seconds: float
    waits: Array
    reads: Array

    @property
    def is_of_account(self) -> bool:
        """Whether the rank has waited so long that it should report the wait."""
        return bool(self.waits.sum() > _LEAST_SHARE * self.seconds and np.count_nonzero(self.waits) >= _LEAST_CALLS)


@final
class SlowRanks:
    """One rank's memory of its waits, from which rank 0 finds out for which rank the others wait.

    A call in which a rank does not wait costs nothing. Once in an interval, a rank that waits adds up its waits; if
    they are of account, it requests all ranks' reports, with a bit of the fingerprint of its next call: `StopNotice`.
    """

    def __init__(self, recorder: FlightRecorder, topology: Topology, interval_seconds: float) -> None:
        self._recorder, self._topology = recorder, topology
        self._interval = 1e9 * interval_seconds or math.inf
        self._due = _now() + self._interval
        self._has_asked = False
        self._waits: deque[tuple[int, int]] = deque(maxlen=_MAX_CALLS)  # the number of a call, and when the wait began
        self._reads: deque[tuple[int, int]] = deque(maxlen=_MAX_CALLS)  # the number of a call, and nanoseconds

    def note_wait(self, sequence: int) -> bool:
        """Record that this rank begins to wait in a call. Local. Returns whether to request reports from all ranks."""
        if self._interval == math.inf:
            return False
        now = _now()
        self._waits.append((sequence, now))
        if now < self._due:
            return False
        self._due = now + self._interval
        self._has_asked = self.report(sequence).is_of_account
        return self._has_asked

    def note_read(self, sequence: int, nanoseconds: int) -> None:
        """Note how long this rank read data before a call. Local."""
        if self._interval < math.inf:
            self._reads.append((sequence, nanoseconds))

    def report(self, sequence: int) -> WaitReport:
        """Report on the calls before one, which this rank has joined. Local."""
        begun, rows = 1e9 * self._recorder.begun, self._recorder.rows
        numbers, since = rows[:, 0], begun - self._interval
        kept = rows[(numbers > max(0, sequence - _MAX_CALLS)) & (numbers < sequence) & (rows[:, 2] >= since)]
        agreed = {number: at for number, at in kept[:, (0, 3)].tolist() if at}
        waits, reads = np.zeros((2, sequence - min(agreed, default=sequence)))
        for number, at in self._waits:
            if number in agreed:
                waits[number - sequence] = max(0, agreed[number] - at) / 1e9
        for number, nanoseconds in self._reads:
            if number in agreed:
                reads[number - sequence] = nanoseconds / 1e9
        return WaitReport(self._has_asked, (begun - min(kept[:, 2], default=begun)) / 1e9, waits, reads)

    def take(self, reports: Sequence[WaitReport]) -> None:
        """Take the reports of all ranks, and log on rank 0 for which rank the others wait, if there is one. Local."""
        self._has_asked, self._due = False, _now() + self._interval
        if self._topology.rank == 0 and any(report.is_asked_for for report in reports):
            text = self._found(reports)
            if text:
                logger.warning("mpidist: %s", text)

    def _found(self, reports: Sequence[WaitReport]) -> str:
        """Name the rank, or the ranks of the node, for which the others wait; "" if there is none."""
        shortest = min(reports, key=lambda report: report.waits.size)
        num_calls, seconds, size = shortest.waits.size, shortest.seconds, len(reports)
        waits = np.array([report.waits[report.waits.size - num_calls :] for report in reports])
        reads = np.array([report.reads[report.reads.size - num_calls :] for report in reports])
        ordered = np.sort(waits, axis=0)
        lost = ordered[size // 2] - ordered[0]  # as long, or longer, most other ranks waited for the last one
        (calls,) = np.nonzero(lost * num_calls > lost.sum() / 2)  # not those in which all ranks come nearly together
        last = waits.argmin(axis=0)
        nodes = self._topology.nodes if self._topology.num_nodes > 1 else ()
        for ranks in (*((rank,) for rank in range(size)), *nodes):
            its = calls[np.isin(last[calls], ranks)]
            # What the others waited for all of these ranks: not for the last one of them alone.
            cost = (ordered[size // 2] - waits[list(ranks)].max(axis=0))[its].sum()
            if its.size < max(_LEAST_CALLS, _LEAST_PART * calls.size) or cost <= _LEAST_SHARE * seconds:
                continue
            # Of a rank that reads data for longer than others do, that is the reason if it explains half of the waits.
            read = (reads[last[its], its] - np.sort(reads[:, its], axis=0)[(size - 1) // 2]).sum()
            was, it, they = ("was", "it", "it") if len(ranks) == 1 else ("were", "them", "they")
            return (
                f"{name_ranks(ranks)} of {size} ranks, on host {self._topology.hostnames[ranks[0]]}, {was} last in "
                f"{its.size} of {calls.size} calls in which ranks waited; most others waited for {it} for "
                f"{cost / seconds:.0%} of {seconds:.3g} s, while {they} {was} "
                f"{'reading data (next of a data set)' if read > cost / 2 else 'computing'}"
            )
        return ""
