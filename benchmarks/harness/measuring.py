"""Turns and rounds: every way of every library once in a round, each round in another order."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from harness.group import Group, GroupError
from harness.work import Work

if TYPE_CHECKING:  # it starts MPI
    from harness.job import Job

_MOST_STEPS: Final = 200
_WARM_BELOW: Final = 0.05  # seconds: a longer step has its own cold start
_SLOW: Final = 0.25  # seconds: one measurement is enough


@dataclass(frozen=True)
class Timing:
    """The times of a way, in seconds a call."""

    work: Work
    peer: str
    way: str
    baseline: str  # the way that it is compared with
    first: float  # call, which plans, allocates and connects
    rounds: np.ndarray[Any, Any]  # [rounds], the median step of each
    steps: int  # of a round
    sent: tuple[float, ...] = ()  # bytes and packets of a host in a call, the most of all hosts

    @property
    def seconds(self) -> float:
        """The median round."""
        return float(np.median(self.rounds))


@dataclass
class _Turns:
    """A way of a group, while it is measured."""

    group: Group | Job
    way: str
    baseline: str
    first: float = 0.0
    warm: int = 0
    steps: int = 1
    rounds: list[float] = field(default_factory=list)
    sent: list[Any] = field(default_factory=list)  # [rounds][bytes, packets]

    def take_first(self, seconds: float) -> None:
        """Take the first step and a few more, to see how many fit into `seconds`."""
        self.first = max(answer["times"][0] for answer in self.group.ask("first", way=self.way))
        steps = 1 if self.first > _SLOW else 2
        answers = self.group.ask("turn", way=self.way, warm=0, steps=steps)
        step = max(answer["wall"] for answer in answers) / steps
        self.warm = 2 * (step < _WARM_BELOW)
        least = 1 if step > _SLOW else 3
        self.steps = max(least, min(_MOST_STEPS, int(seconds / step)))

    def take(self) -> None:
        """Take one turn, and keep its median step; a step takes the time of its slowest rank."""
        answers = self.group.ask("turn", way=self.way, warm=self.warm, steps=self.steps)
        self.rounds.append(float(np.median(np.max([answer["times"] for answer in answers], axis=0))))
        self.sent.append(np.max([answer["sent"] for answer in answers], axis=0))

    def timing(self, work: Work) -> Timing:
        what = work, self.group.peer.name, self.way, self.baseline, self.first, np.array(self.rounds), self.steps
        return Timing(*what, tuple(np.median(self.sent, axis=0).tolist()))


def fitting(groups: Sequence[Group | Job], work: Work) -> list[Group | Job]:
    """List the groups that fit into memory, all of them at once; the first come first."""
    available, chosen = _available_bytes(), []
    all_ranks = work.nbytes * (groups[0].ranks if groups else 0)
    taken = 1.5 * all_ranks  # memory of the group that works
    for group in groups:
        if group.failure or taken + group.peer.copies * all_ranks > 0.92 * available:
            continue
        taken += group.peer.copies * all_ranks
        chosen.append(group)
    return chosen


def _available_bytes() -> float:
    found = re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())
    return 1024.0 * int(found[1]) if found else float("inf")


def measure(
    groups: Sequence[Group | Job], work: Work, num_rounds: int, seconds: float, ways: Sequence[str] = ()
) -> list[Timing]:
    """Time the named ways of all groups, or all ways, in turns. A group that fails is ended."""
    fields = {**asdict(work), "shapes": [list(map(int, shape)) for shape in work.shapes]}
    turns: list[_Turns] = []
    for group in groups:
        answers = _attempt(group, group.ask, "prepare", **fields)
        chosen = [set(only) for only in (ways, group.peer.ways) if only]
        found = answers[0]["ways"].items() if answers else []
        turns += [_Turns(group, *way) for way in found if all(way[0] in only for only in chosen)]
    for one in turns:
        _attempt(one.group, one.take_first, seconds)
    for number in range(num_rounds):
        for at in np.random.default_rng(number).permutation(len(turns)):
            _attempt(turns[at].group, turns[at].take)
    for group in groups:
        _attempt(group, group.ask, "forget")
    return [one.timing(work) for one in turns if not one.group.failure]


def _attempt(group: Group | Job, act: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    if group.failure:
        return None
    try:
        return act(*arguments, **named)
    except GroupError as error:
        print(f"{group.peer.name} failed and is left out from here on: {error}", file=sys.stderr, flush=True)
        group.failure = str(error)
        group.close()
        return None
