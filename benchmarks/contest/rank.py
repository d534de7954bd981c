"""One rank of one group: it sleeps until it is told what to do, and says how long that took.

python -m contest.rank KIND FOLDER [RANK SIZE]

The folder holds the socket to the program that measures, and the counters of the barrier.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from contest.meeting import Meeting
from contest.work import Work, check_ends, check_pattern, write_number, write_pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from contest.way import Library, Way

_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG


def _library(kind: str, folder: Path, rank: int, size: int) -> Library:
    """Import and start a library. Collective."""
    if kind == "mpi":
        from contest.over_mpi import Mpi

        return Mpi()
    if kind == "gloo":
        from contest.over_gloo import Gloo

        return Gloo(folder, rank, size)
    if kind == "tensorflow":
        from contest.over_tensorflow import TensorFlow

        return TensorFlow(folder, rank, size)
    if kind == "horovod":
        from contest.over_horovod import Horovod

        return Horovod()
    if kind == "chainermn":
        from contest.over_chainermn import ChainerMN

        return ChainerMN()
    from contest.over_memory import Memory

    return Memory(rank, size)


class Rank:
    """Does what it is told: prepare a work, take the first step or more of them, forget the work."""

    def __init__(self, library: Library, meeting: Meeting) -> None:
        self._library, self._meeting = library, meeting
        self._work = Work("size", "", ())
        self._ways: dict[str, Way] = {}
        self._number = 0

    def prepare(self, kind: str, name: str, shapes: list[list[int]], calls: int) -> dict[str, Any]:
        """Allocate a work's arrays. Collective."""
        self._work = Work(kind, name, tuple(tuple(shape) for shape in shapes), calls)
        self._ways = self._library.ways(self._work)
        return {"ways": list(self._ways)}

    def first(self, way: str) -> dict[str, Any]:
        """Take the first step of a way, and check all of its result. Collective."""
        chosen = self._ways[way]
        for arrays in chosen.written:
            write_pattern(arrays, self._library.rank)
        seconds, results = self._step(chosen)
        for result in results if chosen.written else ():
            check_pattern(chosen.sums(result), self._work.shapes, self._library.size)
        return {"times": [seconds]}

    def turn(self, way: str, warm: int, steps: int) -> dict[str, Any]:
        """Take steps, of which the first `warm` do not count. Collective."""
        chosen, times, began = self._ways[way], [], perf_counter()
        for _ in range(warm + steps):
            self._number = 1 + self._number % 8
            for arrays in chosen.written:
                write_number(arrays, self._number + self._library.rank)
            seconds, results = self._step(chosen)
            times.append(seconds)
            for result in results if chosen.written else ():
                check_ends(chosen.sums(result), self._work.shapes, self._library.size, self._number)
            del results  # its memory goes back outside of the next step
        return {"times": times[warm:], "wall": perf_counter() - began}

    def forget(self) -> dict[str, Any]:
        """Free a work's arrays. Collective."""
        self._ways = {}
        self._library.forget()
        gc.collect()
        return {}

    def _step(self, way: Way) -> tuple[float, list[Any]]:
        way.load()
        meet, call, calls = self._meeting.wait, way.call, range(self._work.calls)

        def timed() -> tuple[float, list[Any]]:
            meet()
            start = perf_counter()
            results = [call(at) for at in calls]
            return (perf_counter() - start) / len(calls), results

        seconds, results = way.within(timed)
        return seconds, results


def main() -> None:
    """Start the library and serve."""
    ctypes.CDLL(None).prctl(_DEATH_OF_PARENT, signal.SIGKILL)  # a stopped rank would stay for ever
    kind, folder = sys.argv[1], Path(sys.argv[2])
    rank, size = map(int, sys.argv[3:] or ("0", "1"))
    library = _library(kind, folder, rank, size)
    worker = Rank(library, Meeting(folder / "counters", library.rank, library.size))
    known: dict[str, Callable[..., dict[str, Any]]] = {
        "prepare": worker.prepare,
        "first": worker.first,
        "turn": worker.turn,
        "forget": worker.forget,
    }
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(folder / "socket"))
    stream = connection.makefile("rw")
    answer: dict[str, Any] = {"rank": library.rank, "pid": os.getpid(), "versions": library.versions}
    while True:
        print(json.dumps(answer), file=stream, flush=True)
        line = stream.readline()  # asleep until its turn
        if not line:
            break
        command = json.loads(line)
        try:
            answer = known[command.pop("do")](**command)
        except Exception:  # the program that measures tells the user, and ends this group
            answer = {"error": traceback.format_exc()}


if __name__ == "__main__":
    main()
