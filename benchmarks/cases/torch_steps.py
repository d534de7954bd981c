"""Training steps in PyTorch: gradients reduced by DDP over gloo, by DDP over mpidist, or in one call of mpidist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from backends.torch import Torch
from harness.work import Way, Work
from torch import nn

from mpidist.torch import all_reduce_gradients

_LENGTH, _WORDS, _WIDTH, _SENTENCES = 64, 2000, 256, 16  # of the transformer; sentences of a rank in a step


class _Transformer(nn.Module):
    """A language model of 8 layers, with 7 million parameters: those of shapes/transformer.json."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        layer = nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.scores = nn.Linear(_WIDTH, _WORDS)

    def forward(self) -> torch.Tensor:
        words = torch.randint(_WORDS, (_SENTENCES, _LENGTH + 1), generator=torch.Generator().manual_seed(0))
        scores = self.scores(self.layers(self.words(words[:, :-1])))
        return nn.functional.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())


class _List(nn.Module):
    """The parameters of a well-known model, and nothing to compute but their gradients."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(*shape) for shape in shapes)

    def forward(self) -> torch.Tensor:
        return torch.stack([weight.sum() for weight in self.weights]).sum()


def steps(mpi: Torch, work: Work) -> dict[str, Way]:
    """List ways to train, each with its own model and optimizer; the first one reduces nothing."""
    mebibytes = 4 if work.name == "transformer" else 25  # its second bucket of 25 MiB would be its last

    def made(group: Any = None) -> nn.Module:
        torch.manual_seed(0)
        model = _Transformer() if work.name == "transformer" else _List(work.shapes)
        options = {"gradient_as_bucket_view": True, "bucket_cap_mb": mebibytes}
        return nn.parallel.DistributedDataParallel(model, process_group=group, **options) if group else model

    def alone(group: Any) -> Way:
        buckets = torch.zeros(work.nbytes // 4).split((mebibytes << 20) // 4)
        return Way([], lambda _: [dist.all_reduce(one, group=group) for one in buckets] and [], "")

    found = {"no reduction": _step(made(), baseline="")}
    found |= {f"reduction alone, {name}": alone(group) for name, group in mpi.groups.items()}
    found |= {f"DDP over {name}": _step(made(group)) for name, group in mpi.groups.items()}
    model, group = made(), mpi.groups["mpidist"]
    return found | {"all_reduce_gradients": _step(model, lambda: all_reduce_gradients(model, group=group))}


def _step(model: nn.Module, reduce: Callable[[], object] = lambda: None, baseline: str = "DDP over gloo") -> Way:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(_: int) -> list[Any]:
        optimizer.zero_grad()
        model().backward()
        reduce()
        optimizer.step()
        return []

    return Way([], step, baseline)
