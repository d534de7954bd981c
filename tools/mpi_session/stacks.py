"""The Python stacks of all ranks, also of ranks blocked inside an MPI call."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

Places = Mapping[int, tuple[str, int]]
# The frames between the program's start and the test tell nothing about where the test is.
_MACHINERY = re.compile(r'File "[^"]*(/_pytest/|/pluggy/|/pytest/__|/mpi_session/|<frozen runpy>|/xdist/)')
_THREAD = re.compile(r"(Current thread|Thread) 0x")
_PATIENCE = 20.0


def here() -> tuple[str, int]:
    """Return the host and process id of this rank."""
    return socket.gethostname(), os.getpid()


def _path(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.stacks"


def answer_signal(directory: Path, rank: int) -> IO[str]:
    """Let SIGUSR2 write this rank's stacks to its file; return the file, which must stay open."""
    file = _path(directory, rank).open("w")
    # faulthandler answers from the signal handler in C: neither the GIL nor a return from MPI is needed.
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
    return file


def collect(directory: Path, places: Places, ranks: Iterable[int]) -> dict[int, str]:
    """Return the stacks of these ranks, or in their place why there is none."""
    asked = {rank: _ask(rank, places) for rank in ranks}
    deadline = time.monotonic() + _PATIENCE
    waiting = [rank for rank, problem in asked.items() if not problem]
    while waiting and time.monotonic() < deadline:
        time.sleep(0.1)
        waiting = [rank for rank in waiting if not _path(directory, rank).stat().st_size]
    time.sleep(0.1)  # lets a file that has begun grow to its end
    return {rank: problem or _shown(_path(directory, rank)) for rank, problem in asked.items()}


def _ask(rank: int, places: Places) -> str:
    if rank not in places:
        return "(no stack: this rank has not begun its session)"
    host, pid = places[rank]
    if host != socket.gethostname():
        return f"(no stack: process {pid} runs on another host, {host})"
    try:
        os.kill(pid, signal.SIGUSR2)
    except ProcessLookupError:
        return f"(no stack: process {pid} is gone)"
    return ""


def without_machinery(lines: Iterable[str]) -> list[str]:
    """Leave out the frames of pytest and of this package."""
    return [line for line in lines if not _MACHINERY.search(line)]


def _shown(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()
    if not lines:
        return f"(no stack: the process did not answer within {_PATIENCE:g} s)"
    threads = sum(_THREAD.match(line) is not None for line in lines)
    kept = [line for line in without_machinery(lines) if line]
    if threads == 1:
        kept = [line for line in kept if not _THREAD.match(line)]
    return "\n".join(kept) or "  outside of the test, waiting for the other ranks"
