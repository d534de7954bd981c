"""Marks on errors that several ranks raise alike: the ranks."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["is_shared_by", "mark_shared"]


def mark_shared(error: BaseException, ranks: Iterable[int]) -> None:
    """Mark an error as raised alike by several ranks, so that it is printed once.

    Args:
        error: The error.
        ranks: The ranks that raise the error, as they are numbered in the whole job.
    """
    vars(error).update(raised_on_all_ranks=True, raised_on=frozenset(ranks))


def is_shared_by(error: BaseException, ranks: frozenset[int]) -> bool:
    """Whether an error is marked as raised by all of these ranks of the job."""
    raised_on: frozenset[int] = vars(error).get("raised_on", frozenset())
    return ranks <= raised_on
