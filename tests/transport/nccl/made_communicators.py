"""Communicators of NCCL, made without a group."""

from support.ranks import Intracomm

from mpidist.transport import cuda
from mpidist.transport.gpu.kernels import DeviceKernels
from mpidist.transport.nccl import handles as nccl_handles
from mpidist.transport.nccl.communicator import NcclCommunicator
from mpidist.transport.nccl.handles import Handle
from mpidist.transport.nccl.launch_queue import DeviceQueue

__all__ = ["connect", "make_handle"]


def make_handle(provider: cuda.Cuda, comm: Intracomm) -> Handle:
    unique_id = comm.bcast(provider.nccl.get_unique_id() if comm.rank == 0 else None)
    device = int(provider.cupy.cuda.runtime.getDevice())
    (made,) = nccl_handles.start_init(comm.size, unique_id, {comm.rank: device}).wait()
    return made


def connect(provider: cuda.Cuda, comm: Intracomm, name: str = "all") -> NcclCommunicator:
    return NcclCommunicator(make_handle(provider, comm), name, comm.rank, comm.size, DeviceQueue(), DeviceKernels())
