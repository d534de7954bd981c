"""Results on the rank's first GPU, given to the replicas on its other GPUs by NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist.replicas import Replicas
from mpidist.transport import DeviceLevels, GpusOfProcess, arrays, on_device

__all__ = ["broadcast_to_gpus", "copies_on_gpus"]


def copies_on_gpus(devices: DeviceLevels, replicas: Replicas, leaves: Sequence[Any]) -> list[list[Any]] | None:
    """Copy the results in device memory for each replica of this rank but the first. Local.

    Args:
        devices: Has the communicators.
        replicas: Which replicas this rank carries, on which devices.
        leaves: The results of the first replica.

    Returns:
        [other replicas][leaves], where leaves in host memory are those of the first replica. `None` if NCCL cannot copy
        the results: NCCL is not available, two replicas share a GPU, or a result is no array of CuPy.
    """
    indices = [index for index, leaf in enumerate(leaves) if arrays.stays_writable(leaf)]
    gpus = _gpus_for(devices, replicas, [leaves[index] for index in indices])
    if gpus is None:
        return None
    copies = []
    for at in range(1, replicas.num_here):
        with on_device(replicas.devices, at):
            copies.append(list(leaves))
            for index in indices:
                copies[-1][index] = arrays.empty(leaves[index].shape, leaves[index].dtype, device=True)
    gpus.broadcast([leaves[index] for index in indices], [[own[index] for index in indices] for own in copies])
    return copies


def broadcast_to_gpus(
    devices: DeviceLevels, replicas: Replicas, sources: Sequence[Any], targets: Sequence[Sequence[Any]]
) -> bool:
    """Copy results in device memory to arrays of the other replicas of this rank. Local.

    Args:
        devices: Has the communicators.
        replicas: Which replicas this rank carries, on which devices.
        sources: The results of the first replica.
        targets: [other replicas][arrays], which take the results.

    Returns:
        Whether the results were copied: not if NCCL cannot copy them, as in `copies_on_gpus`.
    """
    gpus = _gpus_for(devices, replicas, sources)
    if gpus is None:
        return False
    for index, own in zip(replicas.gpus_here[1:], targets, strict=True):
        for source, target in zip(sources, own, strict=True):
            if not _is_plain(target, index) or target.dtype != source.dtype:
                return False
    gpus.broadcast(sources, targets)
    return True


def _gpus_for(devices: DeviceLevels, replicas: Replicas, sources: Sequence[Any]) -> GpusOfProcess | None:
    """Return the communicators of this process's GPUs; `None` if NCCL cannot send these arrays."""
    indices = replicas.gpus_here
    if not indices or not sources or not all(_is_plain(source, indices[0]) for source in sources):
        return None
    return devices.gpus_of_process(indices)


def _is_plain(array: Any, index: int) -> bool:
    """Whether an array is a contiguous one of CuPy on a GPU."""
    return arrays.is_cupy(array) and array.flags.c_contiguous and int(array.device.id) == index
