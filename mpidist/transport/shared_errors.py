"""Errors that several ranks raise: which ranks, and which rank prints the whole text."""

from __future__ import annotations

from collections.abc import Iterable
from threading import get_ident
from typing import NamedTuple, TypeVar, final

__all__ = [
    "Following",
    "callback_errors",
    "following_of",
    "has_left",
    "is_of_callback",
    "is_shared",
    "is_shared_by",
    "mark_following",
    "mark_left",
    "mark_shared",
    "note_callback_error",
    "of_callback",
    "repeat_of",
]


_Error = TypeVar("_Error", bound=BaseException)

callback_errors: dict[int | None, tuple[BaseException, type[BaseException]]] = {}  # by the ident of the waiting thread


@final
class Following(NamedTuple):
    """Printed form of an error that follows the error of another rank, which prints the whole text.

    `may_go_on`: the other rank may catch its exception, and then prints nothing.
    """

    summary: str
    may_go_on: bool


def mark_shared(error: BaseException, ranks: Iterable[int]) -> None:
    """Mark an error as raised alike by several ranks, as the job numbers them, so that it is printed once."""
    vars(error).update(raised_on_all_ranks=True, raised_on=frozenset(ranks))


def is_shared(error: BaseException) -> bool:
    """Whether an error is marked as raised alike by several ranks."""
    return bool(vars(error).get("raised_on"))


def is_shared_by(error: BaseException, ranks: frozenset[int]) -> bool:
    """Whether an error is marked as raised by all of these ranks of the job."""
    raised_on: frozenset[int] = vars(error).get("raised_on", frozenset())
    return ranks <= raised_on


def mark_following(error: BaseException, summary: str, may_go_on: bool) -> None:
    """Note in an error that it follows the error of another rank: see `Following`."""
    vars(error)["following"] = Following(summary, may_go_on)


def following_of(error: BaseException) -> Following | None:
    """Return what `mark_following` has noted in an error; `None` if it was not called."""
    following: Following | None = vars(error).get("following")
    return following


def mark_left(error: BaseException) -> None:
    """Note in an error that its rank has left, and that the other ranks continue without this one."""
    vars(error)["has_left"] = True


def has_left(error: BaseException) -> bool:
    """Whether `mark_left` was called for an error: then its rank ends, and the job does not."""
    return bool(vars(error).get("has_left"))


def repeat_of(error: _Error, reason: str = "") -> _Error:
    """Make an error like one that was raised before, marked alike, to be raised by a later call for a reason."""
    again = type(error)(f"{reason}{error}")
    vars(again).update(vars(error))
    return again


def note_callback_error(error: BaseException, raised_as: type[BaseException], ident: int | None) -> None:
    """Store an error that leaves a callback: the library that has called raises a `raised_as` whose text ends alike.

    `ident`: of the thread that waits for the callback; `None` if it is unknown.
    """
    callback_errors[ident] = error, raised_as


def is_of_callback(error: BaseException | None) -> bool:
    """Whether an error is a stored one."""
    return any(own is error for own, _ in list(callback_errors.values()))


def of_callback(error: BaseException) -> BaseException:
    """Return the stored error that this one stands for, with this one's traceback; this one, if it stands for none."""
    for ident in (get_ident(), None):
        own, raised_as = callback_errors.get(ident, (error, ()))
        if isinstance(error, raised_as) and str(error).endswith(f"{type(own).__name__}: {own}"):
            callback_errors.pop(ident, None)
            return own.with_traceback(error.__traceback__)
    return error
