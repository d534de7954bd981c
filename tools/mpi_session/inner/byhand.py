"""Watches a session that was started by mpiexec or srun by hand, where no outer session watches."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

from mpi4py import MPI

from mpi_session import stacks

ABORT_STATUS = 98


def common_folder(world: MPI.Comm) -> Path:
    """Return a new folder, of the same name on all hosts."""
    name = world.bcast(tempfile.mkdtemp(prefix="mpi-session-") if world.rank == 0 else None)
    path = Path(name)
    path.mkdir(exist_ok=True)
    return path


class Watch:
    """Ends all ranks, with their stacks in sight, when a test is stuck."""

    def __init__(self, world: MPI.Comm, directory: Path, grace: float) -> None:
        self._world, self._directory, self._grace = world, directory, grace
        self._places = dict(enumerate(world.allgather(stacks.here())))
        self._stderr = os.dup(2)  # pytest captures from now on
        self._timer: threading.Timer | None = None

    def begin(self, nodeid: str, limit: float) -> None:
        """Start the clock of a test; rank 0's is enough, as it ends all ranks."""
        if self._world.rank == 0:
            problem = f"{nodeid} did not end within its time limit of {limit:g} s"
            self._timer = threading.Timer(limit, self._give_up, [problem])
            self._timer.daemon = True
            self._timer.start()

    def end(self) -> None:
        """Stop the clock."""
        if self._timer:
            self._timer.cancel()

    def waiting(self, report: Any, seconds: float) -> None:
        """End all ranks if this one has failed and the others do not come."""
        if getattr(report, "failed", False) and seconds > self._grace:
            self._give_up(
                f"{report.nodeid} ({report.when}) failed on [rank {self._world.rank}], and after "
                f"{self._grace:g} s not all other ranks have come to its end\n{report.longreprtext}"
            )

    def close(self) -> None:
        """Remove the common folder."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _give_up(self, problem: str) -> None:
        shown = stacks.collect(self._directory, self._places, range(self._world.size))
        text = "".join(f"\n[rank {rank}] was at (most recent call first):\n{at}\n" for rank, at in shown.items())
        os.write(self._stderr, f"\nStuck: {problem}\n{text}".encode())
        self.close()
        self._world.Abort(ABORT_STATUS)
