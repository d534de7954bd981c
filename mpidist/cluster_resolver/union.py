"""A cluster that several resolvers describe together."""

from __future__ import annotations

from typing import final

from mpidist.cluster_resolver.cluster_spec import ClusterSpec
from mpidist.cluster_resolver.resolver import ClusterResolver, OwnTask, cluster_of

__all__ = ["UnionResolver"]


@final
class UnionResolver(ClusterResolver):
    """The jobs of several resolvers; the first one defines the task and the accelerators of this process.

    Where several resolvers have one job, its tasks follow each other and get new indices. Where one of these resolvers
    has only some tasks of the job, by their indices, all indices stay.

    Args:
        resolvers: The resolvers.
        rpc_layer: Prefix of addresses; default that of the first.
        task_type: Job of this process; default that of the first.
        task_id: Index of this process within its job; default that of the first.

    Raises:
        TypeError: If one is no resolver.
        ValueError: If there is none.
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        rpc_layer: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        if not resolvers:
            raise ValueError("UnionResolver needs at least one resolver, got none")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(f"UnionResolver takes cluster resolvers, got {type(resolver).__name__}")
        super().__init__(task_type, task_id, rpc_layer, resolvers[0].environment)
        self._resolvers = resolvers

    def cluster_spec(self) -> ClusterSpec:
        """Give the jobs of all resolvers.

        Raises:
            KeyError: If two of them have a task of one job and one index, where indices stay.
        """
        specs = [cluster_of(resolver) for resolver in self._resolvers]
        return ClusterSpec(
            {job: _tasks_of(job, specs) for job in dict.fromkeys(job for spec in specs for job in spec.jobs)}
        )

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Give the address of the requested task, or the `master` of the first resolver if none is.

        Raises:
            ValueError: If the cluster has no such task.
        """
        if task_type is not None and task_id is not None:
            return self.address_of(task_type, task_id, rpc_layer)
        return self._resolvers[0].master(rpc_layer=self.rpc_layer if rpc_layer is None else rpc_layer)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Count a task's accelerators as the first resolver does."""
        return self._resolvers[0].num_accelerators(task_type, task_id)

    def find_own_task(self) -> OwnTask:
        """Take the task of the first resolver."""
        first = self._resolvers[0]
        return OwnTask(first.task_type, first.task_id, first.rpc_layer)


def _tasks_of(job: str, specs: list[ClusterSpec]) -> dict[int, str]:
    parts = [spec for spec in specs if job in spec.jobs]
    keep = any(spec.is_sparse(job) for spec in parts)
    tasks: dict[int, str] = {}
    for spec in parts:
        for index in spec.task_indices(job):
            place = index if keep else len(tasks)
            if place in tasks:
                raise KeyError(f"Duplicate keys: two resolvers have a task {place} in job {job!r}")
            tasks[place] = spec.task_address(job, index)
    return tasks
