"""Exit of a rank from a step by an exception, which the rank's next call compares with the other ranks."""

from __future__ import annotations

from typing import Final, NamedTuple, final

__all__ = ["StepExit"]

_BIT: Final = 1 << 61  # fingerprints have 63 bits; the highest is that of `StopNotice`


@final
class StepExit(NamedTuple):
    """An exception that left the function of `Strategy.run` on this rank.

    A rank that goes on after such an exception would make the calls of its next step while the other ranks make those
    of this one, alike but of other batches. So it changes a bit of the fingerprint of its next call: fingerprints are
    equal if all ranks left a step by an exception, or none did.

    Attributes:
        step: The number of the rank's `Strategy.run`, counted from 1.
        is_own: Whether the exception is this rank's own, which it has not reported to the other ranks.
    """

    step: int
    error: str
    is_own: bool

    @property
    def bit(self) -> int:
        """The bit to change in the fingerprint of the next call."""
        return _BIT if self.is_own else 0

    def __str__(self) -> str:
        kind, _, text = self.error.partition(": ")
        return f"step {self.step} by {kind}{f' ({text})' if text else ''}"
