"""A cluster that the program itself describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from mpidist.cluster_resolver.cluster_spec import ClusterSpec, with_rpc_layer
from mpidist.cluster_resolver.resolver import ClusterResolver, OwnTask

__all__ = ["SimpleClusterResolver"]


@final
class SimpleClusterResolver(ClusterResolver):
    """A cluster as given; nothing is detected.

    Args:
        cluster_spec: The cluster.
        master: The result of `master()` without a task.
        task_type: Job of this process.
        task_id: Index of this process within its job.
        environment: Free text on where the cluster runs.
        num_accelerators: Accelerators of each task by kind, such as `{"GPU": 2}`.
        rpc_layer: Prefix of addresses.

    Raises:
        TypeError: If `cluster_spec` is no ClusterSpec or `master` no string.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(
                f"SimpleClusterResolver got cluster_spec={cluster_spec!r}; it needs a ClusterSpec: "
                f"write `ClusterSpec({{'worker': [...]}})`"
            )
        if not isinstance(master, str):
            raise TypeError(f"SimpleClusterResolver got master={master!r}; it needs a string like 'n1:8888'")
        super().__init__(task_type, task_id, rpc_layer, environment)
        self._cluster_spec = cluster_spec
        self._master = master
        self._num_accelerators = dict(num_accelerators or {})

    def cluster_spec(self) -> ClusterSpec:
        """Give the cluster as it was given."""
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Give the address of the requested task, or the `master` given if none is.

        Raises:
            ValueError: If the cluster has no such task.
        """
        if task_type is not None and task_id is not None:
            return self.address_of(task_type, task_id, rpc_layer)
        return with_rpc_layer(self._master, self.rpc_layer if rpc_layer is None else rpc_layer)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Give the counts as given, the same for every task; nothing is detected."""
        return dict(self._num_accelerators)

    def find_own_task(self) -> OwnTask:
        """Find nothing: only the program defines the task."""
        return OwnTask()
