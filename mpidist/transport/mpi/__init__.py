"""Messages between ranks: MPI, found, started and used on host memory."""

from mpidist.transport.mpi.child_process import is_forked_from_rank as is_forked_from_rank
from mpidist.transport.mpi.child_process import mark_rank as mark_rank
from mpidist.transport.mpi.child_process import require_no_child as require_no_child
from mpidist.transport.mpi.communicator import MAX_CHUNK_BYTES as MAX_CHUNK_BYTES
from mpidist.transport.mpi.communicator import MpiCommunicator as MpiCommunicator
from mpidist.transport.mpi.launch import check_launch as check_launch
from mpidist.transport.mpi.library import Intracomm as Intracomm
from mpidist.transport.mpi.library import command_line as command_line
from mpidist.transport.mpi.library import load_mpi as load_mpi
from mpidist.transport.mpi.library import ranks_in_world as ranks_in_world
from mpidist.transport.mpi.ring import ring_all_reduce as ring_all_reduce

__all__ = [
    "Intracomm",
    "MAX_CHUNK_BYTES",
    "MpiCommunicator",
    "check_launch",
    "command_line",
    "is_forked_from_rank",
    "load_mpi",
    "mark_rank",
    "ranks_in_world",
    "require_no_child",
    "ring_all_reduce",
]
