"""A cluster as the Flux instance that runs the job describes it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from functools import cached_property
from typing import final

from mpidist.cluster_resolver.cluster_spec import ClusterSpec, number_ports
from mpidist.cluster_resolver.host_list import expand_host_list
from mpidist.cluster_resolver.resolver import ClusterResolver, OwnTask
from mpidist.errors import TopologyError

__all__ = ["FluxClusterResolver"]


@final
class FluxClusterResolver(ClusterResolver):
    """The tasks of the Flux job that this process is in, all workers; task r of `flux run` is rank r.

    Args:
        environ: Where to read; default `os.environ`.
    """

    def __init__(self, *, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(environ=environ)

    def cluster_spec(self) -> ClusterSpec:
        """Give a worker for each task, on the hosts that `flux job taskmap` names. Local; queries Flux once.

        Raises:
            TopologyError: If this is no job of Flux, or Flux has no such job.
        """
        return self._cluster_spec

    @cached_property
    def _cluster_spec(self) -> ClusterSpec:
        hosts = _read_task_map(_ask_flux(self._variables()))
        return ClusterSpec({"worker": number_ports([hosts[task] for task in sorted(hosts)])})

    def find_own_task(self) -> OwnTask:
        """Read the task's number that Flux gave."""
        number = self._variables().get("FLUX_TASK_RANK", "")
        return OwnTask("worker", int(number)) if number else OwnTask()


def _ask_flux(environ: Mapping[str, str]) -> str:
    """Return where the job's tasks are, a line a node: `n1: 0-3`."""
    if "FLUX_JOB_ID" not in environ:
        raise TopologyError(
            "FluxClusterResolver: FLUX_JOB_ID not found in environment, so this process is in no job of Flux; "
            "start it with `flux run`, or leave the resolver out: MPI alone is enough"
        )
    command = ["flux", "job", "taskmap", "--to=hosts", environ["FLUX_JOB_ID"]]
    try:
        return subprocess.run(command, capture_output=True, check=True, text=True, env={**environ}).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        raise TopologyError(f"FluxClusterResolver: `{' '.join(command)}` failed: {reason}") from error


def _read_task_map(text: str) -> dict[int, str]:
    """Return the host of each task."""
    hosts: dict[int, str] = {}
    for line in text.splitlines():
        host, _, tasks = line.rpartition(": ")
        hosts |= dict.fromkeys(map(int, expand_host_list(f"[{tasks}]")), host)
    return hosts
