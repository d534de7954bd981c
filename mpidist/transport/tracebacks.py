"""Tracebacks for people: those of a program's own frames, without the frames within this package."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from functools import lru_cache
from types import FrameType, TracebackType
from typing import Final

from mpidist import errors

__all__ = ["is_printed", "is_within_package", "shorten_printed", "stack_text", "traceback_text"]

_PACKAGE: Final = os.path.dirname(errors.__file__) + os.sep
_FULL_NAME: Final = "MPIDIST_TRACEBACK"
_HINT: Final = f"  (then within mpidist: {_FULL_NAME}=full prints these frames, too)\n"


def traceback_text(error: BaseException) -> str:
    """Format an exception as Python does, without the frames within this package, unless `MPIDIST_TRACEBACK=full`.

    A line states it, if the exception was raised within this package, and is not of one of its kinds.
    """
    report = traceback.TracebackException.from_exception(error)
    if _is_full():
        return "".join(report.format())
    is_deliberate = type(error).__module__ == errors.__name__ or getattr(error, "raised_on_all_ranks", False)
    ends_within = bool(report.stack) and is_within_package(report.stack[-1].filename)
    reports: list[traceback.TracebackException | None] = [report]
    for one in reports:  # the list grows
        if one is not None:
            one.stack[:] = _outer(one.stack)
            reports += [one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())]
    text, last = "".join(report.format()), "".join(report.format_exception_only())
    return text.removesuffix(last) + _HINT + last if ends_within and not is_deliberate else text


def stack_text(frames: TracebackType | FrameType | None) -> str:
    """Format the lines of a traceback, or of the stack below a frame, likewise."""
    if isinstance(frames, FrameType):
        stack = traceback.extract_stack(frames)
    else:
        stack = traceback.extract_tb(frames)
    return "".join(traceback.format_list(stack if _is_full() else _outer(stack)))


def is_within_package(file: str) -> bool:
    """Whether a file is one of this package, or of another installation of it, which the ranks of a job may use."""
    folder, name, _ = file.rpartition("/mpidist/")
    return file.startswith(_PACKAGE) or _is_package(folder + name)


@lru_cache
def _is_package(folder: str) -> bool:
    return folder != "" and os.path.isfile(f"{folder}transport/tracebacks.py")


def is_printed(file: str) -> bool:
    """Whether tracebacks have the frames of a file."""
    return _is_full() or not is_within_package(file)


def shorten_printed() -> None:
    """Make Python print exceptions that pass through this package as `traceback_text` formats them. Local.

    Does nothing if the program, or an interactive session, prints exceptions in a way of its own.
    """
    if sys.excepthook is not sys.__excepthook__ or hasattr(sys, "ps1"):
        return

    def print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _has_inner_frames(trace) and sys.stderr is not None:
            sys.stderr.write(traceback_text(error))
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = print_error


def _has_inner_frames(trace: TracebackType | None) -> bool:
    """Whether an exception passed through this package."""
    return any(is_within_package(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(trace))


def _outer(stack: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Leave out frames within this package, and those of `with` statements beside them."""
    are_inner = [False, *(is_within_package(frame.filename) for frame in stack), False]
    return [
        frame
        for at, frame in enumerate(stack, 1)
        if not (are_inner[at] or (frame.filename == contextlib.__file__ and (are_inner[at - 1] or are_inner[at + 1])))
    ]


def _is_full() -> bool:
    return os.environ.get(_FULL_NAME, "").strip() == "full"
