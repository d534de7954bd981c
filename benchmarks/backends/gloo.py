"""torch.distributed over gloo: a tensor at a time, coalesced, in buckets as DistributedDataParallel does."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness.work import Backend, Way, Work, versions_of

__all__ = ["Gloo", "buckets_of"]

_BUCKET_BYTES = 25 << 20
_MOST_TENSORS = 2000  # one at a time; 10 000 take 10 seconds


class Gloo(Backend):
    """A gloo group that meets through a file. Collective."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=size)
        self.versions = versions_of("torch")
        warnings.simplefilter("ignore", FutureWarning)  # all_reduce_coalesced is being renamed

    def ways(self, work: Work) -> dict[str, Way]:
        """List the ways of gloo, all in place, over arrays that are views of one flat one."""
        flats = [np.empty(work.nbytes // 4, np.float32) for _ in range(work.calls)]
        ends = np.cumsum([int(np.prod(shape)) for shape in work.shapes])
        arrays = [
            [flat[end - int(np.prod(shape)) : end].reshape(shape) for end, shape in zip(ends, work.shapes, strict=True)]
            for flat in flats
        ]
        tensors = [[torch.from_numpy(array) for array in of] for of in arrays]

        def each(at: int) -> Any:
            for tensor in tensors[at]:
                dist.all_reduce(tensor)
            return arrays[at]

        def coalesced(at: int) -> Any:
            dist.all_reduce_coalesced(tensors[at])
            return arrays[at]

        views = [torch.from_numpy(flat).split(_BUCKET_BYTES // 4) for flat in flats]

        def in_views(at: int) -> Any:
            for handle in [dist.all_reduce(view, async_op=True) for view in views[at]]:
                handle.wait()
            return arrays[at]

        ways = {"gloo": Way(arrays, each)} if len(work.shapes) <= _MOST_TENSORS else {}
        if work.kind == "list":
            ways["gloo coalesced"] = Way(arrays, coalesced)
            ways["gloo DDP"] = _in_buckets(arrays, tensors)
        if work.kind == "list" or len(views[0]) > 1:
            ways["gloo views"] = Way(arrays, in_views)
        return ways


def buckets_of(nbytes: Sequence[int], limit: int = _BUCKET_BYTES) -> list[slice]:
    """Group arrays in order into buckets of at most `limit` bytes; a larger array is a bucket of its own."""
    found, start, held = [], 0, 0
    for at, extra in enumerate(nbytes):
        if at > start and held + extra > limit:
            found.append(slice(start, at))
            start, held = at, 0
        held += extra
    return [*found, slice(start, len(nbytes))]


def _in_buckets(arrays: list[list[Any]], tensors: list[list[Any]]) -> Way:
    """Copy into buckets, reduce each while the next is filled, and copy back."""
    groups = buckets_of([tensor.nbytes for tensor in tensors[0]])
    flats = [torch.empty(sum(tensor.numel() for tensor in tensors[0][group])) for group in groups]

    def call(at: int) -> Any:
        handles = []
        for group, flat in zip(groups, flats, strict=True):
            torch.cat([tensor.reshape(-1) for tensor in tensors[at][group]], out=flat)
            handles.append(dist.all_reduce(flat, async_op=True))
        for group, flat, handle in zip(groups, flats, handles, strict=True):
            handle.wait()
            members = tensors[at][group]
            parts = flat.split([tensor.numel() for tensor in members])
            for tensor, part in zip(members, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
        return arrays[at]

    return Way(arrays, call)
