"""Which GPUs the environment gives this process, without asking a driver."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

from mpidist.errors import TopologyError

__all__ = ["gpus_of_task", "visible_gpus"]


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """List the GPUs that this process sees, by the names that CUDA_VISIBLE_DEVICES uses.

    Without CUDA_VISIBLE_DEVICES, GPUs are numbered from 0 up to SLURM_GPUS_ON_NODE; without both variables there are
    none. Neither nvidia-smi nor CUDA is called.

    Raises:
        ValueError: If SLURM_GPUS_ON_NODE is needed and is no number.
    """
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return _numbered(_num_gpus_on_node(environ))
    # "0,1", "GPU-8932f937,MIG-4d806f22", "" and, on Slurm nodes without GPUs, "NoDevFiles"
    names = [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",")]
    # CUDA ignores all names from the first invalid one on: "0,-1,1" is one GPU.
    return list(takewhile(_is_gpu_name, names))


def gpus_of_task(
    environ: Mapping[str, str],
    local_rank: int,
    num_sharing: int,
    gpus_per_node: int | None = None,
    gpus_per_task: int | None = None,
) -> list[str]:
    """Choose the part of its node's GPUs that one Slurm task uses.

    Args:
        environ: The task's environment.
        local_rank: Index of the task on its node.
        num_sharing: Tasks that share a node's GPUs; on uneven nodes the largest number.
        gpus_per_node: GPUs to use on a node, 0 for none. Default: those visible.
        gpus_per_task: GPUs of each task. Default: an equal part, rounded down.

    Raises:
        TopologyError: If more are needed than are visible.
        ValueError: If SLURM_GPUS_ON_NODE is needed and is no number.
    """
    visible = visible_gpus(environ)
    if gpus_per_node == 0:
        visible = []
    elif "CUDA_VISIBLE_DEVICES" in environ and 0 < len(visible) < _num_gpus_on_node(environ):
        # Slurm bound devices to each task (--gpus-per-task, --gpu-bind): those visible are all its own.
        local_rank, num_sharing = 0, 1
    elif gpus_per_node is not None:
        known = "CUDA_VISIBLE_DEVICES" in environ or bool(visible)
        visible = (visible if known else _numbered(gpus_per_node))[:gpus_per_node]
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


def _numbered(num_gpus: int) -> list[str]:
    return [str(index) for index in range(num_gpus)]


def _is_gpu_name(name: str) -> bool:
    return name.isdecimal() or name.startswith(("GPU-", "MIG-"))


def _too_few(needed: str, visible: list[str]) -> TopologyError:
    return TopologyError(
        f"Requested more GPUs than there are: SlurmClusterResolver needs {needed}, but {len(visible)} are "
        f"visible ({','.join(visible)}); ask Slurm for more with --gpus-per-node, or correct the argument"
    )
