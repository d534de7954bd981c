"""Messages between ranks: MPI loaded, started and used on host memory."""

from mpidist.transport.mpi.child_process import (
    INHERITS_FROM_RANK,
    is_forked_from_rank,
    launcher_here,
    launcher_or_parent,
    mark_rank,
    require_no_child,
)
from mpidist.transport.mpi.communicator import MAX_CHUNK_BYTES, MpiCommunicator
from mpidist.transport.mpi.error_output import FORWARD_SECONDS, rank_prefix, write_lines
from mpidist.transport.mpi.launch import check_launch, is_in_step
from mpidist.transport.mpi.launched_rank import LaunchedRank, let_first_rank_end
from mpidist.transport.mpi.launcher_abort import ask_launcher_to_abort, rank_before_start, store_code
from mpidist.transport.mpi.launcher_variables import LAUNCHER_PREFIXES, launcher_text, rank_from_environment
from mpidist.transport.mpi.library import (
    Intracomm,
    command_line,
    failed_ranks,
    greatest,
    is_process_failure,
    library_version,
    load_mpi,
    numbers_in_world,
    ranks_in_world,
)
from mpidist.transport.mpi.mpi_libraries import MpiLibrary, recognise
from mpidist.transport.mpi.open_mpi import eager_limit_bytes
from mpidist.transport.mpi.ring import ring_all_reduce
from mpidist.transport.mpi.rows import all_reduce_rows, row_traffic
from mpidist.transport.mpi.shared_files import SHARED_MEMORY, mapped_mpi_files, unlink_files_of_all

__all__ = [
    "FORWARD_SECONDS",
    "INHERITS_FROM_RANK",
    "Intracomm",
    "LAUNCHER_PREFIXES",
    "LaunchedRank",
    "MAX_CHUNK_BYTES",
    "MpiCommunicator",
    "MpiLibrary",
    "SHARED_MEMORY",
    "all_reduce_rows",
    "ask_launcher_to_abort",
    "check_launch",
    "command_line",
    "is_forked_from_rank",
    "failed_ranks",
    "greatest",
    "is_in_step",
    "is_process_failure",
    "launcher_here",
    "launcher_or_parent",
    "library_version",
    "launcher_text",
    "let_first_rank_end",
    "load_mpi",
    "mapped_mpi_files",
    "mark_rank",
    "numbers_in_world",
    "rank_before_start",
    "recognise",
    "rank_prefix",
    "rank_from_environment",
    "ranks_in_world",
    "require_no_child",
    "ring_all_reduce",
    "row_traffic",
    "store_code",
    "eager_limit_bytes",
    "unlink_files_of_all",
    "write_lines",
]
