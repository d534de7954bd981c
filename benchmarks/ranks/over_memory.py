"""No library at all: how fast this machine's memory is, by NumPy, with one rank at work and with all."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import numpy as np

from ranks.way import Library, Way

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ranks.work import Work

__all__ = ["Memory"]


class Memory(Library):
    """Processes that do not speak with each other."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.versions = {"numpy": np.__version__, "python": platform.python_version()}

    def ways(self, work: Work) -> dict[str, Way]:
        """Copy, and add to, arrays of the work's size; multiply them in place, and into other ones."""
        (one,), (two,) = work.empty(), work.empty()
        one.fill(1)
        two.fill(0)

        def copy() -> None:
            np.copyto(two, one)

        def add() -> None:
            np.add(two, one, out=two)

        def multiply(into: Any) -> Callable[[], None]:
            def call() -> None:
                np.multiply(one, 1, out=into)

            return call

        def alone(function: Callable[[], None]) -> Callable[[], None]:
            return function if self.rank == 0 else lambda: None

        def way(function: Callable[[], None]) -> Way:
            def call(_: int) -> Any:
                function()

            return Way([], call, "")

        return {
            "copy": way(copy),
            "add": way(add),
            "copy alone": way(alone(copy)),
            "add alone": way(alone(add)),
            "multiply": way(multiply(one)),
            "multiply into others": way(multiply(two)),
        }
