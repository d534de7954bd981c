"""The exit code with which the program is about to end, and a hook that is called before."""

from __future__ import annotations

import builtins
import ctypes
import gc
import os
import sys
from collections.abc import Callable
from traceback import walk_stack, walk_tb
from typing import Any, Final, NoReturn

from mpidist.transport.stacks import Stack
from mpidist.transport.tracebacks import stack_text

__all__ = [
    "end_at_once",
    "ends_normally",
    "stack_of",
    "status_of",
    "watch_exits",
    "watch_immediate_exits",
    "where_raised",
]

end_at_once: Final = os._exit  # also while `watch_immediate_exits` has replaced it
_CODE: Final = SystemExit.__dict__["code"]
_WHERE: Final = "raised_at"  # in `vars` of an exception: the stack, as text
_STACK: Final = "raised_in"  # and for flight recorders


def watch_exits(is_ending: Callable[[SystemExit], None]) -> Callable[[], None]:
    """Call a function when a `SystemExit` that nobody caught is about to end the program; return what undoes this.

    Python has no hook for this. But the interpreter reads `SystemExit.code` at its end, when no Python function is on
    the stack: a property in the place of `SystemExit.code` detects that, wherever the exception was raised.
    """

    def code_of(error: SystemExit) -> Any:
        if _is_asked_by_interpreter():
            is_ending(error)
        return _CODE.__get__(error)

    _set_code_attribute(property(code_of, _CODE.__set__))
    names: list[tuple[dict[str, Any], str, Any]] = [(vars(sys), "exit", sys.exit)]
    names += [(vars(builtins), name, vars(builtins)[name]) for name in ("exit", "quit") if name in vars(builtins)]
    # The script may have imported `exit` from `sys` before. Until Python 3.12, what that raises has no code yet.
    main = vars(sys.modules["__main__"])
    names += [(main, name, value) for name, value in main.items() if value is sys.exit]
    for space, name, _ in names:
        space[name] = _exit

    def put_back() -> None:
        _set_code_attribute(_CODE)
        for space, name, before in names:
            space[name] = before

    return put_back


def watch_immediate_exits(is_ending: Callable[[int], int]) -> Callable[[], None]:
    """Call a function with the exit status when `os._exit` is about to end this process; return what undoes this.

    The function returns the status with which the process ends.
    """
    own = os.getpid()

    def exit_at_once(status: int) -> NoReturn:
        if os.getpid() == own:  # processes that were forked end so
            status = is_ending(status)
        end_at_once(status)

    def put_back() -> None:
        os._exit = end_at_once

    os._exit = exit_at_once
    return put_back


def status_of(error: BaseException) -> int:
    """Return the exit status of a program that ends with this exception, 0 to 255."""
    if not isinstance(error, SystemExit):
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    code = _CODE.__get__(error)
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1  # anything else is a text that Python writes to stderr


def ends_normally(error: BaseException) -> bool:
    """Whether an exception is no failure: it ends the program with exit status 0, or it ends a generator."""
    return isinstance(error, GeneratorExit) or status_of(error) == 0


def where_raised(error: SystemExit) -> str:
    """Return the lines of the exception's traceback, or of the stack that `_exit` stored."""
    if _WHERE in vars(error):
        return str(vars(error)[_WHERE])
    return stack_text(error.__traceback__)


def stack_of(error: BaseException) -> Stack:
    """Return the stack of the exception's traceback, or the one that `_exit` stored."""
    stack: Stack | None = vars(error).get(_STACK)
    return stack or Stack.of_walk([*walk_tb(error.__traceback__)][::-1])


def _exit(code: Any = None, /) -> NoReturn:
    """Do what `sys.exit` does, and store the stack in the exception."""
    error = SystemExit(code)
    if status_of(error):
        vars(error)[_WHERE] = stack_text(sys._getframe(1))
        vars(error)[_STACK] = Stack.of_walk(walk_stack(sys._getframe(1)))
    raise error


def _set_code_attribute(attribute: Any) -> None:
    for space in gc.get_referents(SystemExit.__dict__):  # the dict behind the read-only view; only CPython has one
        if isinstance(space, dict) and "code" in space:
            space["code"] = attribute
            ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))


def _is_asked_by_interpreter() -> bool:
    """Whether no Python function called the property that calls this function."""
    try:
        sys._getframe(2)
    except ValueError:
        return True
    return False
