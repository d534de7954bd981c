"""A digest of what must be equal on all ranks, and the bits that a rank changes in the digest of its next call."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, NamedTuple, final

__all__ = ["FINGERPRINT_MASK", "StepExit", "StopNotice", "fingerprint_of", "name_digest"]

FINGERPRINT_MASK: Final = (1 << 63) - 1  # fits into a signed 64-bit integer
_EXIT_BIT: Final = 1 << 40  # the lowest of `StepExit`
_NOTICE_BIT: Final = 1 << 62  # the highest of a fingerprint


def fingerprint_of(signature: Any) -> int:
    """Return 63 bits of a digest of `repr(signature)`."""
    return (
        int.from_bytes(hashlib.blake2b(repr(signature).encode(), digest_size=8).digest(), "little") & FINGERPRINT_MASK
    )


@lru_cache(4096)
def name_digest(call: str) -> int:
    """Return a digest of a call's name, a part of the call's fingerprint."""
    return fingerprint_of(call)


@final
class StopNotice:
    """The step before which all ranks of a group stop, because one of them was signalled to.

    A rank that was signalled changes a bit of the fingerprint of its next call. So the fingerprints differ, and all
    ranks gather the descriptions of their calls, which include `own`: as always when fingerprints differ. They do so,
    too, if every rank was signalled to stop. Calls without a notice cost nothing. `SlowRanks` uses the same bit.

    Attributes:
        bit: The bit to change in the fingerprint of the next call; 0 if this rank has no notice.
        stop_step: The first step that no rank makes any more, equal on all ranks; `None` while no rank was asked to
            stop.
    """

    def __init__(self) -> None:
        self.bit = self.step = 0
        self.stop_step: int | None = None
        self.reason = ""

    def give(self, reason: str) -> None:
        """Request a stop of all ranks, with the next call. Local; a handler of a signal may call it at any time."""
        if self.stop_step is None:
            self.reason = self.reason or reason
            self.bit = _NOTICE_BIT

    def ask(self) -> None:
        """Request the reports of all ranks, with the next call, whether they stop or not. Local."""
        self.bit = _NOTICE_BIT

    @property
    def own(self) -> tuple[int, str]:
        """This rank's step, and why to stop; "" if this rank was not signalled to."""
        return self.step, self.reason

    def decide(self, of_ranks: Iterable[tuple[int, str]]) -> None:
        """Set the stop of all ranks after the step of the rank that is the farthest. `of_ranks`: `own` of each rank."""
        gathered = list(of_ranks)
        if self.stop_step is None and any(reason for _, reason in gathered):
            self.stop_step = max(step for step, _ in gathered) + 1
            self.reason = ", ".join(reason for _, reason in gathered if reason)
        self.bit = 0
        if self.reason and self.stop_step is None:  # given since the ranks have gathered their reports
            self.bit = _NOTICE_BIT


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
        return _EXIT_BIT * self.num_left % _NOTICE_BIT if self.is_own else 0

    def __str__(self) -> str:
        kind, _, text = self.error.partition(": ")
        before = f"{self.num_left} steps, the last one " if self.num_left > 1 else ""
        return f"{before}step {self.step} by {kind}{f' ({text})' if text else ''}"
