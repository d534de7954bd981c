"""The nodes of a job of Slurm: which of them still answer."""

from __future__ import annotations

import os
import subprocess
from typing import Final

__all__ = ["find_lost_nodes"]

_ANSWER_SECONDS: Final = 60.0  # what srun may take to start a process on a node


def find_lost_nodes() -> list[str]:
    """Return the names of the nodes of this process's job that start no process. Local.

    Ranks may learn of the loss of a node before Slurm does: each node is asked.
    """
    names = subprocess.run(
        ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]], capture_output=True, text=True, check=True
    ).stdout.split()
    asked = {name: _ask(name) for name in names}
    return [name for name, srun in asked.items() if not _answers(srun)]


def _ask(name: str) -> subprocess.Popen[bytes]:
    command = ["srun", "--mpi=none", "--overlap", f"--nodelist={name}", "--nodes=1", "--ntasks=1", "true"]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)


def _answers(srun: subprocess.Popen[bytes]) -> bool:
    try:
        return srun.wait(_ANSWER_SECONDS) == 0
    except subprocess.TimeoutExpired:
        srun.kill()
        srun.wait()
        return False
