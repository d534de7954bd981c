"""Training steps of a small transformer in PyTorch: gradients reduced by mpidist, or by DDP over gloo."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mpidist
from ranks.way import runs

__all__ = ["Training", "trainings_of"]

_BATCH, _LENGTH, _WORDS = 4, 64, 8000
_BUCKET_BYTES = 25 << 20  # of DDP; the first one has a megabyte
_STARTED_BYTES = 8 << 20  # of gradients whose reduction is started together

Meet = Callable[[], object]


class _Transformer(nn.Module):
    """A language model of 4 layers, with 7 million parameters at a width of 256."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.scores = nn.Linear(width, _WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.scores(self.layers(self.words(words)))


def _nothing() -> None:
    pass


@dataclass
class Training:
    """One way to train: a model and an optimizer of its own, and how the gradients of a step are reduced.

    Attributes:
        model: What is trained.
        optimizer: Of its parameters.
        backward: Fills the gradients from a loss, and may reduce them meanwhile.
        finish: Called after the backward pass.
        alone: Reduces the gradients, with nothing beside.
        sets_to_none: Whether a step begins without gradients.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward
    finish: Callable[[], Any] = _nothing
    alone: Callable[[], Any] = _nothing
    sets_to_none: bool = True

    def step(self) -> None:
        """Make a training step."""
        words = torch.randint(_WORDS, (_BATCH, _LENGTH + 1), generator=torch.Generator().manual_seed(0))
        self.optimizer.zero_grad(set_to_none=self.sets_to_none)
        scores = self.model(words[:, :-1])
        self.backward(nn.functional.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten()))
        self.finish()
        self.optimizer.step()

    def seconds(self, meet: Meet) -> list[float]:
        """Time a reduction of the gradients alone and a step, in this order in the list. Collective."""
        meet()
        began = time.perf_counter()
        self.step()
        step = time.perf_counter() - began
        meet()
        began = time.perf_counter()
        self.alone()
        return [time.perf_counter() - began, step]

    def memory(self) -> list[float]:
        """Make a step: MiB of new pages that the system gave, and of memory in use above that before. Collective."""
        Path("/proc/self/clear_refs").write_text("5")  # the highest memory is counted anew
        in_use = _memory("VmRSS")
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self.step()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        return [faults * resource.getpagesize() / 2**20, (_memory("VmHWM") - in_use) / 2**10]


def _memory(name: str) -> int:
    """Return a number of KiB that Linux tells of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def trainings_of(strategy: mpidist.Strategy, width: int, dtype: str, *, with_gloo: bool) -> dict[str, Training]:
    """Make a training for each way. Collective.

    Args:
        strategy: By which mpidist reduces.
        width: Of the model.
        dtype: Of the model's parameters.
        with_gloo: Whether to reduce by nobody and by DDP, too; else by mpidist alone.
    """

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = _Transformer(width).to(getattr(torch, dtype))
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    found = {"no reduction": Training(*made()), "DDP over gloo": _by_ddp(*made())} if with_gloo else {}
    return {
        **found,
        "mpidist, out= gradients": _in_place(strategy, *made()),
        "mpidist, started in the backward pass": _started(strategy, *made()),
        "mpidist, symmetric": _symmetric(strategy, *made()),
    }


def _by_ddp(model: nn.Module, optimizer: torch.optim.Optimizer) -> Training:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    parameters = list(model.parameters())
    count, most = sum(one.numel() for one in parameters), _BUCKET_BYTES // parameters[0].element_size()
    buckets = torch.zeros(count, dtype=parameters[0].dtype).split(most)  # as long as those of DDP
    return Training(wrapped, optimizer, alone=lambda: [dist.all_reduce(bucket) for bucket in buckets])


def _in_place(strategy: mpidist.Strategy, model: nn.Module, optimizer: torch.optim.Optimizer) -> Training:
    def reduce() -> None:
        gradients = [parameter.grad for parameter in model.parameters()]
        strategy.run(lambda: mpidist.get_replica_context().all_reduce("mean", gradients, out=gradients))

    return Training(model, optimizer, finish=reduce, alone=reduce)


def _symmetric(strategy: mpidist.Strategy, model: nn.Module, optimizer: torch.optim.Optimizer) -> Training:
    memory = strategy.symmetric_empty_like(list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), memory, strict=True):
        parameter.grad = gradient
    training = _in_place(strategy, model, optimizer)
    training.sets_to_none = False
    return training


def _started(strategy: mpidist.Strategy, model: nn.Module, optimizer: torch.optim.Optimizer) -> Training:
    """Start the reduction of a few gradients when the backward pass has filled the last of them."""
    parameters = list(model.parameters())[::-1]
    groups = [parameters[part] for part in runs([one.nbytes for one in parameters], _STARTED_BYTES)]
    handles: list[Any] = []

    def start(group: list[Any]) -> None:
        gradients = [parameter.grad for parameter in group]
        handles.append(mpidist.get_replica_context().start_all_reduce("mean", gradients, out=gradients))

    def filled(group: list[Any], parameter: Any) -> None:
        if all(one.grad is not None for one in group):  # a step begins without gradients
            start(group)

    for group in groups:
        for parameter in group:
            parameter.register_post_accumulate_grad_hook(partial(filled, group))

    def wait() -> None:
        while handles:
            handles.pop(0).wait()

    def backward(loss: torch.Tensor) -> None:
        strategy.run(lambda: (loss.backward(), wait()))

    def alone() -> None:
        strategy.run(lambda: ([start(group) for group in groups], wait()))

    return Training(model, optimizer, backward, alone=alone)
