"""A notice that one rank gives all ranks with a call that they make anyway: before which step they stop together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

__all__ = ["StopNotice"]

_BIT: Final = 1 << 62  # fingerprints have 63 bits


@final
class StopNotice:
    """Before which step all ranks of a group stop, because one of them was asked to.

    A rank that has a notice to give changes a bit of the fingerprint of its next call. So the ranks differ, and do what
    they do when they differ: they gather what each of them says. So they do if all of them give a notice. Calls
    without a notice cost nothing.

    Attributes:
        bit: What changes the fingerprint of the next call; 0 if this rank has nothing to tell.
        step: The number of the step that this rank is in.
        stop_step: The step that no rank makes any more, equal on all ranks; `None` while no rank was asked to stop.
        reason: Why they stop.
    """

    def __init__(self) -> None:
        self.bit = self.step = 0
        self.stop_step: int | None = None
        self.reason = ""

    def give(self, reason: str) -> None:
        """Tell the other ranks with the next call. Local; a handler of a signal may call it at any time."""
        if self.stop_step is None:
            self.reason = self.reason or reason
            self.bit = _BIT

    @property
    def own(self) -> tuple[int, str]:
        """What this rank says: its step, and why to stop."""
        return self.step, self.reason

    def settle(self, of_ranks: Iterable[tuple[int, str]]) -> None:
        """Store what all ranks said, `own` in rank order: they stop after the step of the rank that is the farthest."""
        if self.stop_step is None:
            said = list(of_ranks)
            self.stop_step = max(step for step, _ in said) + 1
            self.reason = ", ".join(reason for _, reason in said if reason)
        self.bit = 0
