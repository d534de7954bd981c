"""The type of a communicator of ranks, for modules that are also collected where MPI must not start."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm
else:
    Intracomm = Any

__all__ = ["Intracomm"]
