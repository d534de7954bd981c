"""Standard error of a rank before its job ends: written in one piece, with the rank's name before each line."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Final

__all__ = ["FORWARD_SECONDS", "flush_standard_streams", "rank_prefix", "write_lines"]

# How long a launcher may take to forward what a rank has written, before the rank ends.
FORWARD_SECONDS: Final = 0.2


def rank_prefix(rank: int, hostname: str) -> str:
    """Return what stands before every line of a rank."""
    return f"[rank {rank} on {hostname}] "


def flush_standard_streams() -> None:
    """Flush the program's output, if possible: the program may have closed or replaced its streams."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()


def write_lines(text: str, prefix: str) -> None:
    """Write lines to standard error, after the program's output."""
    flush_standard_streams()
    os.write(2, "".join(f"{prefix}{line}\n" for line in text.splitlines()).encode(errors="replace"))
