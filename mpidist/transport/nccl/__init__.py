"""Device memory between ranks by NCCL, and what may be launched when."""

from mpidist.transport.nccl import handles as handles
from mpidist.transport.nccl.availability import GpuFacts as GpuFacts
from mpidist.transport.nccl.availability import reason_against_nccl as reason_against_nccl
from mpidist.transport.nccl.communicator import NcclCommunicator as NcclCommunicator
from mpidist.transport.nccl.handles import NcclInit as NcclInit
from mpidist.transport.nccl.launch_queue import DeviceQueue as DeviceQueue

__all__ = [
    "DeviceQueue",
    "GpuFacts",
    "NcclInit",
    "NcclCommunicator",
    "handles",
    "reason_against_nccl",
]
