"""Facts about the ranks before MPI is started: from the launcher's variables and the processes of the node."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from mpidist.transport.mpi.child_process import launcher_here, read_stat
from mpidist.transport.mpi.launcher_variables import numbers_of
from mpidist.transport.stacks import places_text
from mpidist.transport.text import name_ranks

__all__ = ["LaunchedRank", "let_first_rank_end"]

_FIRST_SECONDS: Final = 10.0  # how long rank 0, on this node, may take to say what is wrong on a busy machine
_ELSEWHERE_SECONDS: Final = 2.0  # the same, if rank 0 is on another node


@final
@dataclass(frozen=True)
class LaunchedRank:
    """This process as one of several that a launcher started.

    Attributes:
        local_size: How many of them on this node; 0 if the launcher does not report it.
        launcher: The id of the launcher's process on this node.
    """

    rank: int
    size: int
    local_size: int
    launcher: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> LaunchedRank | None:
        """Describe this process; `None` for one that no launcher started, or a launcher started alone."""
        rank, size, local_size = numbers_of(environ) or (0, 0, 0)
        launcher = launcher_here() if size > 1 else None
        return None if launcher is None else cls(rank, size, local_size, launcher)

    def arrive(self) -> socket.socket:
        """Show other ranks of this node that this rank starts MPI, until the returned socket is closed.

        The socket has a name in Linux's abstract namespace: it is no file, and is gone when the process ends.
        """
        sign = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with suppress(OSError):  # it only helps to name ranks in a warning
            sign.bind(self._sign_of(self.rank))
        return sign

    def arrived(self) -> list[int]:
        """List the ranks of this node that have called `arrive`, this rank among them."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
            return [rank for rank in range(self.size) if rank == self.rank or self._has_arrived(asking, rank)]

    def have_all_come(self) -> bool:
        """Whether all ranks of the job are known to have called `arrive`: then MPI itself takes long."""
        return self.local_size == self.size and len(self.arrived()) == self.size

    def missing(self) -> str:
        """Name the ranks that have not called `arrive`, as far as this node can find out."""
        arrived, alive = self.arrived(), self._alive()
        working = [rank for rank in alive if rank not in arrived]
        here = {*arrived, *alive}
        parts = []
        if working:
            processes = ", ".join(str(alive[rank]) for rank in working)
            where = places_text(self.launcher, working)
            parts.append(f"{name_ranks(working)} (process {processes}) did not come to start it{where}")
        if self.local_size == self.size:
            ended = [rank for rank in range(self.size) if rank not in here]
            if ended:
                parts.append(f"the program of {name_ranks(ended)} has ended")
        elif self.local_size > len(here):
            parts.append(f"{self.local_size - len(here)} of the {self.local_size} programs on this node have ended")
        if not parts:
            return f"all ranks known on this node have come, {name_ranks(arrived)} of {self.size}"
        return ", and ".join(parts)

    def has_ended(self, rank: int) -> bool:
        """Whether the program of a rank of this node has ended."""
        return rank not in self._alive()

    def _sign_of(self, rank: int) -> str:
        return f"\0mpidist-starts-{os.getuid()}-{self.launcher}-{rank}"

    def _has_arrived(self, asking: socket.socket, rank: int) -> bool:
        try:
            asking.connect(self._sign_of(rank))
        except OSError:
            return False
        return True

    def _alive(self) -> dict[int, int]:
        """Find the processes that the launcher started on this node, and that have not ended, by rank."""
        alive = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError):  # the process has ended meanwhile, or is another user's
                _, state, parent, _ = read_stat(int(path.name))
                if parent == self.launcher and state not in "ZXx":
                    pairs = (path / "environ").read_text(errors="replace").split("\0")
                    found = numbers_of(dict(pair.split("=", 1) for pair in pairs if "=" in pair))
                    if found is not None:
                        alive[found[0]] = int(path.name)
        return dict(sorted(alive.items()))


def let_first_rank_end(environ: Mapping[str, str]) -> None:
    """Wait a while until rank 0 has ended, before this process ends for the same reason. Local.

    Rank 0 reports why, and a launcher may end all ranks when one has ended, even before that report. Does not
    wait if MPI has been started, as rank 0 cannot end MPI without this rank.
    """
    rank, mpi = LaunchedRank.of(environ), sys.modules.get("mpi4py.MPI")
    if rank is None or rank.rank == 0 or (mpi is not None and mpi.Is_initialized()):
        return
    if rank.has_ended(0):
        time.sleep(_ELSEWHERE_SECONDS)
        return
    until = time.monotonic() + _FIRST_SECONDS
    while not rank.has_ended(0) and time.monotonic() < until:
        time.sleep(0.02)
