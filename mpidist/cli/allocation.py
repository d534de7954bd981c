"""The nodes of a job of Slurm, and which of them still start processes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Final

from mpidist.cli.launching import prepare_child
from mpidist.cluster_resolver.host_list import expand_host_list

__all__ = ["find_lost_nodes", "nodes_of_job"]

_ANSWER_SECONDS: Final = 60.0  # what srun may take to start a process on each node


def nodes_of_job(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the nodes of this process's job."""
    text = environ.get("SLURM_JOB_NODELIST")
    return expand_host_list(text) if text else []


def find_lost_nodes(nodes: Sequence[str]) -> list[str]:
    """Return the names of the nodes that start no process. Local.

    Ranks may detect the loss of a node before Slurm does, so this starts a process on each node.
    """
    until = time.monotonic() + _ANSWER_SECONDS
    started = {node: _start_on(node) for node in nodes}
    return [node for node, srun in started.items() if not _has_succeeded(srun, until)]


def _start_on(node: str) -> subprocess.Popen[bytes]:
    command = ["srun", "--mpi=none", "--overlap", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "true"]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, preexec_fn=prepare_child)


def _has_succeeded(srun: subprocess.Popen[bytes], until: float) -> bool:
    try:
        return srun.wait(max(0.0, until - time.monotonic())) == 0
    except subprocess.TimeoutExpired:
        srun.kill()
        srun.wait()
        return False
