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
    "whole: all cases of this test are in a sample",
    "long: takes long, and is in no sample",
)
_CASES = 3  # of a test with parameters, at each number of ranks; of long tables more: each case at one number of ranks
_MOST_STEPS = 4
ACCEPTED_SKIPS = ("needs a GPU", "needs a mount namespace")


def selected(item: pytest.Item, size: int, all_sizes: Sequence[int]) -> bool:
    """Tell whether a test runs at this number of ranks."""
    if item.get_closest_marker("no_mpi"):
        return size == all_sizes[0]
    return all(_allows(mark, size, item.nodeid) for mark in item.iter_markers("ranks"))


def sample(items: Iterable[pytest.Item], number: int) -> set[str]:
    """Choose some cases of each test with parameters: others for another number.

    Of a test with more cases than a few, every second to fourth is chosen, in an order that looks random and is the
    same everywhere and always. With four numbers in a row every case is in one of the samples.

    Returns:
        The node ids of those chosen; all cases of a test that is marked `whole`, and none of one that is marked `long`.
    """
    cases: dict[str, list[str]] = {}
    for item in items:
        if item.get_closest_marker("long") is None:
            test = item.nodeid if item.get_closest_marker("whole") else item.nodeid.partition("[")[0]
            cases.setdefault(test, []).append(item.nodeid)
    chosen: set[str] = set()
    for nodeids in cases.values():
        step = min(_MOST_STEPS, -(-len(nodeids) // _CASES))
        mixed = sorted(nodeids, key=lambda nodeid: zlib.crc32(nodeid.encode()))
        chosen.update(mixed[number % step :: step])
    return chosen


def plan(
    items: Sequence[pytest.Item], sizes: Sequence[int], sample_number: int | None, rest_number: int | None
) -> dict[int, list[pytest.Item]]:
    """Say which tests run at each number of ranks.

    Args:
        items: All tests.
        sizes: The numbers of ranks of the run.
        sample_number: Run a sample, another one at each number of ranks; `None` runs all.
        rest_number: Run what that sample runs at no number of ranks.
    """
    chosen = {size: [item for item in items if selected(item, size, sizes)] for size in sizes}
    number = rest_number if sample_number is None else sample_number
    if number is None:
        return chosen
    samples = {size: sample(of_size, number + size) for size, of_size in chosen.items()}
    if sample_number is not None:
        return {size: [item for item in chosen[size] if item.nodeid in samples[size]] for size in sizes}
    sampled = set[str]().union(*samples.values())
    return {size: [item for item in chosen[size] if item.nodeid not in sampled] for size in sizes}


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
