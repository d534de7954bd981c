"""Whether ranks can use NCCL together: reports on their GPUs, and the conclusion from all of them.

NCCL itself answers most of these questions with "invalid usage", or with a hang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from mpidist.errors import TopologyError
from mpidist.transport.cuda import Cuda, nccl_version_text
from mpidist.transport.text import first_line, group_ranks, name_ranks

__all__ = ["GpuFacts", "reason_against_nccl"]

_SHARES_GPUS: Final = 23003  # 2.30.3 is the first NCCL with several ranks on one GPU, if it is told so
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")  # tells hosts of one name apart


@final
@dataclass(frozen=True)
class GpuFacts:
    """Report of a rank on its GPU."""

    gpu: tuple[str, str] = ("", "")  # tells it from others, as NCCL does: host, or `NCCL_HOSTID`, and PCI address
    nccl_version: int = 0  # as `GpuSupport` has it
    shares_gpus: bool = False  # whether NCCL was told to allow several ranks on one GPU
    reason: str = ""  # why this rank cannot use NCCL; empty if it can

    @classmethod
    def here(cls, cuda: Cuda, environ: Mapping[str, str], hostname: str) -> GpuFacts:
        """Look at this process, with an environment, on a host. Never raises."""
        support, address = cuda.support, ""
        reason = support.reason
        if not reason and environ.get("NCCL_COMM_BLOCKING") == "0":
            reason = "NCCL_COMM_BLOCKING=0 is set, and CuPy can only use NCCL's communicators that block; unset it"
        if not reason:
            try:
                address = str(cuda.cupy.cuda.Device(int(cuda.cupy.cuda.runtime.getDevice())).pci_bus_id)
            except RuntimeError as error:
                reason = f"its GPU does not answer: {first_line(error)}"
        host = environ.get("NCCL_HOSTID")
        if not host:
            host = f"{hostname} {_BOOT_ID.read_text(encoding='ascii') if _BOOT_ID.exists() else ''}".strip()
        shares = environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and support.nccl_version >= _SHARES_GPUS
        return cls((host, address), support.nccl_version, shares, reason)


def reason_against_nccl(facts: Sequence[GpuFacts], groups: Sequence[Sequence[int]], hosts: Sequence[str]) -> str:
    """Return why the ranks of a group cannot have an NCCL communicator together; nothing if all groups can.

    Raises:
        TopologyError: If ranks of a group have other versions of NCCL; NCCL itself requires nothing else.
    """
    lacking = [rank for rank, fact in enumerate(facts) if fact.reason]
    if lacking:
        return f"{name_ranks(lacking)} ({hosts[lacking[0]]}): {facts[lacking[0]].reason}"
    for ranks in groups:
        having = group_ranks({rank: facts[rank].nccl_version for rank in ranks})
        if len(having) > 1:
            found = [
                f"{nccl_version_text(its)} on {name_ranks(own)} ({', '.join(dict.fromkeys(hosts[one] for one in own))})"
                for its, own in having.items()
            ]
            raise TopologyError(
                "ranks that use NCCL together must have one version of NCCL; install the same everywhere, or set "
                f"MPIDIST_NCCL=0 to do without NCCL: {', '.join(found)}"
            )
    for ranks in groups:
        for gpu, sharing in group_ranks({rank: facts[rank].gpu for rank in ranks}).items():
            if len(sharing) > 1 and not all(facts[rank].shares_gpus for rank in ranks):
                return (
                    f"{name_ranks(sharing)} share GPU {gpu[1]} of {hosts[sharing[0]]}, and NCCL wants one for each "
                    "rank; start as many ranks on a node as it has GPUs"
                )
    return ""
