"""Which cases there are: the question, the libraries and the arrays of each."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Final

from harness.environments import MPIS
from harness.record import parse_size, shapes_of_list
from harness.work import Work

_SMALL_BYTES: Final = 16 << 10


@dataclass(frozen=True)
class Case:
    """A question, and what is measured unless the user says otherwise."""

    question: str
    ways: str = ""  # the function in `cases` that lists the ways over MPI, as "module:function"
    sizes: str = ""  # of the float32 arrays
    lists: str = ""  # of gradients
    _: KW_ONLY
    is_single: bool = False  # whether its works are single arrays only
    peers: tuple[str, ...] = MPIS
    rounds: int = 7  # turns of each way
    seconds: float = 0.25  # of a turn, about
    hosts: int = 0  # that are emulated
    calls: int = 1  # of small arrays that are timed together
    rival: str = ""  # the library that others are compared with; "" for the faster MPI
    idle: str = ""  # the way that does all but communicate


_SIZES: Final = "4,1K,4K,16K,64K,256K,1M,4M,16M,64M,256M"
_LISTS: Final = "tiny1000,10000x400,resnet50,bert_base,gpt2_small"
_HOSTS: Final = ("mpich", "openmpi")  # whose launchers start ranks on emulated hosts
_SERVERS: Final = ("mpidist", "messages", "window")
_TORCH: Final = ("torch",)
CASES: Final = {
    "all_reduce": Case(
        "sums, by all libraries", "sums:all_reduce", _SIZES, _LISTS, peers=(*MPIS, "gloo", "horovod"), calls=8
    ),
    "algorithms": Case("sums by each algorithm", "sums:algorithms", "4,16K,64K,1M,16M,64M", "resnet50", calls=8),
    "network": Case(
        "sums between hosts", "sums:network", "16M", peers=(*_HOSTS, "gloo"), rounds=5, seconds=1.0, hosts=2
    ),
    "model": Case(
        "the cost model's predictions", "sums:model", "64K,1M,4M", is_single=True, peers=_HOSTS, rounds=9, hosts=2
    ),
    "calls": Case("small calls of every kind", "calls:calls", "4", is_single=True, calls=8, rounds=15),
    "overlap": Case("reductions that are started early", "calls:overlap", lists="16x1M", idle="compute alone"),
    "reductions": Case("other operations and dtypes", "reductions:reductions", "64K,1M,16M,64M", is_single=True),
    "replicas": Case("the cost of replicas", "replicas:replicas", "4,64K,1M,16M", "161x16,resnet50,bert_base", calls=8),
    "servers": Case(
        "parameter servers", "", "4,64M", "resnet50,10000x400", peers=_SERVERS, seconds=0.15, calls=50, rival="mpidist"
    ),
    "checkpoints": Case("saved variables", "checkpoints:checkpoints", "1G", is_single=True, peers=("mpich",), rounds=8),
    "torch_steps": Case(
        "steps in PyTorch", "torch_steps:steps", lists="transformer", peers=_TORCH, rounds=15, idle="no reduction"
    ),
    "torch_collectives": Case(
        "torch's collectives", "torch_calls:collectives", "64K,1M,16M", is_single=True, peers=_TORCH, rounds=15
    ),
}


def works_of(name: str, sizes: str, lists: str) -> Iterator[Work]:
    """Read what is reduced: sizes as `4,64K`, lists as `resnet50,1000x1K` (1000 arrays of 1 KiB)."""
    case = CASES[name]
    for text in filter(None, sizes.split(",")):
        nbytes = parse_size(text)
        calls = case.calls if nbytes <= _SMALL_BYTES else 1
        yield Work("size", text, ((nbytes // 4,),), calls, name, case.ways)
    if lists and case.is_single:
        raise argparse.ArgumentTypeError(f"{name} takes single arrays: give --sizes, and no --lists")
    for text in filter(None, lists.split(",")):
        yield Work("list", text, tuple(shapes_of_list(text)), 1, name, case.ways)
