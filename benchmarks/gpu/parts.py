"""The parts of the check: what each answers, how many ranks it takes, and how long it may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["HOSTIDS", "PARTS", "Part", "settings_of"]


def settings_of(text: str) -> Mapping[str, str]:
    """Read settings as a shell does."""
    return dict(word.split("=", 1) for word in text.split())


# NCCL takes little of a GPU that is shared: for right numbers, never for times. Several communicators of one process on
# one GPU are allowed from 2.30.3 on. Ranks can be on hosts of their own for NCCL: what cannot work between ranks of one
# GPU is off then, and what asks for the node of memory, which small virtual machines have no call for.
SHARED = "NCCL_NVLS_ENABLE=0 NCCL_RAS_ENABLE=0 NCCL_MAX_CTAS=2 NCCL_DEBUG=WARN"
ONE_PROCESS = f"{SHARED} NCCL_MULTI_RANK_GPU_ENABLE=1"
HOSTIDS = f"""{SHARED} TEST_HOSTIDS=1 NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
              NCCL_MNNVL_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0 NCCL_ALGO=Ring NCCL_PROTO=Simple"""
TWO_NODES = "MPIDIST_PRETEND_NODES=0,0,1,1"


@dataclass(frozen=True)
class Part:
    """One process, or one job of several ranks."""

    name: str  # its files are named after it
    ask: str  # module and function, which takes a bench and a report; or "tests"
    question: str  # for the table, if it never gets to an answer
    limit: float  # seconds that it may take
    ranks: int = 0  # 0 for a process without MPI
    words: tuple[str, ...] = ()  # of tests: numbers of ranks, and files; by default all that have tests of GPUs
    environment: Mapping[str, str] = field(default_factory=dict)
    alone: bool = True  # whether it measures times or memory, and so has the machine to itself


def _tests(name: str, ranks: str, words: str, limit: float, settings: str, *files: str) -> Part:
    question = f"tests that need a GPU, {words}"
    return Part(name, "tests", question, limit, 0, (ranks, *files), settings_of(settings), alone=False)


# In the order of their importance: what comes last is left out if time runs short. Those that measure come first, and
# their limits leave a third of the time to the others.
PARTS: tuple[Part, ...] = (
    Part("machine", "gpu.kernels:machine", "what the machine is", 30),
    Part("kernels", "gpu.kernels:measure", "lists of tensors into one buffer and back, and sums", 80),
    Part("public-call", "gpu.calls:public_call", "what the caller of the public call waits", 38),
    Part("peers", "gpu.calls:peers", "all_reduce beside NCCL alone and torch.distributed", 38, 2,
         environment=settings_of(HOSTIDS)),
    Part("staging", "gpu.calls:staging", "all-reduce of device memory that MPI carries", 38, 2),
    Part("overlap", "gpu.calls:overlap", "reductions that hide behind the backward pass", 38, 2),
    Part("faults", "gpu.calls:faults", "an abort with a kernel in flight", 38, 2, environment=settings_of(HOSTIDS)),
    _tests("right-1", "1", "1 rank, real NCCL", 140, ""),
    _tests("right-staged", "2,3,4", "2 to 4 ranks through the host", 150, "MPIDIST_NCCL=0"),
    _tests("right-hostid-2", "2", "2 ranks, real NCCL by NCCL_HOSTID", 120, HOSTIDS),
    _tests("right-one-process", "1", "several communicators of one process on a GPU", 60, ONE_PROCESS,
           "tests/transport/nccl/test_gpus_of_process.py"),
    Part("digits-1", "gpu.digits:digits", "digits on the GPU, 1 rank", 60, alone=False),
    Part("digits-4", "gpu.digits:digits", "digits on the GPU, 4 ranks", 60, 4, alone=False),
    _tests("right-2x2", "4", "2 + 2 ranks on pretended nodes, through the host", 110, f"MPIDIST_NCCL=0 {TWO_NODES}"),
    _tests("right-hostid-4", "3,4", "3 and 4 ranks, real NCCL by NCCL_HOSTID", 130, HOSTIDS),
    _tests("right-hostid-2x2", "4", "2 + 2 ranks, NCCL in pretended nodes, MPI between", 110, f"{HOSTIDS} {TWO_NODES}"),
)  # fmt: skip
