"""The ranks of the job that this program is itself a rank of: for clusters, where another launcher starts the ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from backends.mpi import Mpi

from harness.environments import PEERS, Peer
from harness.group import GroupError
from harness.rank import Rank


class Job:
    """All ranks of MPI's world, of which rank 0 measures and the others obey. Collective.

    It has the methods of a group. The barrier before each step is MPI's.
    """

    def __init__(self) -> None:
        backend = Mpi(Path())
        backend.barrier = backend.comm.Barrier
        self.peer: Peer = replace(PEERS[0], name="job")
        self.ranks, self.is_first, self.versions, self.failure = backend.size, backend.rank == 0, backend.versions, ""
        self._comm, self._rank = backend.comm, Rank(backend)

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Let all ranks execute a command. On rank 0."""
        self._comm.bcast({"do": do, **arguments}, 0)
        answers: list[dict[str, Any]] = self._comm.gather(self._rank.answer({"do": do, **arguments}), 0)
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise GroupError(errors[0])
        return answers

    def obey(self) -> None:
        """Execute the commands of rank 0, until it ends."""
        while command := self._comm.bcast(None, 0):
            self._comm.gather(self._rank.answer(command), 0)

    def close(self) -> None:
        """End the other ranks."""
        self._comm.bcast(None, 0)
