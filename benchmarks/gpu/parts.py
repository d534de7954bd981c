"""The parts of the check: what each answers, how many ranks it takes, and how long it may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["PARTS", "Part"]

# NCCL's transports that cannot work between ranks of one GPU are off, and it takes little of it: for right numbers,
# never for times.
ONE_GPU: Mapping[str, str] = {
    "TEST_HOSTIDS": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",  # it asks for the node of the memory, which small virtual machines have no call for
    "NCCL_MAX_CTAS": "2",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_DEBUG": "WARN",
}
# Several communicators of one process on one GPU, which NCCL allows from 2.30.3 on.
ONE_PROCESS: Mapping[str, str] = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_DEBUG": "WARN",
}
STAGED: Mapping[str, str] = {"MPIDIST_NCCL": "0"}
TWO_NODES: Mapping[str, str] = {"MPIDIST_PRETEND_NODES": "0,0,1,1"}


@dataclass(frozen=True)
class Part:
    """One process, or one job of several.

    Attributes:
        name: Of the part; its files are named after it.
        command: Module and arguments for Python.
        question: For the table, if it never gets to an answer.
        limit: Seconds that it may take.
        ranks: How many; 0 for a process without MPI.
        needs_mpi: Whether it is of no use without MPI, though it starts its jobs by itself.
        environment: Variables.
        alone: Whether it measures times or memory, and so has the machine to itself.
    """

    name: str
    command: tuple[str, ...]
    question: str
    limit: float
    ranks: int = 0
    needs_mpi: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    alone: bool = True


def _tests(
    name: str, ranks: str, words: str, limit: float, settings: Mapping[str, str], alone: bool = False, *files: str
) -> Part:
    command, question = ("gpu.programs", "tests", ranks, words, *files), f"tests that need a GPU, {words}"
    return Part(name, command, question, limit, 0, True, settings, alone)


def _sanitizer(tool: str) -> Part:
    return Part(f"sanitizer-{tool}", ("gpu.programs", "sanitizer", tool), f"compute-sanitizer {tool}", 120, alone=False)


# In the order of their importance: what comes last is left out if time runs short.
PARTS: tuple[Part, ...] = (
    Part("facts", ("gpu.facts",), "the machine and its copies", 90),
    Part("pack", ("gpu.pack",), "a list of tensors into one buffer, and back", 75),
    _tests("right-1", "1", "1 rank, real NCCL", 140, {}, alone=True),
    Part("staged-all-reduce", ("gpu.staged_all_reduce",), "all-reduce of device memory that MPI carries", 45, ranks=2),
    Part("overlap", ("gpu.overlap",), "reductions that hide behind the backward pass", 45, ranks=2),
    _tests("right-staged", "2,3,4", "2 to 4 ranks through the host", 150, STAGED),
    _tests("right-hostid-2", "2", "2 ranks, real NCCL by NCCL_HOSTID", 120, ONE_GPU),
    _tests(
        "right-one-process",
        "1",
        "several communicators of one process on one GPU, real NCCL",
        60,
        ONE_PROCESS,
        False,
        "tests/transport/nccl/test_gpus_of_process.py",
    ),
    Part("digits", ("gpu.programs", "digits"), "digits on the GPU", 80, needs_mpi=True, alone=False),
    _sanitizer("memcheck"),
    _tests("right-2x2", "4", "2 + 2 ranks on pretended nodes, through the host", 110, {**STAGED, **TWO_NODES}),
    _tests("right-hostid-4", "3,4", "3 and 4 ranks, real NCCL by NCCL_HOSTID", 130, ONE_GPU),
    _tests("right-hostid-2x2", "4", "2 + 2 ranks, NCCL in pretended nodes, MPI between", 110, {**ONE_GPU, **TWO_NODES}),
    _sanitizer("initcheck"),
)
