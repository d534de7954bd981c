"""Which numbers of a call are compressed, where they are, and what to say when they overflow."""

from __future__ import annotations

import logging
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.options import CommunicationOptions, Compression
from mpidist.transport import Levels, bfloat16, count_text

__all__ = ["Compressing", "OverflowReport"]

logger = logging.getLogger("mpidist.cross_device_ops")

_FLOAT32: Final = np.dtype(np.float32)


@final
class Compressing(NamedTuple):
    """What becomes of float32 numbers on their way.

    Attributes:
        half: What they are rounded to; `None` leaves them as they are.
        everywhere: Whether every rank rounds what it contributes; else its node rounds what leaves it.
    """

    half: np.dtype[Any] | None = None
    everywhere: bool = False

    @classmethod
    def of(cls, options: CommunicationOptions, levels: Levels, by_node: bool) -> Compressing:
        """Say what the options ask for.

        Args:
            options: Those of the call.
            levels: Of the group.
            by_node: Whether the algorithm knows what leaves a node.
        """
        if options.compression is Compression.NONE or levels.world.size == 1:
            return cls()
        everywhere = options.compress_everywhere or options.reproducible
        if levels.world.size == levels.within_node.size and not everywhere:
            return cls()  # nothing leaves the node
        half = bfloat16() if options.compression is Compression.BF16 else np.dtype(np.float16)
        return cls(half, everywhere or not by_node)

    def wire(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype in which a rank's numbers leave it."""
        return self.half if self.half is not None and self.everywhere and dtype == _FLOAT32 else dtype

    def between_nodes(self, wire: np.dtype[Any]) -> np.dtype[Any] | None:
        """Return the dtype in which numbers that left their rank as `wire` leave their node, if it is another."""
        return None if self.everywhere or wire != _FLOAT32 else self.half

    def of_a_shard(self, wire: np.dtype[Any]) -> np.dtype[Any] | None:
        """Return the dtype in which a rank's parts of other ranks' shards leave it or its node, if it is another."""
        return self.half if wire == _FLOAT32 else None


@final
class OverflowReport:
    """Logs that numbers became infinite on the way: at the first call that saw some, the second, fourth, and so on."""

    def __init__(self) -> None:
        self._seen = self._calls = 0

    def look(self, call: str, rank: int, overflowed: int) -> None:
        """Log what is new, if there is something.

        Args:
            call: The name of the call.
            rank: This rank.
            overflowed: How many numbers have overflowed up to now.
        """
        new, self._seen = overflowed - self._seen, overflowed
        if new <= 0:
            return
        self._calls += 1
        if self._calls & (self._calls - 1) == 0:
            logger.warning(
                "r%d | %s: %s too large for float16, which ends at 65504, and became infinite on the "
                "way; scale them down, or use compression='bf16'. Seen in %s up to now",
                rank,
                call,
                f"{new} number{' was' if new == 1 else 's were'}",
                count_text(self._calls, "call"),
            )
