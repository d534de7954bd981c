"""Device memory between ranks by messages: through the host, or given to MPI as it is."""

from mpidist.transport.device_over_mpi.cuda_aware import DeviceMpiCommunicator, takes_device_memory
from mpidist.transport.device_over_mpi.host_staged import HostStagedCommunicator
from mpidist.transport.device_over_mpi.sizes import StagingSizes
from mpidist.transport.device_over_mpi.staging import Staging

__all__ = [
    "DeviceMpiCommunicator",
    "HostStagedCommunicator",
    "Staging",
    "StagingSizes",
    "takes_device_memory",
]
