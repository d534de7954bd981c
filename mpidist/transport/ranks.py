"""Rank numbers as people write them: `0-2, 5`."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["name_ranks"]


def name_ranks(ranks: Iterable[int]) -> str:
    """Name ranks in as few words as it takes: `rank 3`, `ranks 0-2, 5`."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ordered) != 1 else ''} {', '.join(texts)}"
