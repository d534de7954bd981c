"""Jobs of a cluster, and the address of each of their tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import final

__all__ = ["PORT_BASE", "ClusterSpec", "number_ports", "with_rpc_layer"]

PORT_BASE = 8888

Tasks = Sequence[str] | Mapping[int, str]


@final
class ClusterSpec:
    """Jobs by name, each with the addresses of its tasks in order. Immutable.

    Args:
        cluster: `{"worker": ["n1:8888", "n2:8888"]}`, or another `ClusterSpec`. A job may also be given as those of
            its tasks that are known, `{1: "n2:8888"}`.

    Raises:
        TypeError: If `cluster` is neither, or a job is neither a sequence of strings nor a dict of task indices to
            strings.
    """

    def __init__(self, cluster: Mapping[str, Tasks] | ClusterSpec) -> None:
        if isinstance(cluster, ClusterSpec):
            self._jobs: dict[str, dict[int, str]] = cluster._jobs
        elif isinstance(cluster, Mapping):
            self._jobs = {job: _check_tasks(job, cluster[job]) for job in cluster}
        else:
            raise TypeError(
                f"ClusterSpec got {cluster!r} of type {type(cluster).__name__}; "
                f"it needs a dict of job names to lists of addresses, or a ClusterSpec"
            )

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Give the jobs in a new dict: lists of addresses, and dicts where not all tasks are known."""
        return {job: dict(tasks) if self.is_sparse(job) else list(tasks.values()) for job, tasks in self._jobs.items()}

    def is_sparse(self, job_name: str) -> bool:
        """Whether not all tasks of a job are known: whether the indices have gaps.

        Raises:
            ValueError: If there is no such job.
        """
        tasks = self._tasks(job_name)
        return list(tasks) != list(range(len(tasks)))

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs, in the order given."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Count the tasks of a job that are known.

        Raises:
            ValueError: If there is no such job.
        """
        return len(self._tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """List the indices of a job's tasks.

        Raises:
            ValueError: If there is no such job.
        """
        return list(self._tasks(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Look up one task's address.

        Raises:
            ValueError: If there is no such job, or the job has no such task.
        """
        tasks = self._tasks(job_name)
        if task_index not in tasks:
            indices = f"are {list(tasks)}" if self.is_sparse(job_name) else f"are 0 to {len(tasks) - 1}"
            raise ValueError(f"ClusterSpec has no task {task_index} in job {job_name!r}; its indices {indices}")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """List a job's addresses in order of task index, `None` for a task that is not known.

        Raises:
            ValueError: If there is no such job.
        """
        tasks = self._tasks(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _tasks(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise ValueError(f"ClusterSpec has no job {job_name!r}; its jobs are {self.jobs}")
        return self._jobs[job_name]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            return self._jobs == other._jobs
        if isinstance(other, Mapping):
            return self._jobs == {job: _by_index(tasks) for job, tasks in other.items()}
        return NotImplemented

    # Equal to a dict, which has no hash either.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()})"


def _check_tasks(job: object, tasks: object) -> dict[int, str]:
    if not isinstance(job, str):
        raise TypeError(f"ClusterSpec got the job name {job!r}; it needs a string like 'worker'")
    by_index = _by_index(tasks)
    if not isinstance(by_index, dict):
        raise TypeError(
            f"ClusterSpec got {tasks!r} for job {job!r}; it needs a list of addresses like ['n1:8888'], or a dict of "
            "task indices to addresses like {0: 'n1:8888'}"
        )
    for index, address in by_index.items():
        if not isinstance(index, int) or index < 0:
            raise TypeError(f"ClusterSpec got the task index {index!r} in job {job!r}; it needs a number from 0")
        if not isinstance(address, str):
            raise TypeError(f"ClusterSpec got {address!r} in job {job!r}; it needs a string like 'n1:8888'")
    return dict(sorted(by_index.items()))


def _by_index(tasks: object) -> object:
    """Give tasks as a dict of indices, if `tasks` is a list or dict; JSON writes the indices as texts."""
    if isinstance(tasks, Mapping):
        return {int(key) if isinstance(key, str) and key.isdecimal() else key: tasks[key] for key in tasks}
    # A string is a sequence of strings too, and a sign of forgotten brackets.
    if isinstance(tasks, Sequence) and not isinstance(tasks, (str, bytes)):
        return dict(enumerate(tasks))
    return tasks


def number_ports(hosts: Sequence[str], port_base: int = PORT_BASE) -> list[str]:
    """Give each task an address of its own, in the order of tasks: the k-th on a host gets port `port_base + k`."""
    seen: Counter[str] = Counter()
    addresses = []
    for host in hosts:
        addresses.append(f"{host}:{port_base + seen[host]}")
        seen[host] += 1
    return addresses


def with_rpc_layer(address: str, rpc_layer: str | None) -> str:
    """Put the rpc layer before an address: `grpc://n1:8888`. No address or no layer: unchanged."""
    return f"{rpc_layer}://{address}" if address and rpc_layer else address
