"""Device memory between ranks by NCCL, and what may be launched when."""

from mpidist.transport.nccl import handles
from mpidist.transport.nccl.availability import GpuFacts, reason_against_nccl
from mpidist.transport.nccl.communicator import NcclCommunicator
from mpidist.transport.nccl.gpus_of_process import GpusOfProcess
from mpidist.transport.nccl.launch_queue import DeviceQueue

__all__ = [
    "DeviceQueue",
    "GpuFacts",
    "GpusOfProcess",
    "NcclCommunicator",
    "handles",
    "reason_against_nccl",
]
