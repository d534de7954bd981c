"""What does reading ahead gain, where the reader of the data is slow?

python benchmarks prefetch --out results               # two minutes
python benchmarks prefetch --steps 16 --rounds 2       # seconds

A step multiplies matrices and reduces; it takes a few milliseconds, and so does reading a batch. Readers:

  waits            every batch takes as long: a disk or a server that answers
  waits, unevenly  as long on average, but every 16th batch takes half of the time of all
  computes         the reader itself needs a core, as decoding and augmenting do

Ways: how many batches may be in memory at a time. With 1, nothing is read ahead.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, final

import numpy as np
from record import parser_of
from turns import Way, add_arguments, measure, start_ranks, tell

import mpidist

__all__ = ["main"]

_BUFFERS: Final = (1, 2, 8)
_RARELY: Final = 16


def _parse() -> argparse.Namespace:
    parser = parser_of("prefetch", __doc__)
    parser.add_argument("--ms", type=float, default=4, help="of reading a batch, and about of a step: %(default)s")
    parser.add_argument("--steps", type=int, default=96, help="of a turn: %(default)s")
    add_arguments(parser, rounds=8)
    return parser.parse_args()


@final
class _Work:
    """Matrix products that take about so many seconds on a core that does nothing else."""

    def __init__(self, seconds: float) -> None:
        self._matrix = np.ones((128, 128), np.float32) / 128
        times = []
        for _ in range(5):
            began = time.perf_counter()
            self._multiply(50)
            times.append((time.perf_counter() - began) / 50)
        self.num_products = max(1, round(seconds / min(times)))

    def __call__(self) -> None:
        self._multiply(self.num_products)

    def _multiply(self, times: int) -> None:
        product = self._matrix
        for _ in range(times):
            product = product @ self._matrix


@final
class _Batches:
    """Global batches of a slow reader."""

    def __init__(self, num_steps: int, read: Callable[[int], None]) -> None:
        self._num_steps, self._read = num_steps, read

    def __iter__(self) -> Iterator[np.ndarray]:
        for step in range(self._num_steps):
            self._read(step)
            yield np.full(64, step, np.float32)


def _readers(seconds: float, work: Callable[[], None]) -> dict[str, Callable[[int], None]]:
    rest = seconds / 2 * _RARELY / (_RARELY - 1)

    def wait_unevenly(step: int) -> None:
        time.sleep(seconds / 2 * _RARELY if step % _RARELY == _RARELY - 1 else rest)

    return {
        "waits": lambda step: time.sleep(seconds),
        "waits, unevenly": wait_unevenly,
        "computes": lambda step: work(),
    }


def _pass(strategy: mpidist.Strategy, dataset: mpidist.DistributedDataset, num_steps: int, work: _Work) -> list[float]:
    """Return the seconds of a step. Collective."""
    began, total = time.perf_counter(), 0.0
    for part in dataset:
        work()
        total += strategy.reduce("sum", part.sum())
    taken = time.perf_counter() - began
    if total != 64 * num_steps * (num_steps - 1) / 2:
        raise ArithmeticError(f"the batches add up to {total}")
    return [taken / num_steps]


def _measure(given: argparse.Namespace) -> None:
    """Measure, and print and save on rank 0. Collective."""
    works = {}
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        work = _Work(given.ms / 1000)
        work.num_products = int(strategy.broadcast(work.num_products))
        for name, read in _readers(given.ms / 1000, work).items():
            ways: dict[str, Way] = {}
            for size in _BUFFERS:
                options = mpidist.InputOptions(experimental_per_replica_buffer_size=size)
                dataset = strategy.experimental_distribute_dataset(_Batches(given.steps, read), options)
                label = f"{size} batches" if size > 1 else "1 batch"
                ways[label] = partial(_pass, strategy, dataset, given.steps, work)
            works[f"a reader that {name}"] = measure(strategy, ways, given.rounds)
        if strategy.is_chief:
            tell(given, "prefetch", ["a step"], works)


def main() -> int:
    """Start the ranks, or be one of them."""
    given = _parse()
    if not given.in_job:
        return start_ranks("prefetch", given)
    _measure(given)
    return 0
