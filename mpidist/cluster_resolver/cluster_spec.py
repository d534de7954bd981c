"""Which jobs a cluster has, and the address of each of their tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

__all__ = ["ClusterSpec"]


@final
class ClusterSpec:
    """Jobs by name, each with the addresses of its tasks in order. Never changes once made.

    Args:
        cluster: `{"worker": ["n1:8888", "n2:8888"]}`, or another `ClusterSpec`.

    Raises:
        TypeError: If `cluster` is neither, or a job is no sequence of strings.
    """

    def __init__(self, cluster: Mapping[str, Sequence[str]] | ClusterSpec) -> None:
        if isinstance(cluster, ClusterSpec):
            self._jobs: dict[str, tuple[str, ...]] = cluster._jobs
        elif isinstance(cluster, Mapping):
            self._jobs = {_check_name(job): _check_addresses(job, cluster[job]) for job in cluster}
        else:
            raise TypeError(
                f"ClusterSpec got {cluster!r} of type {type(cluster).__name__}; "
                f"it needs a dict of job names to lists of addresses, or a ClusterSpec"
            )

    def as_dict(self) -> dict[str, list[str]]:
        """Give the jobs as new lists in a new dict."""
        return {job: list(addresses) for job, addresses in self._jobs.items()}

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs, in the order given."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Count the tasks of a job.

        Raises:
            ValueError: If there is no such job.
        """
        return len(self._tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """List the indices of a job's tasks.

        Raises:
            ValueError: If there is no such job.
        """
        return list(range(len(self._tasks(job_name))))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Look up one task's address.

        Raises:
            ValueError: If there is no such job, or the job has no such task.
        """
        tasks = self._tasks(job_name)
        if not 0 <= task_index < len(tasks):
            raise ValueError(
                f"ClusterSpec has no task {task_index} in job {job_name!r}; its indices are 0 to {len(tasks) - 1}"
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str]:
        """List a job's addresses in order of task index.

        Raises:
            ValueError: If there is no such job.
        """
        return list(self._tasks(job_name))

    def _tasks(self, job_name: str) -> tuple[str, ...]:
        if job_name not in self._jobs:
            raise ValueError(f"ClusterSpec has no job {job_name!r}; its jobs are {self.jobs}")
        return self._jobs[job_name]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            return self._jobs == other._jobs
        if isinstance(other, Mapping):
            return self.as_dict() == {job: _as_list(addresses) for job, addresses in other.items()}
        return NotImplemented

    # Equal to a dict, which has no hash either.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()})"


def _check_name(job: object) -> str:
    if not isinstance(job, str):
        raise TypeError(f"ClusterSpec got the job name {job!r}; it needs a string like 'worker'")
    return job


def _check_addresses(job: str, addresses: object) -> tuple[str, ...]:
    # A string is a sequence of strings too, and a sign of forgotten brackets.
    if isinstance(addresses, Sequence) and not isinstance(addresses, (str, bytes)):
        wrong = [address for address in addresses if not isinstance(address, str)]
        if not wrong:
            return tuple(addresses)
        raise TypeError(f"ClusterSpec got {wrong[0]!r} in job {job!r}; it needs a string like 'n1:8888'")
    raise TypeError(f"ClusterSpec got {addresses!r} for job {job!r}; it needs a list of addresses like ['n1:8888']")


def _as_list(addresses: object) -> object:
    return list(addresses) if isinstance(addresses, tuple) else addresses
