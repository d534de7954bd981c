"""What happens when a rank's program fails: it says so once, and ends the job."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Final

__all__ = ["install"]

_EXIT_CODE: Final = 1
_INTERRUPTED: Final = 130
_FORWARD_SECONDS: Final = 0.2  # a launcher needs a moment to pass on what a rank wrote before it is killed
_LOWER_RANK_FIRST_SECONDS: Final = 0.5

_installed: list[bool] = []


def install(abort: Callable[[int], None], rank: int, hostname: str) -> None:
    """Make an uncaught exception of this process end the whole job. Once; later calls do nothing.

    Args:
        abort: Ends all ranks with the exit code that it is given, `MPI_Abort`.
        rank: This rank in the world, for the text.
        hostname: Its host, for the text.
    """
    if _installed or hasattr(sys, "ps1"):  # an interactive session survives its exceptions
        return
    _installed.append(True)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if getattr(error, "raised_on_all_ranks", False) and rank > 0:
            # The same text comes from rank 0, which ends this rank too. Only if it does not, speak up.
            time.sleep(_LOWER_RANK_FIRST_SECONDS)
        report(kind, error, trace, f"[rank {rank} on {hostname}] ")
        time.sleep(_FORWARD_SECONDS)
        abort(_INTERRUPTED if issubclass(kind, KeyboardInterrupt) else _EXIT_CODE)

    sys.excepthook = hook


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None, prefix: str) -> None:
    """Write a traceback to standard error in one piece, `prefix` before every line."""
    sys.stdout.flush()
    sys.stderr.flush()
    lines = "".join(traceback.format_exception(kind, error, trace)).splitlines()
    os.write(2, "".join(f"{prefix}{line}\n" for line in lines).encode(errors="replace"))
