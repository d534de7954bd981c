"""Collectives of torch.distributed over mpidist, compared with gloo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from backends.torch import Torch
from harness.work import Way, Work


def collectives(mpi: Torch, work: Work) -> dict[str, Way]:
    """List each collective over both groups."""
    found = {}
    for name, group in mpi.groups.items():
        for call, way in _collectives(mpi, work, group).items():
            found[f"{call}, {name}"] = replace(way, baseline=f"{call}, gloo")
    return found


def _collectives(mpi: Torch, work: Work, group: Any) -> dict[str, Way]:
    rank, size = mpi.rank, mpi.size
    count = work.nbytes // 4 // size  # elements of a part
    one, whole, part = (torch.empty(number * count) for number in (size, size * size, 1))
    other = torch.empty_like(one)
    every, chunks = list(whole.split(one.numel())), list(one.split(count))
    own, last = slice(rank * count, (rank + 1) * count), (lambda its: its[-1])

    def send() -> None:
        if rank % 2:
            dist.recv(one, rank - 1, group=group)
        elif rank + 1 < size:
            dist.send(one, rank + 1, group=group)

    every_element = slice(one.numel())
    at_root = every_element if rank == 0 else slice(0)

    def way(call: Callable[[], object], result: Any, part: slice = every_element, expect: Any = sum) -> Way:
        got = result[: part.stop - (part.start or 0)].numpy()
        return Way([[one.numpy()]], lambda at: call(), results=lambda _: [got], part=part, expect=expect)

    return {
        "all_reduce": way(lambda: dist.all_reduce(one, group=group), one),
        "reduce": way(lambda: dist.reduce(one, 0, group=group), one, at_root),
        "broadcast": way(lambda: dist.broadcast(one, 0, group=group), one, expect=lambda its: its[0]),
        "all_gather": way(lambda: dist.all_gather_into_tensor(whole, one, group=group), every[-1], expect=last),
        "reduce_scatter": way(lambda: dist.reduce_scatter_tensor(part, one, group=group), part, own),
        "all_to_all": way(lambda: dist.all_to_all_single(other, one, group=group), other[-count:], own, last),
        "gather": way(lambda: dist.gather(one, every if rank == 0 else None, 0, group=group), every[-1], at_root, last),
        "scatter": way(
            lambda: dist.scatter(part, chunks if rank == 0 else None, 0, group=group), part, own, lambda its: its[0]
        ),
        "send, recv": way(send, one, expect=lambda its: its[rank - rank % 2]),
    }
