"""A digest of what must be equal on all ranks."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any, Final

__all__ = ["FINGERPRINT_MASK", "fingerprint_of", "name_digest"]

FINGERPRINT_MASK: Final = (1 << 63) - 1  # fits into a signed 64-bit integer


def fingerprint_of(signature: Any) -> int:
    """Return 63 bits of a digest of `repr(signature)`."""
    return (
        int.from_bytes(hashlib.blake2b(repr(signature).encode(), digest_size=8).digest(), "little") & FINGERPRINT_MASK
    )


@lru_cache(4096)
def name_digest(call: str) -> int:
    """Return a digest of a call's name, a part of the call's fingerprint."""
    return fingerprint_of(call)
