"""Whether another process of this machine is alive: read from /proc, because MPI does not report it."""

from __future__ import annotations

import os
from typing import Final, NamedTuple, final

from mpidist.transport.mpi.child_process import read_stat

__all__ = ["GONE", "RUNNING", "STOPPED", "UNKNOWN", "Process"]

RUNNING: Final = "running"
STOPPED: Final = "stopped"
GONE: Final = "gone"
UNKNOWN: Final = "unknown"

_STATES: Final = {"T": STOPPED, "t": STOPPED, "Z": GONE, "X": GONE, "x": GONE}


@final
class Process(NamedTuple):
    """The identity of a process, which a later process with the same id does not have.

    Attributes:
        begun: When the process began, in ticks since the machine was started.
        namespace: The namespace of process ids: each container has its own. 0 where it is unknown.
    """

    pid: int
    begun: int
    namespace: int

    @classmethod
    def own(cls) -> Process:
        """Describe the calling process."""
        pid = os.getpid()
        try:
            return cls(pid, read_stat(pid)[3], os.stat("/proc/self/ns/pid").st_ino)
        except OSError:  # no /proc, or not all of it
            return cls(pid, 0, 0)

    def state(self, seen_from: Process) -> str:
        """Return `RUNNING` (or asleep), `STOPPED` (by a signal or a debugger), `GONE`, or `UNKNOWN` if out of sight."""
        if not self.namespace or self.namespace != seen_from.namespace:
            return UNKNOWN
        try:
            _, state, _, begun = read_stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return GONE
        except OSError:
            return UNKNOWN
        return _STATES.get(state, RUNNING) if begun == self.begun else GONE
