"""Device memory between ranks by messages: through the host, or given to MPI as it is."""

from mpidist.transport.device_over_mpi.messages import MessagedCommunicator
from mpidist.transport.device_over_mpi.pieces import StagingSizes
from mpidist.transport.device_over_mpi.staging import Staging, wait_for_event

__all__ = ["MessagedCommunicator", "Staging", "StagingSizes", "wait_for_event"]
