"""What does a training step in PyTorch take, with gradients reduced by mpidist and by DDP over gloo?

.venv-tensors/bin/python benchmarks torch_steps --out results              # two minutes; needs PyTorch
.venv-tensors/bin/python benchmarks torch_steps --width 32 --rounds 2      # seconds

Steps of a small transformer in turn, each way with a model of its own; one way reduces nothing. After each step the
gradients are reduced once more, alone: what of that time a step does not take more than one without is hidden.
"""

from __future__ import annotations

import argparse
import tempfile
from importlib import import_module
from pathlib import Path

import numpy as np
from turns import Times, add_arguments, measure, start_ranks, tell

import mpidist

__all__ = ["main"]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmarks torch_steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", default="float32,bfloat16", help="%(default)s")
    parser.add_argument("--width", type=int, default=256, help="of the transformer: %(default)s")
    add_arguments(parser, rounds=15)
    return parser.parse_args()


def _measure(given: argparse.Namespace) -> None:
    """Measure, and print and save on rank 0. Collective."""
    steps = import_module("ranks.torch_steps")  # needs PyTorch, which the other benchmarks do without
    works, memory = {}, []
    with mpidist.MultiWorkerMirroredStrategy() as strategy, tempfile.TemporaryDirectory() as own:
        steps.start_gloo(strategy, Path(strategy.broadcast_object(own)))
        for dtype in given.dtypes.split(","):
            ways = steps.ways_of(strategy, given.width, dtype)
            works[dtype] = measure(strategy, ways, given.rounds)
            for name, way in ways.items():
                fresh, most = steps.memory_of(way)
                text = f"{fresh:.1f} MiB of new pages in a step, {most:.1f} MiB above those before it"
                memory.append(f"{dtype}, {name}: {_hidden(works[dtype], name)}{text}")
        if strategy.is_chief:
            tell(given, "torch_steps", ["reduction alone", "a step"], works)
            print("", *memory, sep="\n")
        strategy.barrier()  # nobody removes the folder before all are done


def _hidden(times: Times, way: str) -> str:
    """Say what share of a way's reduction is hidden behind the backward pass, by medians."""
    without = next(iter(times.values()))
    if times[way] is without:
        return ""
    alone, step = np.median(times[way], axis=0)
    return f"{1 - (step - np.median(without[:, -1])) / alone:.0%} of the reduction hidden, "


def main() -> int:
    """Start the ranks, or be one of them."""
    given = _parse()
    if not given.in_job:
        return start_ranks("torch_steps", given)
    _measure(given)
    return 0
