"""Which workers a server still serves: those that are lost are dropped, or end the server, too."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Final, final

from mpidist.parameter_server.attendance.meetings import Workers
from mpidist.parameter_server.messages.connection import Connection
from mpidist.transport.group.service_group import ServiceGroup
from mpidist.transport.mpi.library import is_process_failure, load_mpi

__all__ = ["Attendance"]

logger = logging.getLogger("mpidist.parameter_server")

_QUIET_SECONDS: Final = 0.05  # after which nothing more comes from a rank that is lost
_RECORD_SECONDS: Final = 0.1  # between two entries in the flight recorder


@final
class Attendance:
    """What a server knows of its workers' processes, and what it says of itself.

    Args:
        group: The workers and servers.
        workers: The workers.
        name: Name of the server, for people.
    """

    def __init__(self, group: ServiceGroup, workers: Workers, name: str) -> None:
        self._group, self._workers, self._name = group, workers, name
        self._next_record, self._num_recorded = 0.0, 0

    def drop_lost(self, connections: Iterable[Connection], advance: Callable[[Connection], bool]) -> int:
        """Drop the workers of which the watchdog has learnt that they are lost, after what they have asked for.

        Args:
            connections: Those of all workers.
            advance: Gives a worker one turn; returns whether anything got on.

        Returns:
            How many were dropped.
        """
        lost, num_dropped = self._group.awaited.lost, 0
        for connection in connections if lost else ():
            until = time.monotonic() + _QUIET_SECONDS
            while connection.rank in lost and not connection.has_ended:
                if advance(connection):
                    until = time.monotonic() + _QUIET_SECONDS
                elif connection.is_making:  # nothing of the change is missing: the next check comes back to it
                    break
                elif time.monotonic() > until:
                    num_dropped += self._drop(connection, lost[connection.rank])
        return num_dropped

    def is_lost(self, connection: Connection, error: Exception) -> bool:
        """Whether an error comes of a worker whose process has failed: MPI says so, or the process is gone."""
        if is_process_failure(error):
            return True
        return isinstance(error, load_mpi().Exception) and self._group.is_gone(connection.rank)

    def lose(self, connection: Connection) -> int:
        """Drop a worker whose process has failed, as MPI says. Returns how many were dropped.

        Raises:
            PeerFailedError: If the cluster does not go on without the worker.
        """
        if connection.rank not in self._group.awaited.dispensable:
            self._group.watchdog.give_up(f"MPI has found that the process of rank {connection.rank} has failed")
        return self._drop(connection, "MPI has found that its process has failed")

    def _drop(self, connection: Connection, why: str) -> int:
        """End the part of a lost worker. What it has not sent whole is dropped, and changes nothing."""
        if connection.has_ended:
            return 0
        worker, rank, was_cut_off = connection.worker, connection.rank, connection.steps is not None
        connection.abandon()
        self._workers.end(worker, why)
        awaited = self._group.awaited
        awaited.ranks = [other for other in awaited.ranks if other != rank]
        cut_off = ", in the middle of a request" if was_cut_off else ""
        logger.warning("mpidist: worker %d (rank %d) is lost%s: %s", worker, rank, cut_off, why)
        return 1

    def record(self, num_requests: int, last: Connection | None) -> None:
        """Tell the flight recorder that the server looks around, and how many requests were answered, now and then.

        Args:
            num_requests: How many.
            last: Whose request was the last one.
        """
        now = time.monotonic()
        if now < self._next_record:
            return
        self._next_record = now + _RECORD_SECONDS
        self._group.recorder.agree()  # the time tells workers how long the server has been in a user's rule
        if last is None or num_requests == self._num_recorded:
            return
        self._num_recorded = num_requests
        who = f"worker {last.worker}, rank {last.rank}"
        self._group.recorder.replace_details(f"{self._name}: {num_requests} requests, the last one of {who}")
