"""Errors that several ranks raise alike, and which ranks these are."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["is_shared_by", "mark_shared"]


def mark_shared(error: BaseException, ranks: Iterable[int]) -> None:
    """Note in an error that several ranks raise it alike, so that printing it once will do.

    Args:
        error: The error.
        ranks: The ranks that raise it, as they are numbered in the whole job.
    """
    vars(error).update(raised_on_all_ranks=True, raised_on=frozenset(ranks))


def is_shared_by(error: BaseException, ranks: frozenset[int]) -> bool:
    """Whether all these ranks of the job raise this error alike."""
    raised_on: frozenset[int] = vars(error).get("raised_on", frozenset())
    return ranks <= raised_on
