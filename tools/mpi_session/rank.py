"""The program that mpiexec starts on every rank: ``python -m mpi_session.rank --logged|--live ARGUMENTS``."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

import pytest

from mpi_session.launch import DIRECTORY
from mpi_session.wire import note_exit

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run pytest in a child process, and note how that ends."""
    # Launchers kill all ranks as soon as one has ended, and may name the wrong one as the first.
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        return _run(sys.argv[1] == "--logged", sys.argv[2:])
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    note_exit(Path(os.environ[DIRECTORY]), child, status)
    if status < 0:
        os.kill(os.getpid(), -status)
    return status


def _run(logged: bool, arguments: list[str]) -> int:
    from mpi4py import MPI  # starts MPI, which must not be before the fork

    if logged:
        # Before pytest begins to capture: the file gets what the capture does not.
        log = Path(os.environ[DIRECTORY]) / f"rank{MPI.COMM_WORLD.rank}.log"
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    return pytest.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
