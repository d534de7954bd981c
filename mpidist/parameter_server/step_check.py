"""Whether a worker says where its steps end, without which `staleness` bounds nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import final

from mpidist.parameter_server.messages.locations import Location

__all__ = ["StepCheck"]

logger = logging.getLogger("mpidist.parameter_server")


@final
class StepCheck:
    """Finds that a worker pushes step after step, and never calls `step_done()`.

    Args:
        staleness: How many steps a worker may be ahead of the slowest one; `None` for any number, which needs no check.
        rank: This worker's rank, for people.
    """

    def __init__(self, staleness: int | None, rank: int) -> None:
        self._staleness, self._rank = staleness, rank
        self._pushes: dict[int, int] | None = {}  # of each variable; `None` once a step was ended
        self._text = ""

    def count(self, locations: Iterable[Location]) -> None:
        """Count a change of variables. Warn once, when one was changed more often than `staleness` steps change it."""
        if self._pushes is None or self._staleness is None or self._text:
            return
        for location in locations:
            pushes = self._pushes[location.key] = self._pushes.get(location.key, 0) + 1
            if pushes > self._staleness + 1 and not self._text:
                self._text = (
                    f"rank {self._rank} has changed variable {location.name!r} {pushes} times and has never called "
                    f"step_done(), so staleness={self._staleness} bounds nothing; call strategy.step_done() at the end "
                    "of each step, or leave staleness out"
                )
                logger.warning("mpidist: %s", self._text)

    def end_step(self) -> None:
        """Note that this worker says where its steps end."""
        self._pushes, self._text = None, ""

    def error(self, call: str) -> RuntimeError | None:
        """Return the error of a call at which the worker's part is complete; `None` if all is well."""
        return RuntimeError(f"{call}: {self._text}") if self._text else None
