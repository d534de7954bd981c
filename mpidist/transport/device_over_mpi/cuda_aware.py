"""Device memory by MPI that reads it itself: no copies through the host."""

from __future__ import annotations

from typing import Any, Final, final

import numpy as np

from mpidist.transport.device_over_mpi.buffers import DirectBuffers
from mpidist.transport.device_over_mpi.messages import MessagedCommunicator
from mpidist.transport.device_over_mpi.staging import Staging
from mpidist.transport.mpi import MpiCommunicator, load_mpi

__all__ = ["DeviceMpiCommunicator", "takes_device_memory"]

_SIZES: Final = (8, 100_000, 4 << 20)  # bytes: libraries send them in different ways


def takes_device_memory(cupy: Any) -> bool:
    """Let MPI send arrays of the current device to this rank itself, and compare. MPI that cannot may crash. Local."""
    mpi = load_mpi()
    comm, view = mpi.COMM_SELF, mpi.buffer.fromaddress
    for nbytes in _SIZES:
        numbers = np.arange(nbytes).astype(np.uint8)
        sent, received = cupy.asarray(numbers), cupy.asarray(np.zeros_like(numbers))
        cupy.cuda.get_current_stream().synchronize()
        into = comm.Irecv([view(int(received.data.ptr), nbytes), mpi.BYTE], 0)
        comm.Isend([view(int(sent.data.ptr), nbytes), mpi.BYTE], 0).Wait()
        into.Wait()
        if not np.array_equal(cupy.asnumpy(received), numbers):
            return False
    return True


@final
class DeviceMpiCommunicator(MessagedCommunicator):
    """Ranks of an MPI communicator that carries bytes of device memory; GPUs add, in rank order.

    Only messages from rank to rank: MPI's own reductions of device memory go through the host, or crash. Ranks send as
    many bytes as those of `HostStagedCommunicator`. The user must have said that MPI takes device memory.

    MPI knows no streams, so a call waits for what the caller's current stream holds before the first message, and
    returns when its work is done. NCCL's calls return when they are done as well: never are both under way, which
    could end in a deadlock.

    Args:
        mpi: Carries the bytes and counts them. Its owner frees it.
        staging: Streams, and device memory for parts of other ranks. Its owner frees it. No pinned memory is used.
    """

    def __init__(self, mpi: MpiCommunicator, staging: Staging) -> None:
        super().__init__(f"{mpi.name} from device memory", mpi, staging, DirectBuffers(staging), mpi.traffic)
