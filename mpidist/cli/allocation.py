"""The nodes of a job of Slurm: which of them still answer."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Final

__all__ = ["find_lost_nodes"]

_ANSWER_SECONDS: Final = 60.0  # what srun may take to start a process on each node


def find_lost_nodes() -> list[str]:
    """Return the names of the nodes of this process's job that start no process. Local.

    Ranks may learn of the loss of a node before Slurm does: each node is asked.
    """
    job = os.environ.get("SLURM_JOB_NODELIST")
    if job is None:
        return []
    command = ["scontrol", "show", "hostnames", job]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    until = time.monotonic() + _ANSWER_SECONDS
    asked = {name: _ask(name) for name in names}
    return [name for name, srun in asked.items() if not _answers(srun, until)]


def _ask(name: str) -> subprocess.Popen[bytes]:
    command = ["srun", "--mpi=none", "--overlap", f"--nodelist={name}", "--nodes=1", "--ntasks=1", "true"]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, preexec_fn=_unblock)


def _unblock() -> None:
    """Let srun get the signals that its parent has blocked."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _answers(srun: subprocess.Popen[bytes], until: float) -> bool:
    try:
        return srun.wait(max(0.0, until - time.monotonic())) == 0
    except subprocess.TimeoutExpired:
        srun.kill()
        srun.wait()
        return False
