"""Offset of each host's monotonic clock from that of rank 0, by messages there and back: the fastest counts.

The ranks of a host have one clock, so one rank of each host asks. An answer that takes `t` in all gives the difference
to within `t / 2`, however long either way takes.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, final

import numpy as np

from mpidist.transport.mpi.library import Intracomm

__all__ = ["ClockSample", "compare_clocks", "name_clock"]

_ROUNDS: Final = 32
_TAG: Final = 100  # failure notes have smaller ones

Clock = Callable[[], int]


@final
class ClockSample(NamedTuple):
    """A host's clock at one moment. All times in nanoseconds.

    Attributes:
        clock: The name of the clock.
        time: The reading of the clock.
        offset: The difference to the time of rank 0's clock, to be added to it.
        error: By how much the offset may be wrong.
    """

    clock: str
    time: int
    offset: int = 0
    error: int = 0


def name_clock() -> str:
    """Name the monotonic clock of this host: the number that Linux gave itself when it started, else the host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def compare_clocks(comm: Intracomm | None, name: str, now: Clock = time.monotonic_ns) -> list[ClockSample]:
    """Compare each host's clock with that of rank 0; return a sample of each, the same on all ranks. Collective."""
    if comm is None:
        return [ClockSample(name, now())]
    names = comm.allgather(name)
    first_ranks = [names.index(one) for one in dict.fromkeys(names)]
    own = ClockSample(name, now())
    for rank in first_ranks[1:]:  # one after the other: rank 0 answers without delay
        if comm.rank == rank:
            own = _ask(comm, name, now)
        elif comm.rank == 0:
            _answer(comm, rank, now)
    everyone = comm.allgather(own)
    return [ClockSample(*everyone[rank]) for rank in first_ranks]


def _ask(comm: Intracomm, name: str, now: Clock) -> ClockSample:
    sent, received = np.zeros(1, np.int64), np.zeros(1, np.int64)
    samples = []
    for _ in range(_ROUNDS):
        begun = now()
        comm.Send(sent, 0, _TAG)
        comm.Recv(received, 0, _TAG)
        ended = now()
        middle = (begun + ended) // 2
        samples.append(ClockSample(name, middle, int(received[0]) - middle, (ended - begun + 1) // 2))
    return min(samples, key=lambda sample: sample.error)


def _answer(comm: Intracomm, rank: int, now: Clock) -> None:
    sent, received = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for _ in range(_ROUNDS):
        comm.Recv(received, rank, _TAG)
        sent[0] = now()
        comm.Send(sent, rank, _TAG)
