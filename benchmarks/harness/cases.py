"""Which cases there are: the question, the libraries and the arrays of each."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Final

from harness.environments import MPIS
from harness.record import parse_size, shapes_of_list
from harness.work import Work

__all__ = ["CASES", "Case", "works_of"]

_CALLS_OF_SMALL: Final = 8
_SMALL_BYTES: Final = 16 << 10
_BETWEEN_HOSTS: Final = ("mpich", "openmpi")  # whose launchers start ranks on emulated hosts


@dataclass(frozen=True)
class Case:
    """A question.

    Attributes:
        question: For people.
        ways: The function that lists the ways over MPI, as "module:function".
        sizes: Of the float32 arrays.
        lists: Of gradients.
        is_single: Whether its works are single arrays only.
        peers: The libraries, unless the user names others.
        rounds: Turns of each way.
        seconds: Duration of a turn, about.
        hosts: Number of emulated hosts; 0 for none.
        calls: Number of calls of small arrays that are timed together.
        rival: The library whose ways others are compared with, if they have no baseline of their own; "" for the
            faster MPI.
        idle: The way that does all but communicate.
    """

    question: str
    ways: str = ""
    sizes: str = ""
    lists: str = ""
    _: KW_ONLY
    is_single: bool = False
    peers: tuple[str, ...] = MPIS
    rounds: int = 7
    seconds: float = 0.25
    hosts: int = 0
    calls: int = 1
    rival: str = ""
    idle: str = ""


CASES: Final = {
    "all_reduce": Case(
        "sums, compared with raw mpi4py and every library that is installed",
        "cases.sums:all_reduce",
        "4,1K,4K,16K,64K,256K,1M,4M,16M,64M,256M",
        "tiny1000,10000x400,resnet50,bert_base,gpt2_small",
        peers=(*MPIS, "gloo", "horovod"),
        calls=_CALLS_OF_SMALL,
    ),
    "algorithms": Case(
        "sums by each algorithm", "cases.sums:algorithms", "4,16K,64K,1M,16M,64M", "resnet50", calls=_CALLS_OF_SMALL
    ),
    "arguments": Case(
        "sums of strided, transposed and symmetric arrays, into themselves and others",
        "cases.sums:arguments",
        "1K,128K,4M",
        "3x32K,128x1K,1000x1000,resnet50",
        calls=_CALLS_OF_SMALL,
    ),
    "network": Case(
        "sums between hosts",
        "cases.sums:network",
        "16M",
        peers=(*_BETWEEN_HOSTS, "gloo"),
        rounds=5,
        seconds=1.0,
        hosts=2,
    ),
    "model": Case(
        "sums between hosts, compared with the predictions of the cost model",
        "cases.sums:model",
        "64K,1M,4M",
        is_single=True,
        peers=_BETWEEN_HOSTS,
        rounds=9,
        hosts=2,
    ),
    "calls": Case("small calls of every kind", "cases.calls:ways", "4", is_single=True, calls=8, rounds=15),
    "reductions": Case(
        "other operations, collectives and dtypes", "cases.reductions:ways", "64K,1M,16M,64M", is_single=True
    ),
    "replicas": Case(
        "the cost of a chosen number of replicas",
        "cases.replicas:ways",
        "4,64K,1M,16M",
        "161x16,resnet50,bert_base",
        calls=_CALLS_OF_SMALL,
    ),
    "overlap": Case("reductions that are started early", "cases.calls:overlap", lists="16x1M", idle="compute alone"),
    "servers": Case(
        "parameter servers, compared with plain mpi4py",
        "",
        "4,64M",
        "resnet50,10000x400",
        peers=("mpidist", "messages", "window"),
        seconds=0.15,
        calls=50,
        rival="mpidist",
    ),
    "checkpoints": Case(
        "checkpoints, compared with numpy.save of the same bytes",
        "cases.checkpoints:ways",
        "1G",
        is_single=True,
        peers=("mpich",),
        rounds=8,
    ),
    "torch_steps": Case(
        "training steps in PyTorch, compared with DDP over gloo",
        "cases.torch_steps:ways",
        "",
        "transformer",
        peers=("torch",),
        rounds=15,
        idle="no reduction",
    ),
    "torch_collectives": Case(
        "collectives of torch.distributed, compared with gloo",
        "cases.torch_collectives:ways",
        "64K,1M,16M",
        is_single=True,
        peers=("torch",),
        rounds=15,
    ),
    "torch_lists": Case(
        "lists of tensors, compared with lists of NumPy's arrays",
        "cases.torch_collectives:lists",
        "",
        "20x20K,100x1K,200x4K,1000x1K",
        peers=("torch",),
        rounds=15,
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
