"""One rank of one group: it sleeps until it is told what to do, and says how long that took.

python -m ranks.rank KIND FOLDER [RANK SIZE]

The folder holds the socket to the program that measures, and the counters of the barrier.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from ranks.meeting import Meeting
from ranks.way import check
from ranks.work import Work, write_number, write_pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from ranks.way import Library, Way

__all__ = ["Rank", "connect", "die_with_parent", "obey"]

_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG
_LIBRARIES = {
    "mpi": "Mpi",
    "gloo": "Gloo",
    "tensorflow": "TensorFlow",
    "horovod": "Horovod",
    "chainermn": "ChainerMN",
    "memory": "Memory",
}
_WITHOUT_MPI = ("gloo", "tensorflow", "memory")
_SENT_BYTES, _SENT_PACKETS = 8, 9  # columns of /proc/net/dev, after the name


class Rank:
    """Does what it is told: prepare a work, take the first step or more of them, forget the work.

    Args:
        library: What is measured.
        meet: The barrier before each step.
    """

    def __init__(self, library: Library, meet: Callable[[], object]) -> None:
        self._library, self._meet = library, meet
        self._work = Work("size", "", ())
        self._ways: dict[str, Way] = {}
        self._others = np.zeros(0)
        self._number = 0

    @property
    def commands(self) -> dict[str, Callable[..., dict[str, Any]]]:
        """What it can be told, by name."""
        return {"prepare": self._prepare, "first": self._first, "turn": self._turn, "forget": self._forget}

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do something, and say what came of it."""
        try:
            return self.commands[command.pop("do")](**command)
        except Exception:  # the program that measures tells the user, and ends this group
            return {"error": traceback.format_exc()}

    def _prepare(self, shapes: list[list[int]], **fields: Any) -> dict[str, Any]:
        """Allocate a work's arrays. Collective."""
        self._work = Work(shapes=tuple(tuple(shape) for shape in shapes), **fields)
        self._ways = self._library.ways(self._work)
        self._others = np.zeros(self._work.other_bytes // 8)
        return {"ways": {name: way.baseline for name, way in self._ways.items()}}

    def _first(self, way: str) -> dict[str, Any]:
        """Take the first step of a way, and check all of its result. Collective."""
        chosen = self._ways[way]
        for arrays in chosen.written:
            write_pattern(arrays, self._library.rank)
        seconds, results = self._step(chosen)
        self._check(chosen, results, None)
        return {"times": [seconds]}

    def _turn(self, way: str, warm: int, steps: int) -> dict[str, Any]:
        """Take steps, of which the first `warm` do not count. Collective."""
        chosen, times, began = self._ways[way], [], perf_counter()
        count_sent = _sent if os.environ.get("BENCHMARK_LINK") else chosen.sent
        before = count_sent()
        for step in range(warm + steps):
            if step == warm:
                self._meet()
                before = count_sent()
            self._number = 1 + self._number % 8
            for arrays in chosen.written:
                write_number(arrays, self._number + self._library.rank)
            seconds, results = self._step(chosen)
            times.append(seconds)
            self._check(chosen, results, self._number)
            del results  # its memory goes back outside of the next step
        self._meet()
        calls = steps * self._work.calls
        sent = [(after - was) / calls for was, after in zip(before, count_sent())]  # noqa: B905 - Python 3.8
        return {"times": times[warm:], "wall": perf_counter() - began, "sent": sent}

    def _forget(self) -> dict[str, Any]:
        """Free a work's arrays. Collective."""
        self._ways, self._others = {}, np.zeros(0)
        self._library.forget()
        gc.collect()
        return {}

    def _check(self, way: Way, results: list[Any], number: int | None) -> None:
        for result in results if way.written else ():
            check(way.results(result), way, self._work.shapes, self._library.size, number)

    def _step(self, way: Way) -> tuple[float, list[Any]]:
        way.load()
        self._others += 1
        meet, call, calls = self._meet, way.call, range(self._work.calls)

        def timed() -> tuple[float, list[Any]]:
            meet()
            start = perf_counter()
            results = [call(at) for at in calls]
            return (perf_counter() - start) / len(calls), results

        seconds, results = way.within(timed)
        return seconds, results


def _sent() -> list[int]:
    """Read what this host has sent over the link that is measured: bytes with all headers, and packets."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, text = line.partition(":")
        if name.strip() == os.environ["BENCHMARK_LINK"]:
            numbers = text.split()
            return [int(numbers[_SENT_BYTES]), int(numbers[_SENT_PACKETS])]
    return []


def die_with_parent() -> None:
    """Let this process end with the one that has started it: a stopped rank would stay for ever."""
    ctypes.CDLL(None).prctl(_DEATH_OF_PARENT, signal.SIGKILL)


def connect(folder: str) -> Any:
    """Open the way to the program that measures."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"{folder}/socket")
    return connection.makefile("rw")


def obey(stream: Any, rank: Rank, answer: dict[str, Any]) -> None:
    """Say hello, and do what the program that measures asks for, until it has gone."""
    while True:
        print(json.dumps(answer), file=stream, flush=True)
        line = stream.readline()  # asleep until its turn
        if not line:
            break
        answer = rank.answer(json.loads(line))


def main() -> None:
    """Start the library and serve."""
    die_with_parent()
    kind, folder, *place = sys.argv[1:]
    module = importlib.import_module(f"ranks.over_{kind}")
    arguments = (Path(folder), *map(int, place)) if kind in _WITHOUT_MPI else ()
    library: Library = getattr(module, _LIBRARIES[kind])(*arguments)
    rank = Rank(library, Meeting(Path(folder, "counters"), library.rank, library.size).wait)
    obey(connect(folder), rank, {"rank": library.rank, "versions": library.versions})


if __name__ == "__main__":
    main()
