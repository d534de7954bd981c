"""Which tests run at which number of ranks, and which skips CI accepts."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pytest

MARKS = (
    "ranks(*numbers, min=None, max=None): run only at these numbers of MPI ranks; with several, at those of all",
    "no_mpi: needs no ranks; runs once, in one process, beside the launches of several ranks",
    "gpu: runs with CuPy on GPUs that are real or emulated, and is skipped where there are none",
    "core: the subset that is run with every MPI library",
    "whole: all cases of this test are in a sample",
    "long: takes long, and is in a sample that leaves another one out alone",
)
_FEW = 12  # runs: of a test with fewer, a sample has as many as of one with so many
_THOROUGH = "MPI_SESSION_THOROUGH"
# Where GPUs are emulated, tests have as many as they want, and lack only what no emulated one has.
_NEEDS_A_GPU = ("needs a real GPU", "needs a GPU, and MPI") if "TEST_GPUS" in os.environ else ("needs a GPU",)
ACCEPTED_SKIPS = (*_NEEDS_A_GPU, "needs a mount namespace")


class Team(NamedTuple):
    """The processes of a launch: so many ranks, or one for a share of the tests that need no ranks.

    Attributes:
        size: Number of ranks.
        lane: Which share, from 1 on; 0 for ranks.
    """

    size: int
    lane: int = 0

    @property
    def name(self) -> str:
        """What tests of this team have behind their names."""
        return "no MPI" if self.lane else f"{self.size} rank{'s' if self.size > 1 else ''}"

    @property
    def key(self) -> str:
        """A word for this team alone."""
        return f"{self.size}.{self.lane}"


def teams_of(sizes: Sequence[int], num_lanes: int) -> list[Team]:
    """Return the teams of a run."""
    return [*map(Team, sizes), *(Team(1, lane) for lane in range(1, num_lanes + 1))]


class Sample(NamedTuple):
    """Which of the runs of each test are chosen: a run is a case at a number of ranks.

    Attributes:
        step: Every so manieth run of a test, at least one. Of tests with few runs, or with cases at one number of ranks
            only, more. Those marked `whole` run all.
        rest_of: Of another sample, this step: what it chooses is left out; 0 leaves nothing out. `None` leaves out
            those marked `long`, and the others may be short.
    """

    step: int
    rest_of: int | None = None

    @classmethod
    def of(cls, text: str) -> Sample:
        """Read what was asked for, as '4', or '2-4': what '2' chooses and '4' does not."""
        words = text.split("-")
        if not 1 <= len(words) <= 2 or not all(map(str.isdigit, words)) or not int(words[0]):
            raise pytest.UsageError(
                f"--sample got {text!r}: give every how manieth case, as 4, or as 1-4 what 4 leaves"
            )
        return cls(*map(int, words))


def plan(items: Sequence[pytest.Item], teams: Sequence[Team], sample: Sample | None) -> dict[str, list[pytest.Item]]:
    """Say which tests each team runs, by the key of the team."""
    lanes = _lanes(items, teams)
    runs = [
        (team, item)
        for item in items
        for team in ([lanes[_module(item)]] if _is_once(item) else _teams_of_ranks(item, teams))
    ]
    if sample is not None:
        left_out = _chosen(runs, sample.rest_of) if sample.rest_of else set()
        chosen = _chosen(runs, sample.step, with_long=sample.rest_of is not None) - left_out
        runs = [(team, item) for team, item in runs if (team.key, item.nodeid) in chosen]
    return {team.key: [item for runner, item in runs if runner == team] for team in teams}


def _is_once(item: pytest.Item) -> bool:
    return item.get_closest_marker("no_mpi") is not None


def _module(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _lanes(items: Sequence[pytest.Item], teams: Sequence[Team]) -> dict[str, Team]:
    """Deal out the modules with tests that need no ranks: neighbours, which are alike, to different lanes."""
    lanes = [team for team in teams if team.lane] or teams[:1]
    modules = dict.fromkeys(_module(item) for item in items if _is_once(item))
    return {module: lanes[number % len(lanes)] for number, module in enumerate(modules)}


def _teams_of_ranks(item: pytest.Item, teams: Sequence[Team]) -> list[Team]:
    marks = list(item.iter_markers("ranks"))
    return [team for team in teams if not team.lane and all(_allows(mark, team.size, item.nodeid) for mark in marks)]


def _chosen(runs: Iterable[tuple[Team, pytest.Item]], step: int, with_long: bool = False) -> set[tuple[str, str]]:
    """Choose some of the runs of each test, of as many cases as possible, and at all numbers of ranks in turn.

    The order is one that looks random, and is the same everywhere and always; what a large step chooses, a smaller one
    chooses, too.
    """
    tests: dict[str, dict[str, list[str]]] = {}
    chosen: set[tuple[str, str]] = set()
    for team, item in runs:
        is_whole = item.get_closest_marker("whole") is not None
        if item.get_closest_marker("long") is not None:
            chosen.update([(team.key, item.nodeid)] if with_long else [])
        elif is_whole:
            chosen.add((team.key, item.nodeid))
        else:
            tests.setdefault(item.nodeid.partition("[")[0], {}).setdefault(item.nodeid, []).append(team.key)
    for test, cases in tests.items():
        mixed = sorted(cases.items(), key=lambda case: zlib.crc32(case[0].encode()))
        turn = zlib.crc32(test.encode())
        rounds = range(max(map(len, cases.values())))
        # Each case at one number of ranks, another one for the next case; then each at another; and so on.
        order = [
            (keys[(turn + number + lap) % len(keys)], nodeid)
            for lap in rounds
            for number, (nodeid, keys) in enumerate(mixed)
            if lap < len(keys)
        ]
        num_runs = max(len(order), 2 * len(cases))  # so that with every second run each case is tried
        chosen.update(order[: max(-(-num_runs // step), _FEW // step)])
    return chosen


def _allows(mark: pytest.Mark, size: int, nodeid: str) -> bool:
    low, high = mark.kwargs.get("min", 1), mark.kwargs.get("max", size)
    numbers = [*mark.args, low, high]
    if set(mark.kwargs) - {"min", "max"} or not all(isinstance(number, int) for number in numbers):
        raise pytest.UsageError(
            f"{nodeid}: @pytest.mark.ranks takes numbers of ranks, min= and max=, "
            f"got {mark.args} {mark.kwargs}: write ranks(2, 4) or ranks(min=2)"
        )
    return low <= size <= high and (not mark.args or size in mark.args)


def is_thorough() -> bool:
    """Tell whether tests that can be short or long shall be long: in the runs that take what a sample has left out."""
    return os.environ.get(_THOROUGH) == "1"


def set_thorough(sample: Sample | None) -> None:
    """Let `is_thorough` tell it, before the modules of tests ask."""
    os.environ[_THOROUGH] = "1" if sample is not None and sample.rest_of is not None else "0"


def in_ci() -> bool:
    """Tell whether this run is CI's, where a skip is a failure."""
    return os.environ.get("CI", "").lower() in ("true", "1") or os.environ.get("TEST_CI") == "1"


def refused_skip(reason: str) -> str | None:
    """Return why CI refuses a skip with this reason, or None where it is accepted."""
    reason = reason.removeprefix("Skipped: ")
    if not in_ci() or reason.startswith(ACCEPTED_SKIPS):
        return None
    accepted = " or ".join(f'"{start}"' for start in ACCEPTED_SKIPS)
    return f"skipped in CI: {reason!r} (there only a reason that starts with {accepted} is accepted)"
