"""What a save has cost: the record that `CheckpointManager.last_save` returns."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import final

from mpidist.checkpoint.saving import Snapshot
from mpidist.transport.text import size_text, time_text

__all__ = ["SaveRecord"]

logger = logging.getLogger("mpidist.checkpoint")


@final
@dataclass(frozen=True)
class SaveRecord:
    """What a save has cost this rank.

    Attributes:
        path: The checkpoint.
        blocked_seconds: How long `save` stopped the program.
        total_seconds: From the call of `save` until this rank's files were on the disk; on rank 0 until the checkpoint
            was in its place.
        nbytes: The bytes of the arrays that this rank has written.
        extra_bytes: The memory that the save needed beside the state: copies for the background, which the manager
            keeps, or copies of device memory.
    """

    path: str
    blocked_seconds: float
    total_seconds: float
    nbytes: int
    extra_bytes: int

    @property
    def bytes_per_second(self) -> float:
        """`nbytes` by `total_seconds`."""
        return self.nbytes / self.total_seconds

    @classmethod
    def of(cls, snapshot: Snapshot, blocked_seconds: float | None = None) -> SaveRecord:
        """Describe a save that is over now, and log it on rank 0.

        Args:
            snapshot: What was written.
            blocked_seconds: As the attribute; `None` if the program was stopped until now.
        """
        total = time.perf_counter() - snapshot.began
        blocked = total if blocked_seconds is None else blocked_seconds
        record = cls(str(snapshot.place), blocked, total, snapshot.nbytes, snapshot.extra_bytes)
        if snapshot.rank == 0:
            logger.info("mpidist: %s", record)
        return record

    def __str__(self) -> str:
        times = f"blocked {time_text(self.blocked_seconds)} of {time_text(self.total_seconds)}"
        written = f"wrote {size_text(self.nbytes)}, {size_text(self.bytes_per_second)}/s"
        return f"saved {self.path}: {times}; {written}; extra memory {size_text(self.extra_bytes)}"
