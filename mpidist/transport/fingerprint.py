"""A number that stands for what all ranks must have alike."""

from __future__ import annotations

import hashlib
from typing import Any, Final

__all__ = ["FINGERPRINT_MASK", "fingerprint_of"]

FINGERPRINT_MASK: Final = (1 << 63) - 1  # fits into a signed 64-bit integer


def fingerprint_of(signature: Any) -> int:
    """Return 63 bits of a digest that is the same on every rank for equal signatures."""
    return (
        int.from_bytes(hashlib.blake2b(repr(signature).encode(), digest_size=8).digest(), "little") & FINGERPRINT_MASK
    )
