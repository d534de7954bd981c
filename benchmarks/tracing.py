"""What does a trace cost a call?

python benchmarks tracing --out results             # half a minute
python benchmarks tracing --calls 200 --rounds 3    # seconds

Blocks of all-reduces in turn without and with a trace. In the block of a trace are its begin and end, too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
from record import parse_size, parser_of, text_of_bytes
from turns import Way, add_arguments, measure, start_ranks, tell

import mpidist

__all__ = ["main"]


def _parse() -> argparse.Namespace:
    parser = parser_of("tracing", __doc__)
    parser.add_argument("--sizes", default="4,1M", help="of the array, as 4,1M: %(default)s")
    parser.add_argument("--calls", type=int, default=2000, help="in a block, fewer of large arrays: %(default)s")
    add_arguments(parser, rounds=31)
    return parser.parse_args()


def _ways(strategy: mpidist.Strategy, folder: Path, size: int, num_calls: int) -> dict[str, Way]:
    value = np.ones(size // 4, np.float32)

    def block() -> list[float]:
        call = partial(mpidist.get_replica_context().all_reduce, "sum", value, out=np.empty_like(value))
        for _ in range(10):
            call()
        began = time.perf_counter()
        for _ in range(num_calls):
            call()
        return [(time.perf_counter() - began) / num_calls]

    def run(is_traced: bool) -> list[float]:
        with strategy.trace(folder) if is_traced else nullcontext():
            return list(strategy.run(block))

    return {"no trace": lambda: run(is_traced=False), "trace": lambda: run(is_traced=True)}


def _measure(given: argparse.Namespace) -> None:
    """Measure, and print and save on rank 0. Collective."""
    works = {}
    with mpidist.MultiWorkerMirroredStrategy() as strategy, tempfile.TemporaryDirectory() as own:
        folder = Path(strategy.broadcast_object(own))
        for size in map(parse_size, given.sizes.split(",")):
            num_calls = max(10, given.calls // max(1, size >> 14))
            works[text_of_bytes(size)] = measure(strategy, _ways(strategy, folder, size, num_calls), given.rounds)
        if strategy.is_chief:
            tell(given, "tracing", ["a call"], works)
        strategy.barrier()  # nobody removes the folder before all are done


def main() -> int:
    """Start the ranks, or be one of them."""
    given = _parse()
    if not given.in_job:
        return start_ranks("tracing", given)
    _measure(given)
    return 0
