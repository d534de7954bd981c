"""Whether another process of this machine is alive: read from /proc, because MPI does not report it."""

from __future__ import annotations

import os
from typing import Final, NamedTuple, final

__all__ = ["GONE", "RUNNING", "STOPPED", "UNKNOWN", "Process"]

RUNNING: Final = "running"
STOPPED: Final = "stopped"
GONE: Final = "gone"
UNKNOWN: Final = "unknown"

_STAT_BYTES: Final = 4096  # more than the line has

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
            return cls(pid, _stat(pid)[1], os.stat("/proc/self/ns/pid").st_ino)
        except OSError:  # no /proc, or not all of it
            return cls(pid, 0, 0)

    def state(self, seen_from: Process) -> str:
        """Return `RUNNING` (or asleep), `STOPPED` (by a signal or a debugger), `GONE`, or `UNKNOWN` if out of sight."""
        if not self.namespace or self.namespace != seen_from.namespace:
            return UNKNOWN
        try:
            state, begun = _stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return GONE
        except OSError:
            return UNKNOWN
        return _STATES.get(state, RUNNING) if begun == self.begun else GONE


def _stat(pid: int) -> tuple[str, int]:
    """Return the state letter of a process, and when the process began."""
    file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)  # a third of what `pathlib` takes; an error reads it for each rank
    try:
        text = os.read(file, _STAT_BYTES)
    finally:
        os.close(file)
    fields = text[text.rindex(b")") + 2 :].split()  # the name before may hold anything
    return fields[0].decode(), int(fields[19])
