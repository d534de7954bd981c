"""Exit of a rank from a step by an exception, which the rank's next call compares with the other ranks."""

from __future__ import annotations

from typing import Final, NamedTuple, final

__all__ = ["StepExit"]

_BIT: Final = 1 << 40  # the lowest; fingerprints have 63 bits, and the highest is that of `StopNotice`


@final
class StepExit(NamedTuple):
    """An exception that left the function of `Strategy.run` on this rank.

    A rank that goes on after such an exception would make the calls of its next step while the other ranks make those
    of this one, alike but of other batches. So it changes bits of the fingerprint of its next call: fingerprints are
    equal if all ranks left as many steps by exceptions, or none did.

    Attributes:
        step: The number of the rank's `Strategy.run`, counted from 1.
        is_own: Whether the exception is this rank's own, which it has not reported to the other ranks.
        num_left: How many steps the rank has left since its last call, with this one.
    """

    step: int
    error: str
    is_own: bool
    num_left: int = 1

    def after(self, earlier: StepExit | None) -> StepExit:
        """Return this exit with those before it, of which no call has told the other ranks."""
        if earlier is None:
            return self
        return StepExit(self.step, self.error, self.is_own or earlier.is_own, earlier.num_left + 1)

    @property
    def bits(self) -> int:
        """The bits to change in the fingerprint of the next call."""
        return _BIT * self.num_left % (1 << 62) if self.is_own else 0

    def __str__(self) -> str:
        kind, _, text = self.error.partition(": ")
        before = f"{self.num_left} steps, the last one " if self.num_left > 1 else ""
        return f"{before}step {self.step} by {kind}{f' ({text})' if text else ''}"
