"""Turns and rounds: every way of every library once in a round, A B C A B C."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from contest.group import Group, GroupError
from contest.work import Work

__all__ = ["Timing", "fitting", "measure"]

_MOST_STEPS: Final = 200
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
    warm: int = 0
    steps: int = 1
    rounds: list[float] = field(default_factory=list)

    def take_first(self, seconds: float) -> None:
        """Take the first step and a few more, to know how many fit into `seconds`."""
        self.first = max(answer["times"][0] for answer in self.group.ask("first", way=self.way))
        steps = 1 if self.first > _SLOW else 2
        answers = self.group.ask("turn", way=self.way, warm=0, steps=steps)
        step = max(answer["wall"] for answer in answers) / steps
        self.warm = 2 * (step < _WARM_BELOW)
        least = 1 if step > _SLOW else 3
        self.steps = max(least, min(_MOST_STEPS, int(seconds / step)))

    def take(self) -> None:
        """Take one turn, and keep its median step; a step takes what its slowest rank takes."""
        answers = self.group.ask("turn", way=self.way, warm=self.warm, steps=self.steps)
        self.rounds.append(float(np.median(np.max([answer["times"] for answer in answers], axis=0))))


def fitting(groups: Sequence[Group], work: Work) -> list[Group]:
    """List the groups for which there is memory, all of them at once; the first come first."""
    available, chosen = _available_bytes(), []
    all_ranks = work.nbytes * (groups[0].ranks if groups else 0)
    taken = 1.5 * all_ranks  # what a group takes while it works, and gives back
    for group in groups:
        if group.failure or taken + group.peer.copies * all_ranks > 0.92 * available:
            continue
        taken += group.peer.copies * all_ranks
        chosen.append(group)
    return chosen


def _available_bytes() -> float:
    try:
        with open("/proc/meminfo") as file:
            return next(1024.0 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")


def measure(groups: Sequence[Group], work: Work, num_rounds: int, seconds: float) -> list[Timing]:
    """Time all ways of all groups side by side. A group that fails is ended, and the others go on."""
    shapes = [list(map(int, shape)) for shape in work.shapes]
    turns: list[_Turns] = []
    for group in groups:
        answers = _attempt(group, group.ask, "prepare", kind=work.kind, name=work.name, shapes=shapes, calls=work.calls)
        turns += [_Turns(group, way) for way in answers[0]["ways"]] if answers else []
    for one in turns:
        _attempt(one.group, one.take_first, seconds)
    for _ in range(num_rounds):
        for one in turns:
            _attempt(one.group, one.take)
    for group in groups:
        _attempt(group, group.ask, "forget")
    return [
        Timing(work, one.group.peer.name, one.way, one.first, np.array(one.rounds), one.steps)
        for one in turns
        if not one.group.failure
    ]


def _attempt(group: Group, act: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    if group.failure:
        return None
    try:
        return act(*arguments, **named)
    except GroupError as error:
        print(f"{group.peer.name} failed and is left out from here on: {error}", file=sys.stderr, flush=True)
        group.failure = str(error)
        group.end()
        return None
