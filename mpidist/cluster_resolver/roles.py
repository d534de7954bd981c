"""What a task's type and index mean for training: which tasks are counted, and in which order."""

from __future__ import annotations

from mpidist.cluster_resolver.cluster_spec import ClusterSpec

__all__ = ["id_in_cluster", "num_synchronous_tasks", "validate_roles"]

ROLES = ("chief", "worker", "evaluator", "ps")


def validate_roles(cluster_spec: ClusterSpec, task_type: str | None, task_id: int | None) -> None:
    """Refuse a cluster whose jobs cannot train together, or a task that is not part of it.

    An evaluator may stand outside the cluster.

    Raises:
        ValueError: If a job or `task_type` is not chief, worker, evaluator or ps; if there are several chiefs
            or evaluators; if the cluster lacks the task.
    """
    unknown = [job for job in cluster_spec.jobs if job not in ROLES]
    if unknown:
        raise ValueError(f"the cluster has a job {unknown[0]!r}; known are {', '.join(ROLES)}")
    for job in ("chief", "evaluator"):
        if _num_tasks(cluster_spec, job) > 1:
            raise ValueError(
                f"the cluster has {_num_tasks(cluster_spec, job)} tasks in job {job!r}; it needs one or none"
            )
    if task_type is None:
        return
    if task_type not in ROLES:
        raise ValueError(f"Unrecognized task_type {task_type!r}; known are {', '.join(ROLES)}")
    if task_type not in cluster_spec.jobs:
        if task_type == "evaluator":
            return
        raise ValueError(f"task_type {task_type!r} is not in the cluster, whose jobs are {cluster_spec.jobs}")
    indices = cluster_spec.task_indices(task_type)
    largest = max(indices, default=-1)
    if task_id is not None and task_id > largest:
        raise ValueError(f"task_id {task_id} exceeds the maximum id {largest} of job {task_type!r}")
    if task_id is not None and task_id < 0:
        raise ValueError(f"task_id {task_id} of job {task_type!r} is negative; ids are 0 to {largest}")
    if task_id is not None and task_id not in indices:
        raise ValueError(f"task_id {task_id} is not in job {task_type!r}, whose ids are {indices}")


def id_in_cluster(cluster_spec: ClusterSpec, task_type: str, task_id: int) -> int:
    """Number the task among those it trains with: the chief first, then the workers; evaluators apart.

    Raises:
        ValueError: As `validate_roles`, and for a parameter server, which has no such number.
    """
    validate_roles(cluster_spec, task_type, task_id)
    if task_type == "worker":
        return _num_tasks(cluster_spec, "chief") + task_id
    if task_type in ("chief", "evaluator"):
        return task_id
    raise ValueError(f"id_in_cluster got task_type {task_type!r}; it needs chief, worker or evaluator")


def num_synchronous_tasks(cluster_spec: ClusterSpec) -> int:
    """Count chief and workers; other jobs may have any name."""
    return _num_tasks(cluster_spec, "chief") + _num_tasks(cluster_spec, "worker")


def _num_tasks(cluster_spec: ClusterSpec, job: str) -> int:
    return cluster_spec.num_tasks(job) if job in cluster_spec.jobs else 0
