"""torch.distributed over gloo: a tensor at a time, and in buckets as DistributedDataParallel does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness.work import Backend, Way, Work, versions_of

_BUCKET_BYTES = 25 << 20
_MOST_TENSORS = 2000  # one at a time; 10 000 take 10 seconds


class Gloo(Backend):
    """A gloo group that meets through a file. Collective."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=size)
        self.versions = versions_of("torch")

    def ways(self, work: Work) -> dict[str, Way]:
        """List the ways of gloo, all in place."""
        arrays = [work.empty() for _ in range(work.calls)]
        tensors = [[torch.from_numpy(array) for array in of] for of in arrays]

        def each(at: int) -> Any:
            for tensor in tensors[at]:
                dist.all_reduce(tensor)
            return arrays[at]

        ways = {"gloo": Way(arrays, each)} if len(work.shapes) <= _MOST_TENSORS else {}
        return ways | ({"gloo DDP": _in_buckets(arrays, tensors)} if work.kind == "list" else {})


def _buckets_of(nbytes: Sequence[int]) -> list[slice]:
    """Group arrays in order into buckets of at most 25 MiB; a larger array is a bucket of its own."""
    found, start, held = [], 0, 0
    for at, extra in enumerate(nbytes):
        if at > start and held + extra > _BUCKET_BYTES:
            found.append(slice(start, at))
            start, held = at, 0
        held += extra
    return [*found, slice(start, len(nbytes))]


def _in_buckets(arrays: list[list[Any]], tensors: list[list[Any]]) -> Way:
    """Copy into buckets, reduce each while the next is filled, and copy back."""
    groups = _buckets_of([tensor.nbytes for tensor in tensors[0]])
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
