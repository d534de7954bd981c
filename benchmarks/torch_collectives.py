"""What does each collective of torch.distributed take over mpidist, beside gloo?

.venv-tensors/bin/python benchmarks torch_collectives --out results             # two minutes; needs PyTorch
.venv-tensors/bin/python benchmarks torch_collectives --sizes 64K --rounds 3    # seconds

Both groups are of the same ranks, and take turns. Before each call its tensors are written anew; a call takes what its
slowest rank takes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from record import parse_size, parser_of, text_of_bytes
from turns import Way, add_arguments, measure, start_ranks, tell

__all__ = ["main"]


def _parse() -> argparse.Namespace:
    parser = parser_of("torch_collectives", __doc__)
    parser.add_argument("--sizes", default="64K,1M,16M", help="of a rank's float32 tensor: %(default)s")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # where ranks of gloo meet
    add_arguments(parser, rounds=15)
    return parser.parse_args()


def _calls(dist: Any, torch: Any, group: Any, nbytes: int) -> tuple[list[Any], dict[str, Callable[[], Any]]]:
    """Return the tensors that are written before each call, and the calls."""
    size, rank = dist.get_world_size(), dist.get_rank()
    one, whole = torch.ones(nbytes // 4 // size * size), torch.ones(nbytes // 4 * size)
    part, other = torch.ones(one.numel() // size), torch.ones_like(one)
    parts, peer = list(whole.split(nbytes // 4)), (rank + 1) % size
    return [one, whole, part, other], {
        "all_reduce": lambda: dist.all_reduce(one, group=group),
        "reduce": lambda: dist.reduce(one, 0, group=group),
        "broadcast": lambda: dist.broadcast(one, 0, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole[: one.numel() * size], one, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, one, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, one, group=group),
        "gather": lambda: dist.gather(parts[rank], parts if rank == 0 else None, 0, group=group),
        "scatter": lambda: dist.scatter(parts[0], parts if rank == 0 else None, 0, group=group),
        "send, recv": lambda: (
            dist.send(one, peer, group=group) if rank % 2 == 0 else dist.recv(one, rank - 1, group=group)
        ),
    }


def _timed(call: Callable[[], Any], tensors: list[Any]) -> list[float]:
    for tensor in tensors:
        tensor.fill_(1.0)
    began = time.perf_counter()
    call()
    return [time.perf_counter() - began]


def _measure(given: argparse.Namespace) -> None:
    """Measure, and print and save on rank 0. Collective."""
    import torch
    import torch.distributed as dist

    import mpidist.torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # two calls are being renamed
    with mpidist.MirroredStrategy() as strategy:
        rank, size = strategy.topology.rank, strategy.topology.size
        dist.init_process_group("gloo", init_method=f"file://{given.folder}/gloo", rank=rank, world_size=size)
        groups = {"gloo": dist.group.WORLD, "mpidist": dist.new_group(backend="mpidist")}
        works = {}
        for nbytes in map(parse_size, given.sizes.split(",")):
            made = {name: _calls(dist, torch, group, nbytes) for name, group in groups.items()}
            for call in made["gloo"][1]:
                ways: dict[str, Way] = {
                    n: partial(_timed, calls[call], tensors) for n, (tensors, calls) in made.items()
                }
                works[f"{call}, {text_of_bytes(nbytes)}"] = measure(strategy, ways, given.rounds)
        if strategy.is_chief:
            tell(given, "torch_collectives", ["a call"], works)
        dist.destroy_process_group()


def main() -> int:
    """Start the ranks, or be one of them."""
    given = _parse()
    if given.in_job:
        _measure(given)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return start_ranks("torch_collectives", given, "--folder", folder)
