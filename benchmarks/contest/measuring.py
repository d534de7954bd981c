"""Turns and rounds: every way of every library once in a round, A B C A B C."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from contest.group import Group, GroupError
from contest.work import Work

__all__ = ["Timing", "measure", "prepare"]

_MOST_STEPS: Final = 100
_WARM_BELOW: Final = 0.05  # seconds: a longer step has its own cold start
_SLOW: Final = 1.0  # seconds: once is enough to know it


@dataclass(frozen=True)
class Timing:
    """What a way took, in seconds a call.

    Attributes:
        work: What was summed.
        peer: Whose way.
        way: Its name.
        first: The first call, which plans, allocates and connects.
        rounds: [rounds], the median step of each.
        steps: Number of steps in a round.
    """

    work: Work
    peer: str
    way: str
    first: float
    rounds: np.ndarray[Any, Any]
    steps: int

    @property
    def seconds(self) -> float:
        """The median round."""
        return float(np.median(self.rounds))


@dataclass
class _Turns:
    """A way of a group, as it is measured."""

    group: Group
    way: str
    first: float = 0.0
    step: float = 0.0
    steps: int = 1
    warm: int = 0

    def take_first(self, seconds: float) -> None:
        """Take the first step and a few more, to know how many fit into `seconds`."""
        self.first = max(answer["times"][0] for answer in self.group.ask("first", way=self.way))
        steps = 1 if self.first > _SLOW else 2
        answers = self.group.ask("turn", way=self.way, warm=0, steps=steps)
        step = max(answer["wall"] for answer in answers) / steps
        self.warm = 2 * (step < _WARM_BELOW)
        least = 1 if step > _SLOW else 3
        self.steps = max(least, min(_MOST_STEPS, int(seconds / step)))

    def take(self) -> float:
        """Take one turn, and return its median step; a step takes what its slowest rank takes."""
        answers = self.group.ask("turn", way=self.way, warm=self.warm, steps=self.steps)
        return float(np.median(np.max([answer["times"] for answer in answers], axis=0)))


def prepare(groups: Sequence[Group], work: Work) -> tuple[list[Group], list[str]]:
    """Say which groups have the memory for a work, and name those that have not. The first come first."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if not _available() else _available()
    fitting, left_out = [], []
    taken = 1.5 * work.nbytes * groups[0].ranks if groups else 0  # what one group takes while it works
    for group in groups:
        taken += group.peer.copies * work.nbytes * group.ranks
        (fitting if taken < 0.92 * free else left_out).append(group)
    return fitting, [group.peer.name for group in left_out]


def _available() -> int:
    try:
        with open("/proc/meminfo") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 0


def measure(groups: list[Group], work: Work, num_rounds: int, seconds: float) -> list[Timing]:
    """Time all ways of all groups side by side. A group that fails is ended, and taken off the list."""
    turns: list[_Turns] = []
    shapes = [list(map(int, shape)) for shape in work.shapes]
    with_work: dict[str, Any] = {"kind": work.kind, "name": work.name, "shapes": shapes, "calls": work.calls}
    for group in list(groups):
        with _Failing(groups, group, turns):
            ways = group.ask("prepare", **with_work)[0]["ways"]
            turns += [_Turns(group, way) for way in ways]
    for one in list(turns):
        with _Failing(groups, one.group, turns):
            one.take_first(seconds)
    rounds: dict[int, list[float]] = {id(one): [] for one in turns}
    for _ in range(num_rounds):
        for one in list(turns):
            with _Failing(groups, one.group, turns):
                rounds[id(one)].append(one.take())
    for group in {id(one.group): one.group for one in turns}.values():
        with _Failing(groups, group, turns):
            group.ask("forget")
    return [
        Timing(work, one.group.peer.name, one.way, one.first, np.array(rounds[id(one)]), one.steps) for one in turns
    ]


class _Failing:
    """Takes a group that fails out of the run, says so, and goes on with the others."""

    def __init__(self, groups: list[Group], group: Group, turns: list[_Turns]) -> None:
        self._groups, self._group, self._turns = groups, group, turns

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, GroupError):
            return False
        if self._group in self._groups:
            print(f"{self._group.peer.name} failed and is left out from here on: {error}", file=sys.stderr)
            self._groups.remove(self._group)
            self._turns[:] = [one for one in self._turns if one.group is not self._group]
            self._group.end()
        return True
