"""Common parts of the commands that start programs."""

from __future__ import annotations

import argparse
import ctypes
import shlex
import signal
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, final

__all__ = ["THREAD_VARIABLES", "Launch", "RefusedError", "command_text", "count", "first_of", "prepare_child"]

THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_PARENT_DEATH: Final = 1  # PR_SET_PDEATHSIG


@final
class Launch(NamedTuple):
    """A command line, the variables that are set for it, and the threads of a rank."""

    command: list[str]
    variables: dict[str, str]
    threads: int


class RefusedError(Exception):
    """Reason why a command refuses its arguments, and what to do."""


def command_text(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Write a command as it is typed in a shell, behind the variables that are set for it."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(command)])


def count(text: str) -> int:
    """Read a number of 1 or more: for `argparse`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def first_of(names: Sequence[str], most: int) -> str:
    """List the first of some names, and count the rest: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def prepare_child() -> None:
    """Unblock all signals of a new process, and end it when its parent ends: for `subprocess`."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
