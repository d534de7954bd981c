"""The ratios that are asked for, and what was measured of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from contest.measuring import Timing

__all__ = ["MPIS", "Verdict", "verdicts"]

MPIS: Final = ("mpich", "openmpi")
_RAW: Final = ("raw", "raw in place")  # a call a tensor
_CUT: Final = ("raw 1 MiB",)
_MODELS: Final = ("resnet50", "bert_base", "gpt2_small")
_SMALL: Final = ("4", "1K", "4K", "16K")
_LARGE: Final = ("64K", "256K", "1M", "4M", "16M", "64M", "256M")
_PAIRS: Final = (("mpidist", ("raw",)), ("mpidist in place", ("raw in place",)))


@dataclass(frozen=True)
class _Target:
    """A ratio, theirs / ours, that is asked for.

    Attributes:
        works: For which works.
        ours: Our way: of the faster MPI, or of each.
        theirs: The ways that it is held against: the fastest of them.
        asked: The least ratio, or the most microseconds above theirs.
        same_mpi: Whether theirs is over the same MPI as ours, for each MPI.
        is_above: Whether microseconds above theirs are asked for.
    """

    works: tuple[str, ...]
    ours: str
    theirs: tuple[str, ...]
    asked: float | None
    same_mpi: bool = False
    is_above: bool = False


@dataclass(frozen=True)
class Verdict:
    """What was asked and got.

    Attributes:
        text: Work, ours, theirs.
        asked: The figure, or nothing if it is only shown.
        got: The median of the rounds, the lowest and the highest.
        is_met: Whether the median meets it; None if nothing is asked.
    """

    text: str
    asked: str
    got: str
    is_met: bool | None


def _few_ranks() -> Iterator[_Target]:
    """List what is asked with a core for each rank."""
    yield _Target(_MODELS, "mpidist in place", _RAW, 1.15)
    yield _Target(_MODELS, "mpidist", ("raw",), 1.15)
    yield _Target(_MODELS, "mpidist in place", ("gloo DDP",), 4.5)
    yield _Target(_MODELS, "mpidist in place", ("horovod grouped",), 3.5)
    yield _Target(_MODELS, "mpidist in place", ("tensorflow packs",), 12)
    yield _Target(_MODELS, "mpidist in place", ("chainermn naive",), None)
    for ours in ("mpidist in place", "mpidist per node", "mpidist symmetric"):
        yield _Target(_MODELS, ours, _CUT, None)
        yield _Target(("tiny1000",), ours, _RAW, None)
    yield _Target(_MODELS, "mpidist in place", ("raw bucket",), None)
    yield _Target(_MODELS, "mpidist per node", _RAW, 1.3)
    yield _Target(_MODELS, "mpidist symmetric", _RAW, 2.5)
    yield _Target(_MODELS, "mpidist symmetric", ("gloo DDP",), 10)
    for sizes, asked in ((("1M", "16M"), 1.2), (("64M", "256M"), 1.7), (("64K", "256K"), 0.8)):
        for ours, theirs in _PAIRS:
            yield _Target(sizes, ours, theirs, asked, same_mpi=True)
    for size in _LARGE:
        yield _Target((size,), "mpidist symmetric", _RAW, 4 if size == "64M" else 2.3)
    yield _Target(_LARGE, "mpidist symmetric", _CUT, None)
    yield _Target(_SMALL, "mpidist", ("gloo",), 20)
    for ours, theirs in _PAIRS:
        yield _Target(_SMALL, ours, theirs, 12, same_mpi=True, is_above=True)
    for ours, theirs in _PAIRS:
        yield _Target(("many10000",), ours, theirs, 3, same_mpi=True)
    yield _Target(("many10000",), "mpidist in place", ("raw bucket",), None)


def _many_ranks() -> Iterator[_Target]:
    """List what is asked with more ranks than cores."""
    works = ("tiny1000", *_MODELS, *_LARGE[1:])
    for ours, theirs in _PAIRS:
        yield _Target(works, ours, theirs, 1.3, same_mpi=True)
    yield _Target(works, "mpidist symmetric", ("raw in place",), 3, same_mpi=True)


def verdicts(timings: Sequence[Timing], ranks: int, cpus: int) -> list[Verdict]:
    """Compare what was measured with what is asked of so many ranks."""
    targets = _few_ranks() if ranks <= cpus else _many_ranks()
    found = [
        _verdict(target, ours, theirs)
        for target in targets
        for work in target.works
        for ours, theirs in _pairs(target, [timing for timing in timings if timing.work.name == work])
    ]
    return sorted(found, key=lambda verdict: verdict.is_met is not False)


def _pairs(target: _Target, timings: Sequence[Timing]) -> Iterator[tuple[Timing, Timing]]:
    """Find ours and theirs: the fastest of each, within each MPI if that is asked."""
    for peers in [(name,) for name in MPIS] if target.same_mpi else [MPIS]:
        ours = [timing for timing in timings if timing.way == target.ours and timing.peer in peers]
        theirs = [timing for timing in timings if timing.way in target.theirs]
        if target.same_mpi:
            theirs = [timing for timing in theirs if timing.peer in peers]
        if ours and theirs:
            yield min(ours, key=lambda timing: timing.seconds), min(theirs, key=lambda timing: timing.seconds)


def _verdict(target: _Target, ours: Timing, theirs: Timing) -> Verdict:
    text = f"{ours.work.name}: {ours.way} ({ours.peer}) / {theirs.way} ({theirs.peer})"
    if target.is_above:
        above = (ours.rounds - theirs.rounds) * 1e6
        is_met = bool(np.median(above) <= target.asked) if target.asked is not None else None
        return Verdict(text, f"<= +{target.asked} us", f"{_spread(above)} us", is_met)
    ratios = theirs.rounds / ours.rounds
    if target.asked is None:
        return Verdict(text, "", _spread(ratios), None)
    return Verdict(text, f">= {target.asked}", _spread(ratios), bool(np.median(ratios) >= target.asked))


def _spread(rounds: np.ndarray[Any, Any]) -> str:
    return f"{np.median(rounds):.2f} ({rounds.min():.2f} to {rounds.max():.2f})"
