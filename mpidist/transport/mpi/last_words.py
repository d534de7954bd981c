"""What a rank writes before its job ends: in one piece, and with the rank's name before every line."""

from __future__ import annotations

import os
import sys
from typing import Final

__all__ = ["FORWARD_SECONDS", "rank_prefix", "write_lines"]

# A launcher needs a moment to pass on what a rank wrote, before it ends the rank.
FORWARD_SECONDS: Final = 0.2


def rank_prefix(rank: int, hostname: str) -> str:
    """Return what stands before every line of a rank."""
    return f"[rank {rank} on {hostname}] "


def write_lines(text: str, prefix: str) -> None:
    """Write lines to standard error, behind what the program has written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(2, "".join(f"{prefix}{line}\n" for line in text.splitlines()).encode(errors="replace"))
