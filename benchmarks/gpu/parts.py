"""The parts of the check: what each answers, how many ranks it takes, and how long it may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ONE_GPU", "PARTS", "Part"]

# NCCL's transports that cannot work between ranks of one GPU are off, and it takes little of it: for right numbers,
# never for times.
ONE_GPU: Mapping[str, str] = {
    "MPIDIST_TEST_HOSTIDS": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_DEBUG": "WARN",
}
STAGED: Mapping[str, str] = {"MPIDIST_NCCL": "0"}


@dataclass(frozen=True)
class Part:
    """One process, or one job of several.

    Attributes:
        name: Of the part; its files are named after it.
        command: Module and arguments for Python.
        asks: The ids of the rows that it owes, each with words for the table if it never gets there.
        limit: Seconds that it may take.
        ranks: How many; 0 for a process without MPI.
        needs_mpi: Whether it is of no use without MPI, though it starts its jobs by itself.
        environment: Variables.
        alone: Whether it measures times or memory, and so has the machine to itself.
    """

    name: str
    command: tuple[str, ...]
    asks: Mapping[str, str]
    limit: float
    ranks: int = 0
    needs_mpi: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    alone: bool = True


def _tests(
    name: str, ranks: str, words: str, limit: float, environment: Mapping[str, str], alone: bool = False
) -> Part:
    command = ("gpu.right", "--ranks", ranks, "--name", words, "--limit", f"{limit - 12:.0f}")
    return Part(name, command, {"right": f"tests that need a GPU, {words}"}, limit, 0, True, environment, alone)


def _sanitizer(tool: str) -> Part:
    words = f"compute-sanitizer {tool} on a small run of the kernels"
    return Part(f"sanitizer-{tool}", ("gpu.sanitizer", "--tool", tool), {"sanitizer": words}, 120, alone=False)


def _numbers(name: str, ranks: int, words: str, limit: float, environment: Mapping[str, str]) -> Part:
    asks = {"numbers": f"right numbers, {words}"}
    environment = {**environment, "GPU_CHECK_WAY": words}
    return Part(name, ("gpu.sums",), asks, limit, ranks, environment=environment, alone=False)


TWO_NODES: Mapping[str, str] = {"MPIDIST_PRETEND_NODES": "0,0,1,1"}

# In the order of their importance: what comes last is left out if time runs short.
PARTS: tuple[Part, ...] = (
    Part(
        "facts", ("gpu.facts",), {"roof": "device to device copy", "PCIe": "host and device", "launch": "launches"}, 90
    ),
    Part(
        "pack",
        ("gpu.pack",),
        {
            "G1": "pack and unpack 161 tensors",
            "G2": "pack with a cast to bfloat16",
            "G3": "host's time of pack and unpack",
            "G4": "pack beside torch and per-tensor copies",
            "G5": "pack 10,000 tensors",
        },
        75,
    ),
    _tests("right-1", "1", "1 rank, real NCCL", 80, {}, alone=True),
    Part("staging", ("gpu.staging",), {"G6": "pinned staging in chunks"}, 40),
    Part(
        "staged-all-reduce",
        ("gpu.staged_all_reduce",),
        {"G7": "all-reduce of device memory that MPI carries"},
        45,
        ranks=2,
    ),
    Part("combine", ("gpu.combine",), {"G14": "sum of 8 bfloat16 pieces"}, 30),
    Part("graph", ("gpu.graph",), {"G9": "CUDA graph of pack, all-reduce, unpack"}, 30),
    Part("overlap", ("gpu.overlap",), {"G8": "reductions that hide behind the backward pass"}, 45, ranks=2),
    Part("waiting", ("gpu.waiting",), {"G13": "how late completion is seen, and the cost"}, 30),
    Part("leaks-1", ("gpu.leaks",), {"leaks": "10,000 calls, 1 rank"}, 45),
    Part("leaks-2", ("gpu.leaks",), {"leaks": "10,000 calls, 2 ranks"}, 50, ranks=2, environment=STAGED),
    Part("missing", ("gpu.missing",), {"G12": "a rank is missing"}, 60, needs_mpi=True),
    _numbers("numbers-1", 0, "1 rank", 45, {}),
    _numbers("numbers-staged", 3, "through the host", 60, STAGED),
    _numbers("numbers-2x2", 4, "2 + 2 on pretended nodes, through the host", 60, {**STAGED, **TWO_NODES}),
    _numbers("numbers-hostid-2", 2, "real NCCL by NCCL_HOSTID (G10)", 60, ONE_GPU),
    _numbers("numbers-hostid-2x2", 4, "real NCCL in pretended nodes, MPI between (G10)", 80, {**ONE_GPU, **TWO_NODES}),
    _tests("right-staged", "2,3,4", "2 to 4 ranks through the host", 110, STAGED),
    _tests("right-hostid-2", "2", "2 ranks, real NCCL by NCCL_HOSTID (G10)", 90, ONE_GPU),
    Part("digits", ("gpu.digits",), {"digits": "digits on the GPU"}, 80, needs_mpi=True, alone=False),
    _sanitizer("memcheck"),
    _tests(
        "right-2x2",
        "4",
        "2 + 2 ranks on pretended nodes, through the host",
        90,
        {**STAGED, **TWO_NODES},
    ),
    _tests("right-hostid-4", "3,4", "3 and 4 ranks, real NCCL by NCCL_HOSTID (G10)", 110, ONE_GPU),
    _sanitizer("racecheck"),
    _sanitizer("initcheck"),
)
