"""At which numbers of ranks each case of a test runs, and which skips CI accepts."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

MARKS = (
    "ranks(*numbers, min=None, max=None): run only at these numbers of MPI ranks; each case at all that are named",
    "no_mpi: needs no ranks; runs once, in one process, beside the launches of several ranks",
    "whole: all products of the parameters of this test are run, at each number of ranks",
)


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


def plan(items: Sequence[pytest.Item], teams: Sequence[Team]) -> dict[str, list[pytest.Item]]:
    """Say which tests each team runs, by the key of the team.

    Each case of a test runs at one number of ranks, and the cases at all numbers in turn. A test with fewer cases than
    numbers of ranks runs at each of them. Tests whose mark names several numbers, or that are marked `whole`, run each
    case at each number.

    Args:
        items: The cases of all tests.
        teams: The teams.
    """
    lanes = _lanes(items, teams)
    tests: dict[str, list[tuple[pytest.Item, list[Team]]]] = {}
    for item in items:
        own = [lanes[_module(item)]] if _is_once(item) else _teams_of_ranks(item, teams)
        if own:
            tests.setdefault(item.nodeid.partition("[")[0], []).append((item, own))
    chosen = {run for test, cases in tests.items() for run in _runs_of(test, cases)}
    return {team.key: [item for item in items if (team.key, item.nodeid) in chosen] for team in teams}


def _runs_of(test: str, cases: Sequence[tuple[pytest.Item, list[Team]]]) -> Iterator[tuple[str, str]]:
    """Choose the runs of one test, as keys of teams and ids of tests."""
    turn = zlib.crc32(test.encode())
    # In an order that looks random, and is the same everywhere, as tables often count in step with the ranks.
    mixed = sorted(cases, key=lambda case: zlib.crc32(case[0].nodeid.encode()))
    for number, (item, teams) in enumerate(mixed):
        is_whole = item.get_closest_marker("whole") or any(len(mark.args) > 1 for mark in item.iter_markers("ranks"))
        for at in range(len(teams)) if is_whole else range(number, max(number + 1, len(teams)), len(mixed)):
            yield teams[(turn + at) % len(teams)].key, item.nodeid


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


def _allows(mark: pytest.Mark, size: int, nodeid: str) -> bool:
    low, high = mark.kwargs.get("min", 1), mark.kwargs.get("max", size)
    numbers = [*mark.args, low, high]
    if set(mark.kwargs) - {"min", "max"} or not all(isinstance(number, int) for number in numbers):
        raise pytest.UsageError(
            f"{nodeid}: @pytest.mark.ranks takes numbers of ranks, min= and max=, "
            f"got {mark.args} {mark.kwargs}: write ranks(2, 4) or ranks(min=2)"
        )
    return low <= size <= high and (not mark.args or size in mark.args)


def in_ci() -> bool:
    """Tell whether this run is CI's, where a skip is a failure."""
    return os.environ.get("CI", "").lower() in ("true", "1") or os.environ.get("TEST_CI") == "1"


def refused_skip(reason: str, accepted: Sequence[str]) -> str | None:
    """Return why CI refuses a skip with this reason, or None where it begins with one that is accepted."""
    reason = reason.removeprefix("Skipped: ")
    if not in_ci() or reason.startswith(tuple(accepted)):
        return None
    starts = " or ".join(f'"{start}"' for start in accepted) or "of mpi_accepted_skips (there is none)"
    return f"skipped in CI: {reason!r} (there only a reason that starts with {starts} is accepted)"
