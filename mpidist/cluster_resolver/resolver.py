"""Base class of all cluster resolvers."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple, final

from mpidist.cluster_resolver.cluster_spec import ClusterSpec, with_rpc_layer
from mpidist.cluster_resolver.gpus import visible_gpus
from mpidist.errors import TopologyError
from mpidist.transport.text import value_text
from mpidist.whole_number import whole_number

__all__ = ["JOBS", "ClusterResolver", "OwnTask", "cluster_of", "require_task"]

JOBS: Final = ("chief", "worker", "ps", "evaluator")
_IN_STEP: Final = ("chief", "worker")  # jobs of synchronous training, in the order of ranks


class OwnTask(NamedTuple):
    """Task of the calling process in a resolver's source; None where the source has none."""

    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None


class ClusterResolver(ABC):
    """The tasks of a job, and which of them this process is.

    A subclass gives the cluster's jobs and, in `find_own_task`, the task of this process. Arguments, and values that
    are set later on `task_type`, `task_id` and `rpc_layer`, override what the subclass finds.

    Args:
        task_type: Job of this process, such as "worker".
        task_id: Index of this process within its job.
        rpc_layer: Prefix of addresses, such as "grpc".
        environment: Free text on where the cluster runs.
        environ: The environment to read; default `os.environ`.
    """

    _remedy: ClassVar[str] = "leave the resolver out"  # what to do if the resolver contradicts MPI

    # Here too, so that a subclass without an `__init__` of its own chain works.
    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _environment: str = ""
    _environ: Any = None  # a mapping; `None` for `os.environ`

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.task_type, self.task_id, self.rpc_layer = task_type, task_id, rpc_layer
        self._environment, self._environ = environment or "", environ

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Give the cluster's jobs and addresses; an empty spec where nothing is known."""

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Give the address of the task to connect to, `rpc_layer` before it; "" where none is needed.

        By default the address of the task that is named, or of this process. Collective where `cluster_spec` is.

        Raises:
            ValueError: If the cluster has no such task, or the task of this process is not known.
        """
        return self.address_of(task_type, task_id, rpc_layer)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Count a task's accelerators by kind: `{"GPU": 2}`.

        By default the GPUs that this process's environment shows, as every task is taken to be alike: those of
        CUDA_VISIBLE_DEVICES, else of SLURM_GPUS_ON_NODE, else 0.
        """
        return {"GPU": len(visible_gpus(self._variables()))}

    @abstractmethod
    def find_own_task(self) -> OwnTask:
        """Read from the resolver's source which task this process is."""

    def _own_task(self) -> OwnTask:
        """Find the task of this process, and check what the subclass has found."""
        task: Any = self.find_own_task()
        call = f"{type(self).__name__}.find_own_task()"
        if not isinstance(task, OwnTask):
            raise TypeError(f"{call} must return an OwnTask, got {value_text(task)}")
        if task.task_id is not None:
            whole_number(f"task_id of {call}", task.task_id, otherwise="None")
        return task

    def _variables(self) -> MutableMapping[str, str]:
        return os.environ if self._environ is None else self._environ

    @final
    @property
    def environment(self) -> str:
        """Environment in which the cluster runs, as free text."""
        return self._environment

    @property
    def task_type(self) -> str | None:
        """Job of this process; None where it is not known."""
        return self._task_type if self._task_type is not None else self._own_task().task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = None if task_type is None else str(task_type)

    @property
    def task_id(self) -> int | None:
        """Index of this process within its job; None where it is not known."""
        return self._task_id if self._task_id is not None else self._own_task().task_id

    @task_id.setter
    def task_id(self, task_id: int | str | None) -> None:
        self._task_id = None if task_id is None else int(task_id)

    @property
    def rpc_layer(self) -> str | None:
        """Prefix of addresses; None for bare addresses."""
        return self._rpc_layer if self._rpc_layer is not None else self._own_task().rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def num_tasks(self) -> int | None:
        """Number of tasks in synchronous training, chief and workers; None where the cluster does not define all."""
        spec = cluster_of(self)
        jobs = [job for job in _IN_STEP if job in spec.jobs]
        return None if any(map(spec.is_sparse, jobs)) else sum(map(spec.num_tasks, jobs)) or None

    @property
    def assumed_hosts(self) -> Sequence[str] | None:
        """Host of each task of chief and workers, where the resolver has assumed the hosts; None otherwise."""
        return None

    @property
    def rank(self) -> int | None:
        """Index of this process among chief and workers, the chief first; None where it is neither.

        Raises:
            ValueError: If this process's task is not in the cluster, or a job is of no known kind.
        """
        task_type, task_id = self.task_type, self.task_id
        if task_type not in _IN_STEP or task_id is None or self.num_tasks is None:
            return None
        spec = cluster_of(self)
        require_task(spec, task_type, task_id)
        return task_id + (spec.num_tasks("chief") if task_type == "worker" and "chief" in spec.jobs else 0)

    @final
    def address_of(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Give a task's address, by default that of this process, with its rpc layer as prefix.

        Raises:
            ValueError: If the cluster has no such task, or the task of this process is not known.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            raise ValueError(
                f"{type(self).__name__} has no task for this process (type {task_type!r}, "
                f"id {task_id!r}); pass task_type and task_id"
            )
        address = cluster_of(self).task_address(task_type, task_id)
        return with_rpc_layer(address, self.rpc_layer if rpc_layer is None else rpc_layer)

    @final
    def check(self, size: int, rank: int, hostnames: Sequence[str] | None = None) -> None:
        """Compare the resolver's tasks with MPI's ranks, once, before any training.

        Where the resolver defines nothing, nothing is compared. A wrong size is an error on every rank, a wrong order
        perhaps on some only: ranks that call this together should agree on the outcome.

        Args:
            size: Ranks in the communicator of chief and workers.
            rank: This process's rank in it.
            hostnames: The host of each rank, to compare `assumed_hosts` with, too. Names may differ; which ranks share
                a host may not.

        Raises:
            TopologyError: If they differ.
            ValueError: If this process's task is not in the cluster, or a job is of no known kind.
        """
        who, task_type, task_id = type(self).__name__, self.task_type, self.task_id
        if self.num_tasks is not None and self.num_tasks != size:
            raise TopologyError(
                f"{who} has {self.num_tasks} tasks (chief and workers), but MPI has {size} rank(s); start "
                f"with `mpiexec -n {self.num_tasks}` of the MPI that mpi4py was built with, or under Slurm "
                f"with `srun --mpi=pmi2 -n {self.num_tasks}` (MPICH, Intel MPI) or "
                f"`srun --mpi=pmix -n {self.num_tasks}` (Open MPI), or {self._remedy}: MPI is enough"
            )
        if task_type is not None and task_id is not None and self.num_tasks is not None:
            require_task(cluster_of(self), task_type, task_id)  # `rank` is None for a task of an unknown kind
        if self.rank is not None and self.rank != rank:
            raise TopologyError(
                f"by {who} this process is {self.task_type} {self.task_id}, index {self.rank} of chief and "
                f"workers, but in MPI it is rank {rank} of {size}; start the ranks in the order of the cluster's "
                f"tasks (one `srun` or one `mpiexec -n {size}`), or {self._remedy}: MPI is enough"
            )
        assumed = self.assumed_hosts
        if hostnames is not None and assumed is not None:
            pairs = set(zip(assumed, hostnames, strict=True))
            if not len(pairs) == len(set(assumed)) == len(set(hostnames)):
                raise TopologyError(
                    f"{who} assumed the tasks to be on {list(assumed)}, as the environment does not give their "
                    f"distribution, but MPI has the ranks on {list(hostnames)}; set it (`srun -m block`), or "
                    f"{self._remedy}: MPI is enough"
                )


def cluster_of(resolver: ClusterResolver) -> ClusterSpec:
    """Return the cluster that a resolver gives, which must be of the right kind."""
    spec: Any = resolver.cluster_spec()
    if not isinstance(spec, ClusterSpec):
        name = type(resolver).__name__
        raise TypeError(f"{name}.cluster_spec() must return a ClusterSpec, got {value_text(spec)}")
    return spec


def require_task(cluster: ClusterSpec, task_type: str, task_id: int) -> None:
    """Refuse a cluster of jobs that cannot train together, and a task that is not in it."""
    known = f"known are {', '.join(JOBS)}"
    for job in cluster.jobs:
        number = cluster.num_tasks(job)
        if job not in JOBS:
            raise ValueError(f"Disallowed task type found in the cluster: job {job!r}; {known}")
        if job in ("chief", "evaluator") and number > 1:
            raise ValueError(f"there must be at most one {job} in the cluster, got {number} tasks in job {job!r}")
    if task_type not in JOBS:
        raise ValueError(f"Unrecognized task_type {task_type!r}; {known}")
    if task_type == "evaluator":  # which may stand outside of the cluster
        return
    if task_type not in cluster.jobs:
        raise ValueError(f"task_type {task_type!r} is not in the cluster, whose jobs are {cluster.jobs}")
    ids = cluster.task_indices(task_type)
    if task_id not in ids:
        largest = max(ids, default=-1)
        problem = f"exceeds the maximum id {largest}" if task_id > largest else "is negative or unknown"
        raise ValueError(f"the cluster has no such task: task_id {task_id} {problem}; {len(ids)} are known")
