"""Which benchmarks there are: what each asks, of whom, and with which arrays."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Final

from ranks.work import Work
from record import parse_size, shapes_of_list

from contest.environments import MPIS

__all__ = ["BENCHMARKS", "Benchmark", "works_of"]

_CALLS_OF_SMALL: Final = 8
_SMALL_BYTES: Final = 16 << 10
_BETWEEN_HOSTS: Final = ("mpich", "openmpi")  # whose launchers start ranks on emulated hosts


@dataclass(frozen=True)
class Benchmark:
    """A question. Its ways over MPI are in the module of its name in `mpi_ways`.

    Attributes:
        question: For people.
        sizes: Of the float32 arrays.
        lists: Of gradients.
        takes_lists: Whether lists may be given where there are none by default.
        peers: Who is measured if the user does not say.
        rounds: Turns of each way.
        seconds: What a turn takes, about.
        hosts: How many hosts are emulated; 0 for none.
        calls: How many calls of small arrays are timed together.
        calls_of_lists: How many calls of a list are timed together.
    """

    question: str
    sizes: str = ""
    lists: str = ""
    _: KW_ONLY
    takes_lists: bool = False
    peers: tuple[str, ...] = MPIS
    rounds: int = 7
    seconds: float = 0.25
    hosts: int = 0
    calls: int = 1
    calls_of_lists: int = 1


BENCHMARKS: Final = {
    "all_reduce": Benchmark(
        "sums, beside raw mpi4py and every library that is installed",
        "4,1K,4K,16K,64K,256K,1M,4M,16M,64M,256M",
        "tiny1000,10000x400,resnet50,bert_base,gpt2_small",
        peers=(*MPIS, "gloo", "horovod", "chainermn", "tensorflow"),
        calls=_CALLS_OF_SMALL,
    ),
    "arguments": Benchmark(
        "sums of whatever arrays users have",
        "1K,128K,4M",
        "3x32K,128x1K,1000x1000,resnet50",
        calls=_CALLS_OF_SMALL,
        calls_of_lists=2,
    ),
    "algorithms": Benchmark("sums by each algorithm", "4,16K,64K,1M,16M,64M", "resnet50", calls=_CALLS_OF_SMALL),
    "calls": Benchmark("small calls of every kind", "4", calls=_CALLS_OF_SMALL, rounds=15),
    "reductions": Benchmark("other operations, collectives and dtypes", "64K,1M,16M,64M"),
    "overlap": Benchmark("reductions that are started early", lists="16x1M"),
    "replicas": Benchmark(
        "what a chosen number of replicas costs",
        "4,64K,1M,16M",
        "161x16,resnet50,bert_base",
        calls=_CALLS_OF_SMALL,
    ),
    "watching": Benchmark("what checks, notes and deadlines cost", "4,16K,256K,4M,64M", rounds=11),
    "network": Benchmark(
        "sums between hosts", "16M", takes_lists=True, peers=(*_BETWEEN_HOSTS, "gloo"), rounds=5, seconds=1.0, hosts=2
    ),
    "model": Benchmark(
        "sums between hosts, beside what the cost model predicts", "64K,1M,4M", peers=_BETWEEN_HOSTS, rounds=9, hosts=2
    ),
}


def works_of(name: str, sizes: str, lists: str) -> Iterator[Work]:
    """Read what is reduced: sizes as `4,64K`, lists as `resnet50,1000x1K` (1000 arrays of 1 KiB)."""
    for text in filter(None, sizes.split(",")):
        nbytes = parse_size(text)
        calls = BENCHMARKS[name].calls if nbytes <= _SMALL_BYTES else 1
        yield Work("size", text, ((nbytes // 4,),), calls, name)
    if lists and not (BENCHMARKS[name].lists or BENCHMARKS[name].takes_lists):
        raise argparse.ArgumentTypeError(f"{name} reduces single arrays: give --sizes, and no --lists")
    for text in filter(None, lists.split(",")):
        yield Work("list", text, tuple(shapes_of_list(text)), BENCHMARKS[name].calls_of_lists, name)
