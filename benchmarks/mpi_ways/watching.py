"""What it costs that nobody waits for ever, and how soon a rank notices that another one is late."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from ranks.way import Way

import mpidist
from mpi_ways.all_reduce import raw_ways, way_of
from mpidist.transport.failures.flight_recorder import FLIGHT_BYTES, FlightRecorder
from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.reduction import Reduction

if TYPE_CHECKING:
    from ranks.over_mpi import Mpi
    from ranks.work import Work

__all__ = ["ways"]

_DEADLINE_SECONDS = 0.2
_SMALL_BYTES = 4
_SWITCHES = {"no check": {"MPIDIST_CHECK": "0"}, "check": {}, "check, deadline": {"MPIDIST_TIMEOUT_SECONDS": "600"}}


def ways(mpi: Mpi, work: Work) -> dict[str, Way]:
    """List MPI's blocking all-reduce beside the polled one; for the smallest array, what the checks and notes take."""
    private = [work.empty() for _ in range(work.calls)]
    found = {"raw in place": raw_ways(mpi, private)["raw in place"], "polled": _polled(mpi, private)}
    if work.nbytes > _SMALL_BYTES:
        return found
    for name, settings in _SWITCHES.items():
        found[name] = way_of(mpi.strategy(settings), work, private, baseline="no check")
    found["1000 calls in the flight recorder"] = _recorder()
    if mpi.size > 1:
        found[f"a rank misses a deadline of {_DEADLINE_SECONDS} s"] = _late(mpi)
    return found


def _polled(mpi: Mpi, private: list[list[Any]]) -> Way:
    polled, total = MpiCommunicator(mpi.comm.Dup(), "polled"), Reduction("sum")
    mpi.at_end(polled.free)

    def call(at: int) -> Any:
        for array in private[at]:
            polled.all_reduce(array, total)
        return private[at]

    return Way(private, call)


def _recorder() -> Way:
    recorder = FlightRecorder(np.zeros(FLIGHT_BYTES, np.uint8))

    def call(_: int) -> None:
        for number in range(1000):
            recorder.begin(number, "all_reduce", "SUM of 3 x float32")
            recorder.agree()
            recorder.end()

    return Way([], call, "")


def _late(mpi: Mpi) -> Way:
    """Let the last rank be late: what the others take until they raise, the deadline included."""
    strategy = mpi.strategy({"MPIDIST_FLIGHT_DIR": "off"})
    options = mpidist.CommunicationOptions(timeout_seconds=_DEADLINE_SECONDS)  # not of the reset

    def begin_anew() -> None:
        mpi.comm.Barrier()
        strategy.reset()

    def call(_: int) -> None:
        if mpi.rank == mpi.size - 1:
            return
        start = time.monotonic()
        try:
            strategy.reduce("sum", 1.0, options=options)
        except mpidist.errors.DeadlineExceededError:
            return
        raise AssertionError(f"a rank is late, and nobody noticed in {time.monotonic() - start:.3f} s")

    mpi.at_end(begin_anew)
    return Way([], call, "", load=begin_anew)
