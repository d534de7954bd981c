"""A cluster as the variables of a Slurm step describe it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping, Sequence
from functools import cached_property
from typing import Final, NamedTuple, final

from mpidist.cluster_resolver.cluster_spec import PORT_BASE, ClusterSpec, number_ports
from mpidist.cluster_resolver.gpus import gpus_of_task
from mpidist.cluster_resolver.host_list import expand_host_list, expand_tasks_per_node
from mpidist.cluster_resolver.resolver import ClusterResolver, OwnTask
from mpidist.errors import TopologyError

__all__ = ["SlurmClusterResolver"]

_GROUP: Final = "SLURM_JOB_NODELIST_HET_GROUP_"  # and the number of a component
# srun -m arbitrary takes the order from a file that the environment does not show.
_ADVICE: Final = "start the step with `srun -m block`, or leave the resolver out: MPI alone is enough"


class _Step(NamedTuple):
    """The step of this process, as the environment describes the step."""

    cluster_spec: ClusterSpec
    task_type: str
    task_id: int
    gpus: list[str]
    is_assumed: bool  # whether nothing says on which node each task is


@final
class SlurmClusterResolver(ClusterResolver):
    """The tasks of the Slurm step that this process is in; task r of `srun` is rank r.

    The resolver reads the environment once, at the first use. The order of ranks is that of
    Slurm for the distributions block, cyclic and plane, on nodes with equal or unequal numbers of tasks. Where the
    environment does not name the distribution, the resolver assumes block, Slurm's default, unless this task's own
    place contradicts block; a strategy then compares the assumption with MPI. Variables that contradict each other, and
    other distributions, are errors. GPUs are counted from CUDA_VISIBLE_DEVICES (an empty one means none), else from
    SLURM_GPUS_ON_NODE, else there are none. nvidia-smi is never run.

    Args:
        jobs: Number of tasks by job. Jobs get consecutive ranks in alphabetical order ("ps" before "worker").
            Default: all tasks are workers.
        component_jobs: Instead of `jobs`, in a step over all components of a heterogeneous job
            (`srun --het-group=0,1`): the job of each component, in their order: `["worker", "ps"]`.
        port_base: Port of the first task on each host; the k-th gets `port_base + k`.
        gpus_per_node: GPUs to use on each node, 0 for none. Default: those visible.
        gpus_per_task: GPUs of each task. Default: the devices that Slurm bound to the task, else an equal
            part of those visible, rounded down for the node with most tasks.
        tasks_per_node: Tasks on each node, of which the last may have fewer, or a dict of host names to
            numbers of tasks. Default: SLURM_STEP_TASKS_PER_NODE.
        auto_set_gpu: Whether the first question sets CUDA_VISIBLE_DEVICES to this task's part of the GPUs, which
            must be before CUDA starts. An empty part leaves the variable alone.
        rpc_layer: Prefix of addresses.
        environ: The environment to read, and for `auto_set_gpu` to write; default `os.environ`.

    Raises:
        ValueError: If a number is negative, or `jobs` and `component_jobs` are given.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = PORT_BASE,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
        *,
        component_jobs: Sequence[str] | None = None,
        environ: MutableMapping[str, str] | None = None,
    ) -> None:
        super().__init__(rpc_layer=rpc_layer, environ=environ)
        numbers = {"gpus_per_node": gpus_per_node, "gpus_per_task": gpus_per_task, **(jobs or {})}
        for name, number in numbers.items():
            if number is not None and number < 0:
                raise ValueError(f"SlurmClusterResolver got {name}={number}; it needs 0 or more")
        if jobs is not None and component_jobs is not None:
            raise ValueError("SlurmClusterResolver got jobs and component_jobs; leave one of the two out")
        self._component_jobs = None if component_jobs is None else list(component_jobs)
        self._jobs = None if jobs is None else dict(jobs)
        self._port_base = port_base
        self._gpus_per_node = gpus_per_node
        self._gpus_per_task = gpus_per_task
        self._tasks_per_node = tasks_per_node
        self._auto_set_gpu = auto_set_gpu

    def cluster_spec(self) -> ClusterSpec:
        """Give jobs and addresses of the step's tasks.

        Raises:
            TopologyError: If this is no Slurm step, or its variables contradict each other or the arguments.
            ValueError: If a variable is malformed.
        """
        return self._step.cluster_spec

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Give the type and index of this process's task.

        Raises:
            TopologyError, ValueError: As `cluster_spec`.
        """
        return self.task_type, self.task_id

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Count the GPUs of a task, the same for every task: `{"GPU": 0}` without any.

        Raises:
            TopologyError: As `cluster_spec`, or if more GPUs are needed than are visible.
            ValueError: As `cluster_spec`.
        """
        return {"GPU": len(self._step.gpus)}

    def find_own_task(self) -> OwnTask:
        """Find the job that SLURM_PROCID falls into.

        Raises:
            TopologyError, ValueError: As `cluster_spec`.
        """
        return OwnTask(self._step.task_type, self._step.task_id)

    @property
    def assumed_hosts(self) -> list[str] | None:
        """Host of each task of chief and workers, where the environment does not give their distribution."""
        if not self._step.is_assumed:
            return None
        spec = self._step.cluster_spec
        addresses = [spec.job_tasks(job) for job in ("chief", "worker") if job in spec.jobs]
        return [str(address).rpartition(":")[0] for job in addresses for address in job]

    @cached_property
    def _step(self) -> _Step:
        environ = self._variables()
        num_tasks, rank = _number(environ, "SLURM_STEP_NUM_TASKS"), _number(environ, "SLURM_PROCID")
        if rank >= num_tasks:
            raise TopologyError(
                f"SlurmClusterResolver got SLURM_PROCID={rank} in a step of {num_tasks} tasks; it needs a "
                f"smaller one. For steps of several parts (`srun ... : ...`) use MPIClusterResolver"
            )
        hosts = expand_host_list(_variable(environ, "SLURM_STEP_NODELIST"))
        num_tasks_by_host = self._count_tasks(hosts, num_tasks, environ)
        numbers = dict(zip(hosts, num_tasks_by_host, strict=True))
        components = _hosts_by_component(hosts, environ)
        layout, is_assumed = _place_tasks(components, numbers, environ)
        addresses = number_ports(layout, self._port_base)
        if self._component_jobs is None:
            jobs = sorted((self._jobs or {"worker": num_tasks}).items())
        else:
            sizes = _component_sizes(numbers, environ)
            if len(self._component_jobs) != len(sizes):
                raise TopologyError(
                    f"SlurmClusterResolver got component_jobs={self._component_jobs}, and the job has {len(sizes)} "
                    "components; name each of them, in their order"
                )
            jobs = list(zip(self._component_jobs, sizes, strict=True))
        cluster, (task_type, task_id) = _deal_jobs(jobs, addresses, rank)
        local_rank = layout[:rank].count(layout[rank])
        gpus = gpus_of_task(environ, local_rank, max(num_tasks_by_host), self._gpus_per_node, self._gpus_per_task)
        if self._auto_set_gpu and gpus:
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return _Step(ClusterSpec(cluster), task_type, task_id, gpus, is_assumed)

    def _count_tasks(self, hosts: list[str], num_tasks: int, environ: Mapping[str, str]) -> list[int]:
        """Count the tasks on each of `hosts`, from the argument or from Slurm."""
        given = self._tasks_per_node
        if given is None:
            text = _variable(environ, "SLURM_STEP_TASKS_PER_NODE")
            counts, source = expand_tasks_per_node(text), f"SLURM_STEP_TASKS_PER_NODE={text!r}"
        elif isinstance(given, int):
            # The last node may have fewer: 5 tasks, 2 a node, 3 nodes.
            counts = [max(0, min(given, num_tasks - given * node)) for node in range(len(hosts))]
            source = f"tasks_per_node={given}"
        else:
            counts, source = [given.get(host, 0) for host in hosts], f"tasks_per_node={dict(given)}"
        if len(counts) != len(hosts) or sum(counts) != num_tasks or 0 in counts:
            raise TopologyError(
                f"SlurmClusterResolver got {source}, which makes {counts}, for {num_tasks} tasks on {hosts}; "
                f"it needs at least one task on each node, {num_tasks} together"
            )
        return counts


