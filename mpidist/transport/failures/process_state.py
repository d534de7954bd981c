"""Whether another process of this machine is alive: read from /proc, because MPI does not tell."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple, final

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
        pid: The process id, in `namespace`.
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
        """Return `RUNNING` (or asleep), `STOPPED` by a signal or a debugger, `GONE`, or `UNKNOWN`.

        Args:
            seen_from: The calling process; processes of other namespaces are `UNKNOWN`.
        """
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
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything
    return fields[0], int(fields[19])
