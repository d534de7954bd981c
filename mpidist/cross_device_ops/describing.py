"""The arrays of a call, in few words for people."""

from __future__ import annotations

from functools import lru_cache

from mpidist.cross_device_ops.plan import Spec

__all__ = ["bytes_text", "specs_text"]


@lru_cache(256)
def specs_text(specs: tuple[Spec, ...]) -> str:
    """Say which arrays these are: `3 x float32, 1.5 KiB`."""
    kinds: dict[str, int] = {}
    for spec in specs:
        kinds[str(spec.dtype)] = kinds.get(str(spec.dtype), 0) + 1
    counts = [f"{count} x {kind}" for kind, count in kinds.items()]
    nbytes = sum(spec.num_elements * spec.dtype.itemsize for spec in specs)
    return f"{', '.join(counts) or 'nothing'}, {bytes_text(nbytes)}"


def bytes_text(nbytes: float) -> str:
    """Say how much that is, in the unit that people would choose."""
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"
