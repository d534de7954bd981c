"""A call of a process group as torch sees it: something to wait for, and a future."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any, Final, TypeVar, cast, final

import torch
from torch._C._distributed_c10d import Work as TorchWork

from mpidist.transport.group.thread_guard import OtherThreadError

__all__ = ["MpiWork", "long_form", "untraced"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Calls that torch has in a short form, too: how many arguments hold tensors, and what may follow in place of options.
_SHORT_FORMS: Final = {
    "allreduce": (1, ("op", "timeout")),
    "broadcast": (1, ("root", "timeout")),
    "reduce": (1, ("root", "op", "timeout")),
    "allgather": (2, ("timeout",)),
    "gather": (2, ("root", "timeout")),
    "scatter": (2, ("root", "timeout")),
    "reduce_scatter": (2, ("op", "timeout")),
    "barrier": (0, ("timeout",)),
}
_OF_OPTIONS: Final = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


def long_form(call: str, arguments: Any, options: Any) -> tuple[Any, Any]:
    """Return the arguments of a call in torch's long form: lists, and options. The short one is of single tensors."""
    count, names = _SHORT_FORMS.get(call, (0, ()))
    tensors, rest = arguments[:count], arguments[count:]
    is_single = any(isinstance(one, torch.Tensor) for one in tensors)
    has_no_options = any(one is not None and not hasattr(one, "timeout") for one in rest[:1])
    if not names or not (is_single or has_no_options or options.keys() & {*names}):
        return arguments, options
    fields = {_OF_OPTIONS[name]: value for name, value in {**dict(zip(names, rest, strict=False)), **options}.items()}
    lists = [[one] for one in tensors] if is_single else tensors
    return (*lists, SimpleNamespace(asyncOp=True, **fields)), {}


def untraced(function: _Function) -> _Function:
    """Keep `torch.compile` from tracing a function that C++ calls in a compiled model, as DDP does.

    It imports nothing: the compiler takes seconds, and traces nothing before a program has imported it.
    """
    skipped = torch._disable_dynamo(function)

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        return (skipped if "torch._dynamo" in sys.modules else function)(*arguments, **options)

    return cast("_Function", call)


@final
class _Future(torch.futures.Future):
    """The future of a call, whose wait advances the call: no thread does."""

    def __init__(self, wait: Callable[[], object]) -> None:
        super().__init__()
        self._wait = wait

    def wait(self) -> Any:
        self._wait()
        return super().wait()

    def value(self) -> Any:
        self._wait()
        return super().value()


@final
class MpiWork(TorchWork):
    """A call of a process group. Without `finish` it is over.

    Args:
        result: The tensors of the call.
        finish: Waits for the call, and raises its error; `is_done` returns whether it would return at once.
        source: Returns the rank that a message came from.
    """

    def __init__(
        self,
        result: Any,
        finish: Callable[[], object] | None = None,
        is_done: Callable[[], bool] = bool,
        source: Callable[[], int] = int,
    ) -> None:
        super().__init__()
        self._result, self._finish, self._is_done, self._source = result, finish, is_done, source
        self._future: _Future | None = None
        self._error: BaseException | None = None

    @untraced
    def wait(self, timeout: Any = None) -> bool:
        """Wait for the call. The deadline is the call's own, which all ranks share."""
        if self._finish is not None:
            try:
                self._finish()
            except OtherThreadError:  # which may still wait
                raise
            except BaseException as error:
                self._error = error
            self._finish = None
        if self._error is not None:  # and not in the future: C++ takes an error that Python sets for tensors
            raise self._error
        if self._future is not None and not self._future.done():
            self._future.set_result(self._result)
        return True

    synchronize = wait

    @untraced
    def is_completed(self) -> bool:
        """Whether the call is over. Advances it."""
        if self._finish is not None and self._is_done():
            self.wait()
        return self._finish is None

    def is_success(self) -> bool:
        return self._finish is None and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Any:
        return self._result

    def source_rank(self) -> int:
        return self._source()

    _source_rank = source_rank

    @untraced
    def get_future(self) -> Any:
        """Return the future of the call.

        DDP waits for it in C++, where nothing advances a call. So in a backward pass a callback of autograd finishes
        the call before DDP's own callback waits, and raises its error out of `backward()`. Elsewhere the call is
        finished at once.
        """
        if self._future is None:
            self._future = _Future(self.wait)
            if self._finish is None or torch._C._current_autograd_node() is None:
                self.wait()
            else:
                torch.autograd.Variable._execution_engine.queue_callback(self.wait)
        return self._future
