"""GPUs that the environment gives this process, without a query of a driver."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

from mpidist.errors import TopologyError

__all__ = ["gpus_of_task", "visible_gpus"]


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """List the GPUs that this process sees, by the names that CUDA_VISIBLE_DEVICES uses. Asks no driver.

    Without CUDA_VISIBLE_DEVICES, GPUs are numbered from 0 up to SLURM_GPUS_ON_NODE; without both there are none.
    """
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return [*map(str, range(_num_gpus_on_node(environ)))]
    # "0,1", "GPU-8932f937,MIG-4d806f22", "" and, on Slurm nodes without GPUs, "NoDevFiles"
    names = [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",")]
    # CUDA ignores all names from the first invalid one on: "0,-1,1" is one GPU.
    return list(takewhile(lambda name: name.isdecimal() or name.startswith(("GPU-", "MIG-")), names))


def gpus_of_task(
    environ: Mapping[str, str],
    local_rank: int,
    num_sharing: int,
    gpus_per_node: int | None = None,
    gpus_per_task: int | None = None,
) -> list[str]:
    """Choose the part of its node's GPUs that one Slurm task uses; refuse more than are visible.

    `num_sharing` tasks share a node's GPUs, on uneven nodes the largest number. By default they share those visible in
    equal parts, rounded down.
    """
    visible = visible_gpus(environ)
    if gpus_per_node == 0:
        visible = []
    elif "CUDA_VISIBLE_DEVICES" in environ and 0 < len(visible) < _num_gpus_on_node(environ):
        # Slurm bound devices to each task (--gpus-per-task, --gpu-bind): those visible are all its own.
        local_rank, num_sharing = 0, 1
    elif gpus_per_node is not None:
        known = "CUDA_VISIBLE_DEVICES" in environ or bool(visible)
        visible = visible[:gpus_per_node] if known else [*map(str, range(gpus_per_node))]
        if len(visible) < gpus_per_node:
            raise _too_few(f"gpus_per_node={gpus_per_node}", visible)
    if gpus_per_task is None:
        gpus_per_task = len(visible) // num_sharing
    if gpus_per_task * num_sharing > len(visible):
        raise _too_few(f"gpus_per_task={gpus_per_task} for {num_sharing} task(s) on a node", visible)
    return visible[local_rank * gpus_per_task : (local_rank + 1) * gpus_per_task]


def _num_gpus_on_node(environ: Mapping[str, str]) -> int:
    text = environ.get("SLURM_GPUS_ON_NODE") or "0"
    if not text.isdecimal():
        raise ValueError(f"SLURM_GPUS_ON_NODE={text!r} is no number of GPUs")
    return int(text)


def _too_few(needed: str, visible: list[str]) -> TopologyError:
    return TopologyError(
        f"Requested more GPUs than there are: SlurmClusterResolver needs {needed}, but {len(visible)} are "
        f"visible ({','.join(visible)}); ask Slurm for more with --gpus-per-node, or correct the argument"
    )
