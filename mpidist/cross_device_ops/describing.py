"""The arrays of a call, in few words for people."""

from __future__ import annotations

from functools import lru_cache

from mpidist.cross_device_ops.plan import Spec
from mpidist.transport.texts import size_text

__all__ = ["packs_text", "specs_text"]


@lru_cache(256)
def specs_text(specs: tuple[Spec, ...]) -> str:
    """Say which arrays these are: `3 x float32, 1.5 KiB`."""
    kinds: dict[str, int] = {}
    for spec in specs:
        kinds[str(spec.dtype)] = kinds.get(str(spec.dtype), 0) + 1
    counts = [f"{count} x {kind}" for kind, count in kinds.items()]
    nbytes = sum(spec.num_elements * spec.dtype.itemsize for spec in specs)
    return f"{', '.join(counts) or 'nothing'}, {size_text(nbytes)}"


def packs_text(num_packs: int, is_stream: bool) -> str:
    """Say in which form arrays travel, after other words."""
    return ", in a stream" if is_stream else f", {num_packs} pack{'' if num_packs == 1 else 's'}"
