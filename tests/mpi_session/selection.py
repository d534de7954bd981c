"""Which tests run at which number of ranks, and which skips CI accepts."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Sequence

import pytest

MARKS = (
    "ranks(*numbers, min=None, max=None): run only at these numbers of MPI ranks; with several, at those of all",
    "no_mpi: needs no MPI; runs at the first number of ranks of the run only",
    "gpu: runs on real GPUs, and is skipped where there are none",
    "core: the subset that is run with every MPI library",
    "whole: all cases of this test run, also with --sample",
)
_CASES = 3  # of a test with parameters, at each number of ranks; of long tables more: each case at one number of ranks
_MOST_STEPS = 4
ACCEPTED_SKIPS = ("needs a GPU", "needs a mount namespace")


def selected(item: pytest.Item, size: int, all_sizes: Sequence[int]) -> bool:
    """Tell whether a test runs at this number of ranks."""
    if item.get_closest_marker("no_mpi"):
        return size == all_sizes[0]
    return all(_allows(mark, size, item.nodeid) for mark in item.iter_markers("ranks"))


def sample(items: Iterable[pytest.Item], size: int) -> set[str]:
    """Choose some cases of each test with parameters, for one number of ranks: other cases for the next number.

    Of a test with more cases than a few, every second to fourth is chosen, in an order that looks random and is the
    same everywhere and always. At four numbers of ranks in a row every case is run at one of them.

    Returns:
        The node ids of those chosen; all cases of a test that is marked `whole`.
    """
    cases: dict[str, list[str]] = {}
    for item in items:
        test = item.nodeid if item.get_closest_marker("whole") else item.nodeid.partition("[")[0]
        cases.setdefault(test, []).append(item.nodeid)
    chosen: set[str] = set()
    for nodeids in cases.values():
        step = min(_MOST_STEPS, -(-len(nodeids) // _CASES))
        mixed = sorted(nodeids, key=lambda nodeid: zlib.crc32(nodeid.encode()))
        chosen.update(mixed[size % step :: step])
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


def in_ci() -> bool:
    """Tell whether this run is CI's, where a skip is a failure."""
    return os.environ.get("CI", "").lower() in ("true", "1") or os.environ.get("MPIDIST_CI") == "1"


def refused_skip(reason: str) -> str | None:
    """Return why CI refuses a skip with this reason, or None where it is accepted."""
    reason = reason.removeprefix("Skipped: ")
    if not in_ci() or reason.startswith(ACCEPTED_SKIPS):
        return None
    accepted = " or ".join(f'"{start}"' for start in ACCEPTED_SKIPS)
    return f"skipped in CI: {reason!r} (there only a reason that starts with {accepted} is accepted)"
