"""Training steps of a small transformer in PyTorch: gradients reduced by mpidist, or by DDP over gloo."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from turns import Way

import mpidist

__all__ = ["memory_of", "start_gloo", "ways_of"]

_BATCH, _LENGTH, _WORDS = 4, 64, 8000
_BUCKET_BYTES = 25 << 20  # of DDP; the first one has a megabyte


@dataclass(frozen=True)
class _Reduction:
    """How the gradients of a step are reduced.

    Attributes:
        finish: Called after the backward pass.
        alone: Reduces the gradients, with nothing beside.
        sets_to_none: Whether a step begins without gradients.
    """

    finish: Callable[[], Any] = lambda: None
    alone: Callable[[], Any] = lambda: None
    sets_to_none: bool = True


class _Transformer(nn.Module):
    """A language model of 4 layers, with 8 million parameters at a width of 256."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.scores = nn.Linear(width, _WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.scores(self.layers(self.words(words)))


def _step(model: nn.Module, optimizer: Any, reduction: _Reduction) -> list[float]:
    """Make a training step, then a reduction of its gradients alone: seconds of the latter, and of the former."""
    words = torch.randint(_WORDS, (_BATCH, _LENGTH + 1), generator=torch.Generator().manual_seed(0))
    began = time.perf_counter()
    optimizer.zero_grad(set_to_none=reduction.sets_to_none)
    scores = model(words[:, :-1])
    nn.functional.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten()).backward()
    reduction.finish()
    optimizer.step()
    step = time.perf_counter() - began
    dist.barrier()
    began = time.perf_counter()
    reduction.alone()
    return [time.perf_counter() - began, step]


def memory_of(way: Way) -> tuple[float, float]:
    """Make a step; return the MiB of new pages that the system gave, and of memory in use above that before."""
    Path("/proc/self/clear_refs").write_text("5")  # the highest memory is counted anew
    in_use = _memory("VmRSS")
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    way()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return faults * resource.getpagesize() / 2**20, (_memory("VmHWM") - in_use) / 2**10


def _memory(name: str) -> int:
    """Return a number of KiB that Linux tells of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def start_gloo(strategy: mpidist.Strategy, folder: Path) -> None:
    """Start gloo on the ranks of a strategy, which meet in a file. Collective."""
    torch.set_num_threads(1)
    rank, size = strategy.topology.rank, strategy.topology.size
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=size)


def ways_of(strategy: mpidist.Strategy, width: int, dtype: str) -> dict[str, Way]:
    """Make the ways, each with a model and an optimizer of its own. Collective."""

    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = _Transformer(width).to(getattr(torch, dtype))
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    def by_itself() -> Way:
        model, optimizer = made()
        return lambda: _step(model, optimizer, _Reduction())

    def by_ddp() -> Way:
        model, optimizer = made()
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        buckets = _buckets(list(model.parameters()))

        def alone() -> None:
            for bucket in buckets:
                dist.all_reduce(bucket)

        return lambda: _step(wrapped, optimizer, _Reduction(alone=alone))

    def by_mpidist(is_symmetric: bool) -> Way:
        model, optimizer = made()
        if is_symmetric:
            memory = strategy.symmetric_empty_like(list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), memory, strict=True):
                parameter.grad = gradient

        def reduce() -> None:
            gradients = [parameter.grad for parameter in model.parameters()]
            strategy.run(lambda: mpidist.get_replica_context().all_reduce("mean", gradients, out=gradients))

        return lambda: _step(model, optimizer, _Reduction(reduce, reduce, sets_to_none=not is_symmetric))

    return {
        "no reduction": by_itself(),
        "DDP over gloo": by_ddp(),
        "mpidist, out= gradients": by_mpidist(is_symmetric=False),
        "mpidist, symmetric": by_mpidist(is_symmetric=True),
    }


def _buckets(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Make buffers as long as those in which DDP reduces gradients."""
    count = sum(parameter.numel() for parameter in parameters)
    most = _BUCKET_BYTES // parameters[0].element_size()
    return list(torch.zeros(count, dtype=parameters[0].dtype).split(most))
