"""Training steps in PyTorch: gradients reduced by DDP over gloo, by DDP over mpidist, or in one call of mpidist."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mpidist.torch import all_reduce_gradients

__all__ = ["Training", "trainings_of"]

_LENGTH, _WORDS = 64, 8000
_BUCKET_BYTES = 25 << 20  # of DDP; the first one has a megabyte

Meet = Callable[[], object]


class _Transformer(nn.Module):
    """A language model of 4 layers, with 7 million parameters at a width of 256."""

    def __init__(self, width: int, batch: int) -> None:
        super().__init__()
        self.batch = batch
        self.words = nn.Embedding(_WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.scores = nn.Linear(width, _WORDS)

    def forward(self) -> torch.Tensor:
        words = torch.randint(_WORDS, (self.batch, _LENGTH + 1), generator=torch.Generator().manual_seed(0))
        scores = self.scores(self.layers(self.words(words[:, :-1])))
        return nn.functional.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())


class _List(nn.Module):
    """The parameters of a model that people know, and nothing to compute but their gradients."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(*shape) for shape in shapes)

    def forward(self) -> torch.Tensor:
        loss = torch.zeros((), dtype=self.weights[0].dtype)
        for weight in self.weights:
            loss = loss + weight.sum()
        return loss


def _nothing() -> None:
    pass


@dataclass
class Training:
    """One way to train: a model and an optimizer of its own, and how the gradients of a step are reduced.

    Attributes:
        model: What is trained: called, it returns its loss.
        optimizer: Of its parameters.
        finish: Called after the backward pass.
        alone: Reduces the gradients, with nothing beside.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    finish: Callable[[], Any] = _nothing
    alone: Callable[[], Any] = _nothing

    def step(self) -> None:
        """Make a training step."""
        self.optimizer.zero_grad()
        self.model().backward()
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


def trainings_of(
    groups: dict[str, Any], shapes: Sequence[Sequence[int]], width: int, batch: int, dtype: str
) -> dict[str, Training]:
    """Make a training for each way. Collective.

    Args:
        groups: torch's process groups by the names of their backends: `mpidist`, and `gloo` where nobody and DDP over
            gloo are measured, too.
        shapes: Of the model's parameters; none for a transformer.
        width: Of the transformer.
        batch: How many sentences of 64 words a rank trains it with in a step.
        dtype: Of the model's parameters.
    """

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = (_List(shapes) if shapes else _Transformer(width, batch)).to(getattr(torch, dtype))
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    found = {"no reduction": Training(*made())} if "gloo" in groups else {}
    found |= {f"DDP over {name}": _by_ddp(group, *made()) for name, group in groups.items()}
    return found | {"all_reduce_gradients": _in_one_call(groups["mpidist"], *made())}


def _by_ddp(group: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> Training:
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    parameters = list(model.parameters())
    count, most = sum(one.numel() for one in parameters), _BUCKET_BYTES // parameters[0].element_size()
    buckets = torch.zeros(count, dtype=parameters[0].dtype).split(most)  # as long as those of DDP
    return Training(wrapped, optimizer, alone=lambda: [dist.all_reduce(bucket, group=group) for bucket in buckets])


def _in_one_call(group: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> Training:
    def reduce() -> None:
        all_reduce_gradients(model, group=group)

    return Training(model, optimizer, finish=reduce, alone=reduce)
