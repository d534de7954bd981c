"""Results on the rank's first GPU, given to the replicas on its other GPUs by NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist.replicas import Replicas
from mpidist.transport import arrays
from mpidist.transport.devices import on_device
from mpidist.transport.group.device_levels import DeviceLevels

__all__ = ["broadcast_to_gpus", "copies_on_gpus"]


def copies_on_gpus(devices: DeviceLevels, replicas: Replicas, leaves: Sequence[Any]) -> list[list[Any]] | None:
    """Copy the first replica's results in device memory for each other replica of this rank, on its own GPU. Local.

    Returns [other replicas][leaves], where leaves in host memory are those of the first replica. `None` if NCCL cannot
    copy the results: NCCL is not available, two replicas share a GPU, or a result is no array of CuPy.
    """
    indices = [index for index, leaf in enumerate(leaves) if arrays.stays_writable(leaf)]
    if not all(arrays.is_cupy(leaves[index]) for index in indices):
        return None
    copies = [list(leaves) for _ in range(1, replicas.num_here)]
    for at, own in enumerate(copies, 1):
        with on_device(replicas.devices, at):
            for index in indices:
                own[index] = arrays.empty(leaves[index].shape, leaves[index].dtype, device=True)
    sources, *targets = ([own[index] for index in indices] for own in (leaves, *copies))
    return copies if broadcast_to_gpus(devices, replicas, sources, targets) else None


def broadcast_to_gpus(
    devices: DeviceLevels, replicas: Replicas, sources: Sequence[Any], targets: Sequence[Sequence[Any]]
) -> bool:
    """Copy results in device memory to those of the other replicas of this rank: [other replicas][arrays]. Local.

    Returns whether the results were copied: not if NCCL cannot copy them, as in `copies_on_gpus`.
    """
    if not replicas.gpus_here or not sources:
        return False
    for index, own in zip(replicas.gpus_here, (sources, *targets), strict=True):
        for source, array in zip(sources, own, strict=True):
            is_there = arrays.is_cupy(array) and int(array.device.id) == index
            if not is_there or not array.flags.c_contiguous or array.dtype != source.dtype:
                return False
    gpus = devices.gpus_of_process(replicas.gpus_here)
    if gpus is not None:
        gpus.broadcast(sources, targets)
    return gpus is not None
