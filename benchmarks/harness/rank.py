"""One rank of a library: it sleeps until the harness sends a command, and replies with its times.

python -m harness.rank MODULE:CLASS FOLDER [ARGUMENT ...]

The class is a `Backend`. The folder has the socket of the harness, and the counters of the barrier.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import mmap
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from harness.work import Backend, Way, Work, check, write_number, write_pattern

_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG
_SENT_BYTES, _SENT_PACKETS = 8, 9  # columns of /proc/net/dev, after the name
_LINE = 8  # numbers in a cache line: each rank's counter has its own
_SPINS = 2000


class Barrier:
    """A barrier of one machine's ranks in shared memory, the file of `path`; the same for all libraries.

    A rank polls, and yields its core now and then: there may be fewer cores than ranks.
    """

    def __init__(self, path: Path, rank: int, size: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, 8 * _LINE * size)
        self._counters = memoryview(mmap.mmap(descriptor, 8 * _LINE * size)).cast("q")
        os.close(descriptor)
        self._mine, self._number = rank * _LINE, 0
        self._others = [other * _LINE for other in range(size) if other != rank]
        self._yields = size > len(os.sched_getaffinity(0))

    def wait(self, timeout_seconds: float = 600) -> None:
        """Return once every rank has come."""
        self._number += 1
        counters, number, spins = self._counters, self._number, 0
        counters[self._mine] = number
        for other in self._others:
            while counters[other] < number:
                spins += 1
                if self._yields or spins > _SPINS:
                    os.sched_yield()
                if spins % (50 * _SPINS) == 0:
                    timeout_seconds -= 0.1  # about; a rank that has died must not block the others for ever
                    time.sleep(0.001)
                if timeout_seconds < 0:
                    raise TimeoutError("a rank did not come")


class Rank:
    """Executes commands: prepare a work, take the first step or more of them, forget the work."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._work = Work("size", "", ())
        self._ways: dict[str, Way] = {}
        self._others = np.zeros(0)
        self._number = 0

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Execute a command, and return the reply."""
        commands = {"prepare": self._prepare, "first": self._first, "turn": self._turn, "forget": self._forget}
        act: Callable[..., dict[str, Any]] = commands[command.pop("do")]
        try:
            return act(**command)
        except Exception:  # the harness reports it, and ends this library's ranks
            return {"error": traceback.format_exc()}

    def _prepare(self, shapes: list[list[int]], **fields: Any) -> dict[str, Any]:
        """Allocate a work's arrays. Collective."""
        self._work = Work(shapes=tuple(tuple(shape) for shape in shapes), **fields)
        self._ways = self._backend.ways(self._work)
        self._others = np.zeros(self._work.other_bytes // 8)
        return {"ways": {name: way.baseline for name, way in self._ways.items()}}

    def _first(self, way: str) -> dict[str, Any]:
        """Take the first step of a way, and check all of its result. Collective."""
        chosen = self._ways[way]
        for arrays in chosen.written:
            write_pattern(arrays, self._backend.rank)
        seconds, results = self._step(chosen)
        self._check(chosen, results, None)
        return {"times": [seconds]}

    def _turn(self, way: str, warm: int, steps: int) -> dict[str, Any]:
        """Take steps, of which the first `warm` do not count. Collective."""
        chosen, times, began = self._ways[way], [], perf_counter()
        before = _sent()
        for step in range(warm + steps):
            if step == warm:
                self._backend.barrier()
                before = _sent()
            self._number = 1 + self._number % 8
            for arrays in chosen.written:
                write_number(arrays, self._number + self._backend.rank)
            seconds, results = self._step(chosen)
            times.append(seconds)
            self._check(chosen, results, self._number)
            del results  # its memory is released outside of the next step
        self._backend.barrier()
        calls = steps * self._work.calls
        sent = [(after - was) / calls for was, after in zip(before, _sent(), strict=True)]
        return {"times": times[warm:], "wall": perf_counter() - began, "sent": sent}

    def _forget(self) -> dict[str, Any]:
        """Free a work's arrays. Collective."""
        self._ways, self._others = {}, np.zeros(0)
        self._backend.forget()
        gc.collect()
        return {}

    def _check(self, way: Way, results: list[Any], number: int | None) -> None:
        for result in results if way.written else ():
            check(way.results(result), way, self._work.shapes, self._backend.size, number)

    def _step(self, way: Way) -> tuple[float, list[Any]]:
        self._others += 1
        barrier, call, calls = self._backend.barrier, way.call, range(self._work.calls)

        def timed() -> tuple[float, list[Any]]:
            barrier()
            start = perf_counter()
            results = [call(at) for at in calls]
            return (perf_counter() - start) / len(calls), results

        seconds, results = way.within(timed)
        return seconds, results


def _sent() -> list[int]:
    """Read what this host has sent over the link that is measured: bytes with all headers, and packets."""
    link = os.environ.get("BENCHMARK_LINK")
    for line in Path("/proc/net/dev").read_text().splitlines() if link else ():
        name, _, text = line.partition(":")
        if name.strip() == link:
            numbers = text.split()
            return [int(numbers[_SENT_BYTES]), int(numbers[_SENT_PACKETS])]
    return []


def die_with_parent() -> None:
    """Let this process end with its parent: a stopped rank would stay for ever."""
    ctypes.CDLL(None).prctl(_DEATH_OF_PARENT, signal.SIGKILL)


def main() -> None:
    """Start the library, and execute commands until the harness has ended."""
    die_with_parent()
    kind, folder, *words = sys.argv[1:]
    module, _, name = kind.partition(":")
    backend: Backend = getattr(importlib.import_module(module), name)(Path(folder), *map(int, words))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"{folder}/socket")
    stream = connection.makefile("rw")
    answer = {"rank": backend.rank, "versions": backend.versions, "serves": backend.serves}
    if backend.serves:
        print(json.dumps(answer), file=stream, flush=True)
        backend.serve()
        stream.readline()
        return
    backend.barrier = Barrier(Path(folder, "counters"), backend.rank, backend.size).wait
    rank = Rank(backend)
    while True:
        print(json.dumps(answer), file=stream, flush=True)
        line = stream.readline()  # asleep until its turn
        if not line:
            break
        answer = rank.answer(json.loads(line))
    backend.close()


if __name__ == "__main__":
    main()
