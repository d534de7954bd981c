"""Device memory by MPI that reads it itself: no copies through the host."""

from __future__ import annotations

from typing import final

from mpidist.transport.device_over_mpi.buffers import DirectPassage
from mpidist.transport.device_over_mpi.messaged import MessagedCommunicator
from mpidist.transport.device_over_mpi.staging import Staging
from mpidist.transport.mpi import MpiCommunicator

__all__ = ["DeviceMpiCommunicator"]


@final
class DeviceMpiCommunicator(MessagedCommunicator):
    """Ranks of an MPI communicator that carries bytes of device memory; GPUs add, in rank order.

    Only messages from rank to rank: MPI's own reductions of device memory go through the host, or crash. As many bytes
    as `HostStagedCommunicator` between nodes, from where they are. `device_mpi_support` must have proven that MPI can.

    MPI knows no streams, so a call waits for what the caller's current stream holds before the first message, and
    returns when its work is done. NCCL's calls return when they are done as well: never are both under way, which
    could end in a deadlock.

    Args:
        mpi: Carries the bytes. It stays its owner's; traffic is counted there.
        staging: Streams, and device memory for what comes; it stays its owner's. No pinned memory is used.
    """

    def __init__(self, mpi: MpiCommunicator, staging: Staging) -> None:
        super().__init__(f"{mpi.name} from device memory", mpi, staging, DirectPassage(staging), mpi.traffic)
