"""What a rank writes to standard error before its job ends: in one piece, with the rank's name before each line."""

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
    """Flush what the program has written, if it can be: the program may have closed or replaced its streams."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()


def write_lines(text: str, prefix: str) -> None:
    """Write lines to standard error, behind what the program has written."""
    flush_standard_streams()
    os.write(2, "".join(f"{prefix}{line}\n" for line in text.splitlines()).encode(errors="replace"))
