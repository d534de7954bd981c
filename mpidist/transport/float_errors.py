"""NumPy's arithmetic without its reports.

An overflow is a result of a reduction, and an error that one rank alone raised would leave the others waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, Final, final

import numpy as np

__all__ = ["without_float_errors"]


@final
class _UfuncCaller(threading.local):
    """This thread's way to call a ufunc.

    Entering a context takes a hundredth of the time of `np.errstate`, which a small call would feel. NumPy 1 keeps its
    error state elsewhere, so there it must be `np.errstate`.

    Attributes:
        run: Calls a function with arguments.
    """

    run: Callable[..., Any]

    def __init__(self) -> None:
        before, context = np.geterr(), copy_context()
        context.run(np.seterr, all="ignore")
        self.run = context.run
        if np.geterr() != before:
            np.seterr(**before)
            self.run = _run_in_errstate


_caller: Final = _UfuncCaller()


def without_float_errors(ufunc: np.ufunc, *operands: Any, out: Any = None) -> Any:
    """Call a ufunc so that no floating-point error is reported, whatever the program has asked of NumPy.

    Args:
        ufunc: It has to be NumPy's own: no Python runs in it, so that no signal handler can come in between.
        operands: What it works on: arrays of NumPy and numbers.
        out: The array that takes the result; a new one by default.
    """
    return _caller.run(ufunc, *operands, out=out)


def _run_in_errstate(ufunc: np.ufunc, *operands: Any, out: Any) -> Any:
    with np.errstate(all="ignore"):
        return ufunc(*operands, out=out)
