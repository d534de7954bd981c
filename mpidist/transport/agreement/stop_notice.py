"""Notice of a rank that was signalled to stop, sent with a call of all ranks: all stop before one step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

__all__ = ["StopNotice"]

_BIT: Final = 1 << 62  # fingerprints have 63 bits


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
            self.bit = _BIT

    def ask(self) -> None:
        """Request the reports of all ranks, with the next call, whether they stop or not. Local."""
        self.bit = _BIT

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
            self.bit = _BIT
