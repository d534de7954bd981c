"""What happens when a rank's program fails: it says so once, and ends the job."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, NoReturn, final

__all__ = ["install", "report", "uninstall"]

_EXIT_CODE: Final = 1
_INTERRUPTED: Final = 130
_FORWARD_SECONDS: Final = 0.2  # a launcher needs a moment to pass on what a rank wrote before it is killed
_LOWER_RANK_FIRST_SECONDS: Final = 0.5

_installed: list[tuple[Any, Any]] = []  # what was there before


def install(abort: Callable[[int], None], rank: int, hostname: str) -> None:
    """Make an uncaught exception of this process end the whole job. Once; later calls do nothing.

    `sys.exit` with a code other than 0 counts as one, where nobody catches it.

    Args:
        abort: Ends all ranks with the exit code that it is given, `MPI_Abort`.
        rank: This rank in the world, for the text.
        hostname: Its host, for the text.
    """
    if _installed or hasattr(sys, "ps1"):  # an interactive session survives its exceptions
        return
    _installed.append((sys.excepthook, sys.exit))

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if getattr(error, "raised_on_all_ranks", False) and rank > 0:
            # The same text comes from rank 0, which ends this rank too. Only if it does not, speak up.
            time.sleep(_LOWER_RANK_FIRST_SECONDS)
        report(kind, error, trace, f"[rank {rank} on {hostname}] ")
        time.sleep(_FORWARD_SECONDS)
        abort(_INTERRUPTED if issubclass(kind, KeyboardInterrupt) else _EXIT_CODE)

    def leave(exit_: _Exit) -> None:
        text = f"{exit_.where}SystemExit: {exit_.args[0]}\n"
        _write(f"Traceback (most recent call last):\n{text}", f"[rank {rank} on {hostname}] ")
        time.sleep(_FORWARD_SECONDS)
        abort(exit_.args[0] if isinstance(exit_.args[0], int) else _EXIT_CODE)

    def exit_(code: object = None, /) -> NoReturn:
        if code in (None, 0):
            raise SystemExit(code)
        raise _Exit(code, leave)

    sys.excepthook = hook
    sys.exit = exit_


def uninstall() -> None:
    """Let exceptions be those of this process alone again, as in one that was forked from a rank."""
    while _installed:
        sys.excepthook, sys.exit = _installed.pop()


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None, prefix: str) -> None:
    """Write a traceback to standard error in one piece, `prefix` before every line."""
    _write("".join(traceback.format_exception(kind, error, trace)), prefix)


@final
class _Exit(SystemExit):
    """What `sys.exit` raises. It notices when nobody caught it.

    Python has no hook for a program that ends with a code. But then the interpreter itself asks for the code, and not
    a function of Python.
    """

    def __init__(self, code: object, leave: Callable[[_Exit], None]) -> None:
        super().__init__(code)
        self.where = "".join(traceback.format_stack(sys._getframe(2)))
        self._leave = leave

    @property
    def code(self) -> object:  # type: ignore[override]
        if _asked_by_the_interpreter():
            self._leave(self)
        return self.args[0]


def _asked_by_the_interpreter() -> bool:
    try:
        sys._getframe(2)
    except ValueError:
        return True
    return False


def _write(text: str, prefix: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(2, "".join(f"{prefix}{line}\n" for line in text.splitlines()).encode(errors="replace"))
