"""Agreements over messages, outside of a strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidist.transport.agreement import MpiAgreement
from mpidist.transport.failures import StatusBoard, Watchdog

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["make_agreement"]


def make_agreement(comm: Intracomm, timeout_seconds: float | None = None) -> MpiAgreement:
    """Make an agreement of a communicator's ranks, which are on one node. Collective; free it."""
    own = comm.Dup()
    board = StatusBoard(comm if comm.size > 1 else None, range(comm.size))
    return MpiAgreement(own, Watchdog(own, board, ("here",) * comm.size), timeout_seconds=timeout_seconds)
