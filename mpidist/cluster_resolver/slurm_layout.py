"""On which node each task of a Slurm step runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from mpidist.cluster_resolver.host_list import expand_host_list
from mpidist.errors import TopologyError

__all__ = ["component_sizes", "place_tasks"]

# srun -m arbitrary takes the order from a file that the environment does not show.
ADVICE = "start the step with `srun -m block`, or leave the resolver out: MPI alone is enough"


def place_tasks(
    hosts: Sequence[str], num_tasks_by_host: Sequence[int], environ: Mapping[str, str]
) -> tuple[list[int], bool]:
    """Find the node of each task, and compare the layout with what Slurm tells this task about its own place.

    Block fills one node after another, cyclic gives each node one task in turn, plane some at a time; a full
    node is passed over. Where the environment names no layout, it is Slurm's default, block, unless this task's
    own place contradicts block and fits cyclic.

    Args:
        hosts: The step's nodes, in Slurm's order. [m]
        num_tasks_by_host: Tasks on each of them. [m]
        environ: SLURM_PROCID and, where set, SLURM_DISTRIBUTION, SLURM_DIST_PLANESIZE, SLURM_NODEID,
            SLURM_LOCALID, SLURM_GTIDS and SLURMD_NODENAME of this task.

    Returns:
        An index into `hosts` for each task [number of tasks], and whether the layout is an assumption: whether the
        variables of this task would fit another layout, too.

    Source: srun(1), option --distribution.

    Raises:
        TopologyError: If the environment names a layout of another kind, or contradicts all of them.
        ValueError: If the size of a plane is no number.
    """
    layouts = [_deal(num_tasks_by_host, num_together) for num_together in _tasks_per_turn(hosts, environ)]
    contradictions = [_contradiction(layout, hosts, environ) for layout in layouts]
    fitting = [layout for layout, wrong in zip(layouts, contradictions, strict=True) if wrong is None]
    if fitting:  # one task a node is the same whether dealt as block or cyclic
        return fitting[0], any(layout != fitting[0] for layout in fitting)
    said = f"SLURM_DISTRIBUTION={environ.get('SLURM_DISTRIBUTION')!r}"
    raise TopologyError(
        f"SlurmClusterResolver got variables that contradict each other in task {environ['SLURM_PROCID']}: "
        f"with {said} on {list(hosts)}, {' or '.join(dict.fromkeys(filter(None, contradictions)))}; {ADVICE}"
    )


def component_sizes(num_tasks_by_host: Mapping[str, int], environ: Mapping[str, str]) -> list[int]:
    """Count the tasks of each component of a heterogeneous job. Its components are on nodes of their own.

    Args:
        num_tasks_by_host: Tasks of the step on each node.
        environ: SLURM_HET_SIZE and the SLURM_JOB_NODELIST_HET_GROUP_k.

    Raises:
        TopologyError: If the job is of one component, or the step is not over all of them.
    """
    count = environ.get("SLURM_HET_SIZE", "")
    if not count.isdecimal():
        raise TopologyError(
            "SlurmClusterResolver got component_jobs, and no SLURM_HET_SIZE is in the environment: this job is not "
            "heterogeneous; give jobs={'ps': 1, 'worker': 3} instead, or start the step with `srun --het-group=0,1`"
        )
    names = [f"SLURM_JOB_NODELIST_HET_GROUP_{component}" for component in range(int(count))]
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
        f"SlurmClusterResolver cannot tell which task is on which of {len(hosts)} nodes: it got "
        f"SLURM_DISTRIBUTION={environ['SLURM_DISTRIBUTION']!r} and knows block, cyclic and plane; {ADVICE}"
    )


def _deal(num_tasks_by_host: Sequence[int], num_together: int) -> list[int]:
    """Deal tasks to nodes by turns of `num_together`, up to each one's number: [3, 1] by 1 is 0, 1, 0, 0."""
    left = list(num_tasks_by_host)
    layout: list[int] = []
    while any(left):
        for node, num_left in enumerate(left):
            taken = min(num_left, num_together)
            layout += [node] * taken
            left[node] -= taken
    return layout


def _contradiction(layout: Sequence[int], hosts: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Name the first variable of this task that does not fit the layout."""
    rank = int(environ["SLURM_PROCID"])
    node = layout[rank]
    on_node = [task for task, its_node in enumerate(layout) if its_node == node]
    expected = {
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(on_node.index(rank)),
        # The tasks of this node: "0,2"
        "SLURM_GTIDS": ",".join(str(task) for task in on_node),
        "SLURMD_NODENAME": hosts[node],
    }
    for name, value in expected.items():
        if environ.get(name, value) != value:
            return f"{name} would be {value!r} and is {environ[name]!r}"
    return None