def _deal_jobs(
    jobs: Sequence[tuple[str, int]], addresses: list[str], rank: int
) -> tuple[dict[str, list[str]], tuple[str, int]]:
    """Deal consecutive ranks to jobs in this order; also give job and index of `rank`."""
    total = sum(number for _, number in jobs)
    if total != len(addresses):
        raise TopologyError(
            f"SlurmClusterResolver: Requested {total} tasks with jobs={dict(jobs)}, but the "
            f"step has {len(addresses)}; start with `srun -n {total}`, or correct jobs"
        )
    cluster: dict[str, list[str]] = {job: [] for job, _ in jobs}
    owners = [job for job, number in jobs for _ in range(number)]
    for job, address in zip(owners, addresses, strict=True):
        cluster[job].append(address)
    return cluster, (owners[rank], owners[:rank].count(owners[rank]))


def _variable(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        raise TopologyError(
            f"SlurmClusterResolver: {name} not found in environment, so this process is in no Slurm step; "
            f"start it with `srun`, or leave the resolver out: MPI alone is enough"
        )
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = _variable(environ, name)
    if not text.isdecimal():
        raise ValueError(f"SlurmClusterResolver got {name}={text!r}; it needs a number")
    return int(text)


def _hosts_by_component(hosts: list[str], environ: Mapping[str, str]) -> list[list[str]]:
    """Return the hosts of each component of a heterogeneous job, in their order, which is that of ranks; else all."""
    names = sorted((name for name in environ if name.startswith(_GROUP)), key=lambda name: int(name[len(_GROUP) :]))
    components = [[host for host in expand_host_list(environ[name]) if host in hosts] for name in names]
    return components if sorted(host for some in components for host in some) == sorted(hosts) else [hosts]


def _place_tasks(
    components: Sequence[Sequence[str]], num_tasks_by_host: Mapping[str, int], environ: Mapping[str, str]
) -> tuple[list[str], bool]:
    """Find the host of each task, and whether that is an assumption: whether another layout would fit this task, too.

    Block fills one node after another, cyclic gives each node one task in turn, plane some at a time; a full node is
    passed over: srun(1), option --distribution. Each component is dealt out by itself. Where the environment names no
    layout, it is Slurm's default, block, unless this task's own place contradicts block and fits cyclic. Variables that
    contradict all layouts are a `TopologyError`.
    """
    hosts = [host for component in components for host in component]
    numbers = [{host: num_tasks_by_host[host] for host in component} for component in components]
    layouts = [
        [host for component in numbers for host in _layout_by_turns(component, num_together)]
        for num_together in _tasks_per_turn(hosts, environ)
    ]
    contradictions = [_contradiction(layout, hosts, environ) for layout in layouts]
    fitting = [layout for layout, wrong in zip(layouts, contradictions, strict=True) if wrong is None]
    if fitting:  # one task a node is the same whether dealt as block or cyclic
        return fitting[0], any(layout != fitting[0] for layout in fitting)
    said = f"SLURM_DISTRIBUTION={environ.get('SLURM_DISTRIBUTION')!r}"
    raise TopologyError(
        f"SlurmClusterResolver got variables that contradict each other in task {environ['SLURM_PROCID']}: "
        f"with {said} on {hosts}, {' or '.join(dict.fromkeys(filter(None, contradictions)))}; {_ADVICE}"
    )


def _component_sizes(num_tasks_by_host: Mapping[str, int], environ: Mapping[str, str]) -> list[int]:
    """Count the tasks of each component of a heterogeneous job, which are on nodes of their own.

    A job of one component, and a step that is not over all of them, are a `TopologyError`.
    """
    count = environ.get("SLURM_HET_SIZE", "")
    if not count.isdecimal():
        raise TopologyError(
            "SlurmClusterResolver got component_jobs, and no SLURM_HET_SIZE is in the environment: this job is not "
            "heterogeneous; give jobs={'ps': 1, 'worker': 3} instead, or start the step with `srun --het-group=0,1`"
        )
    names = [f"{_GROUP}{component}" for component in range(int(count))]
    nodes = [expand_host_list(environ.get(name, "")) for name in names]
    sizes = [sum(num_tasks_by_host.get(host, 0) for host in of_component) for of_component in nodes]
    everyone = [host for of_component in nodes for host in of_component]
    if 0 in sizes or len(set(everyone)) < len(everyone) or sum(sizes) != sum(num_tasks_by_host.values()):
        raise TopologyError(
            f"SlurmClusterResolver got components on {nodes} and tasks on {dict(num_tasks_by_host)}; it needs a step "
            f"over all {count} components, on nodes of their own: `srun --het-group=0,1`"
        )
    return sizes


def _tasks_per_turn(hosts: Sequence[str], environ: Mapping[str, str]) -> list[int]:
    """List how many tasks a node gets before the next node's turn; two candidates if Slurm names no layout."""
    # block, cyclic:block, "block:cyclic:fcyclic,NoPack", plane=2; only the first word is about nodes.
    word, _, plane_size = environ.get("SLURM_DISTRIBUTION", "").split(",")[0].split(":")[0].partition("=")
    if word == "block" or len(hosts) == 1:
        return [sys.maxsize]
    if word == "cyclic":
        return [1]
    if word == "plane":
        plane_size = plane_size or environ.get("SLURM_DIST_PLANESIZE", "")
        if not plane_size.isdecimal() or int(plane_size) == 0:
            raise ValueError(
                f"SlurmClusterResolver got SLURM_DISTRIBUTION={word!r} with "
                f"SLURM_DIST_PLANESIZE={plane_size!r}; it needs a number of tasks"
            )
        return [int(plane_size)]
    if word in ("", "*", "unknown"):
        return [sys.maxsize, 1]
    raise TopologyError(
        f"SlurmClusterResolver cannot map the tasks to {len(hosts)} nodes: it got "
        f"SLURM_DISTRIBUTION={environ['SLURM_DISTRIBUTION']!r} and supports block, cyclic and plane; {_ADVICE}"
    )


def _layout_by_turns(num_tasks_by_host: Mapping[str, int], num_together: int) -> list[str]:
    """Deal tasks to hosts by turns of `num_together`, up to each one's number: {a: 3, b: 1} by 1 is a, b, a, a."""
    hosts = enumerate(num_tasks_by_host.items())
    turns = [(task // num_together, place, host) for place, (host, number) in hosts for task in range(number)]
    return [host for _, _, host in sorted(turns)]


def _contradiction(layout: Sequence[str], hosts: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Name the first variable of this task that does not fit the layout."""
    rank = int(environ["SLURM_PROCID"])
    host = layout[rank]
    on_node = [task for task, its_host in enumerate(layout) if its_host == host]
    expected = {
        "SLURM_NODEID": str(hosts.index(host)),
        "SLURM_LOCALID": str(on_node.index(rank)),
        # The tasks of this node: "0,2"
        "SLURM_GTIDS": ",".join(str(task) for task in on_node),
        "SLURMD_NODENAME": host,
    }
    for name, value in expected.items():
        if environ.get(name, value) != value:
            return f"{name} would be {value!r} and is {environ[name]!r}"
    return None
