"""Device memory between ranks by messages: through the host, or given to MPI as it is."""

from mpidist.transport.device_over_mpi.cuda_aware import DeviceMpiCommunicator as DeviceMpiCommunicator
from mpidist.transport.device_over_mpi.cuda_aware import takes_device_memory as takes_device_memory
from mpidist.transport.device_over_mpi.host_staged import HostStagedCommunicator as HostStagedCommunicator
from mpidist.transport.device_over_mpi.sizes import StagingSizes as StagingSizes
from mpidist.transport.device_over_mpi.staging import Staging as Staging

__all__ = [
    "DeviceMpiCommunicator",
    "HostStagedCommunicator",
    "Staging",
    "StagingSizes",
    "takes_device_memory",
]
