"""A cluster as the environment variable TF_CONFIG describes it."""

from __future__ import annotations

import json
import os
from typing import Any, final

from mpidist.cluster_resolver.cluster_spec import ClusterSpec
from mpidist.cluster_resolver.resolver import ClusterResolver, OwnTask
from mpidist.transport.mpi.library import Intracomm, load_mpi

__all__ = ["TFConfigClusterResolver"]


@final
class TFConfigClusterResolver(ClusterResolver):
    """The cluster of TF_CONFIG, which is read at each question.

    Arguments override the variable; they are those of `ClusterResolver`. `environ`: where to read TF_CONFIG.
    """

    _remedy = "unset TF_CONFIG"

    @classmethod
    def of_job(cls, comm: Intracomm | None) -> TFConfigClusterResolver | None:
        """Make the resolver of a strategy that was given none, if TF_CONFIG is set, which describes a whole job. Local.

        There is none for a strategy over `comm`, some of the job's ranks.
        """
        if not os.environ.get("TF_CONFIG"):
            return None
        if comm is not None:
            mpi = load_mpi()  # which made `comm`
            if not isinstance(comm, mpi.Intracomm) or comm.Get_size() != mpi.COMM_WORLD.Get_size():
                return None
        return cls()

    def cluster_spec(self) -> ClusterSpec:
        """Give the cluster of TF_CONFIG; an empty one if it names none.

        Raises:
            TypeError: If a job is no list of addresses.
            ValueError: If TF_CONFIG is not a JSON object.
        """
        return ClusterSpec(self._config().get("cluster") or {})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Give the `session_master` of TF_CONFIG, else a task's address, by default that of this process.

        A cluster of no task or of one needs none: "".

        Raises:
            ValueError: If the cluster has no such task, or the task of this process is not known.
        """
        session_master = self._config().get("session_master")
        if session_master is not None:
            return str(session_master)
        spec = self.cluster_spec()
        if sum(spec.num_tasks(job) for job in spec.jobs) <= 1:
            return ""
        return self.address_of(task_type, task_id, rpc_layer)

    def find_own_task(self) -> OwnTask:
        """Read `task.type`, `task.index` and `rpc_layer` of TF_CONFIG.

        Raises:
            ValueError: If TF_CONFIG is not a JSON object or the index no integer.
        """
        config = self._config()
        task = config.get("task") or {}
        if not isinstance(task, dict):
            raise ValueError(f'TF_CONFIG has "task": {task!r}; it needs {{"type": "worker", "index": 0}}')
        task_type, index, rpc_layer = task.get("type"), task.get("index"), config.get("rpc_layer")
        # Both 1 and "1" are in use.
        if index is not None and not str(index).isdecimal():
            raise ValueError(f'TF_CONFIG has "index": {index!r} in "task"; it needs an integer from 0')
        return OwnTask(
            None if task_type is None else str(task_type),
            None if index is None else int(index),
            None if rpc_layer is None else str(rpc_layer),
        )

    def _config(self) -> dict[str, Any]:
        # {"cluster": {"worker": ["n1:2222", "n2:2222"]}, "task": {"type": "worker", "index": 1}}
        text = self._variables().get("TF_CONFIG") or "{}"
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"TF_CONFIG is not JSON: {error}; it holds {text!r}") from error
        if not isinstance(config, dict):
            raise ValueError(f'TF_CONFIG holds {text!r}; it needs {{"cluster": {{...}}, "task": {{...}}}}')
        return config
