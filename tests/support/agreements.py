"""Agreements over messages, outside of a strategy."""

import logging

from mpidist.transport.agreement.mpi_agreement import MpiAgreement
from mpidist.transport.agreement.slow_ranks import SlowRanks
from mpidist.transport.failures.call_watchdog import CallWatchdog
from mpidist.transport.failures.status_board import StatusBoard
from mpidist.transport.topology import Topology

__all__ = ["make_agreement", "warnings_of"]


def make_agreement(comm, timeout_seconds=None):
    """Make an agreement of a communicator's ranks, which are on one node. Collective; free it."""
    own = comm.Dup()
    board = StatusBoard(comm if comm.size > 1 else None, range(comm.size))
    watchdog = CallWatchdog(own, board, ("here",) * comm.size)
    slow_ranks = SlowRanks(board.recorder, Topology.from_labels(comm.rank, "h" * comm.size, "h" * comm.size), 60.0)
    return MpiAgreement(own, watchdog, slow_ranks, timeout_seconds=timeout_seconds)


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
