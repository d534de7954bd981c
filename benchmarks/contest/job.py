"""The ranks of the job that this program is itself a rank of: for clusters, where another launcher starts the ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ranks.over_mpi import Mpi
from ranks.rank import Rank

from contest.environments import PEERS, Peer
from contest.group import GroupError

__all__ = ["Job"]


class Job:
    """All ranks of MPI's world, of which rank 0 measures and the others obey. Collective.

    They have the methods of a group. The barrier before each step is MPI's.
    """

    def __init__(self) -> None:
        library = Mpi()
        self.peer: Peer = replace(PEERS[0], name="job")
        self.ranks, self.is_first, self.versions, self.failure = library.size, library.rank == 0, library.versions, ""
        self._comm, self._rank = library.comm, Rank(library, library.comm.Barrier)

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Let all ranks do something together, from rank 0."""
        self._comm.bcast({"do": do, **arguments}, 0)
        answers: list[dict[str, Any]] = self._comm.gather(self._rank.answer({"do": do, **arguments}), 0)
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise GroupError(errors[0])
        return answers

    def obey(self) -> None:
        """Do what rank 0 asks, until it ends."""
        while command := self._comm.bcast(None, 0):
            self._comm.gather(self._rank.answer(command), 0)

    def close(self) -> None:
        """Let the other ranks go."""
        self._comm.bcast(None, 0)
