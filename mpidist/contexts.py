"""Which strategy is current on this thread, and seen from where: across replicas, or from inside one.

The answer is a stack per thread. `Strategy.scope` and `run`, `merge_call` and `update` push an entry and pop it
again; everything else only looks. Hardly anything of mpidist is imported here, so that every module may look.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from mpidist.options import ReduceOp

if TYPE_CHECKING:
    from mpidist.replica_context import ReplicaContext
    from mpidist.strategy import Strategy

__all__ = [
    "Entry",
    "called",
    "current",
    "default_strategy",
    "experimental_set_strategy",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "innermost",
    "pop",
    "push",
    "set_default_factory",
]


@final
@dataclass(frozen=True)
class Entry:
    """One level of the stack: a strategy, and the replica context if one is current.

    Attributes:
        strategy: The strategy.
        replica_context: The replica context; `None` is cross-replica context.
        updating: Whether this is the function of `StrategyExtended.update`.
        merging: Whether this is the function of `ReplicaContext.merge_call`.
        by_set_strategy: Whether `experimental_set_strategy` made it, and no `with` statement will close it.
    """

    strategy: Strategy
    replica_context: ReplicaContext | None = None
    updating: bool = False
    merging: bool = False
    by_set_strategy: bool = False


@final
class _Stack(threading.local):
    def __init__(self) -> None:
        self.entries: list[Entry] = []


@final
class _Default:
    """The strategy that is current when none was entered: this process alone. Made when first asked for."""

    def __init__(self) -> None:
        self.factory: Callable[[], tuple[Strategy, ReplicaContext]] | None = None
        self.made: tuple[Strategy, ReplicaContext] | None = None
        self._lock = threading.Lock()

    def get(self) -> tuple[Strategy, ReplicaContext]:
        if self.made is None:
            if self.factory is None:
                raise RuntimeError("there is no default strategy before `import mpidist` is through")
            with self._lock:  # threads that ask at once get the same one
                self.made = self.made or self.factory()
        return self.made


_stack = _Stack()
_default = _Default()


def set_default_factory(factory: Callable[[], tuple[Strategy, ReplicaContext]]) -> None:
    """Say how the default strategy and its replica context are made."""
    _default.factory = factory


def get_strategy() -> Strategy:
    """Return the current strategy: that of the innermost scope, else the default one of this process alone."""
    entry = current()
    return _default.get()[0] if entry is None else entry.strategy


def default_strategy() -> Strategy:
    """Return the strategy of this process alone."""
    return _default.get()[0]


def has_strategy() -> bool:
    """Whether a strategy other than the default one is current."""
    entry = current()
    return entry is not None and not _is_default(entry.strategy)


def get_replica_context() -> ReplicaContext | None:
    """Return the current replica context.

    Returns:
        Inside the function of `Strategy.run` its replica context, in cross-replica context `None`, and where
        nothing was entered the default one, of one replica.
    """
    entry = current()
    return _default.get()[1] if entry is None else entry.replica_context


def in_cross_replica_context() -> bool:
    """Whether the code sees all replicas: inside a scope, `merge_call` or `update`, and not inside `run`."""
    entry = current()
    return entry is not None and entry.replica_context is None


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Enter a strategy's scope without a `with` statement, in place of the one that was set before.

    Args:
        strategy: The strategy; `None` leaves.

    Raises:
        RuntimeError: Inside a `with strategy.scope():`.
        TypeError: If it is no strategy.
    """
    if strategy is not None and not hasattr(strategy, "scope"):
        raise TypeError(f"experimental_set_strategy takes a strategy or None, got {strategy!r}")
    entries = _stack.entries
    if entries and not entries[-1].by_set_strategy:
        raise RuntimeError("experimental_set_strategy must not be called inside a strategy's scope or run")
    entries.clear()
    if strategy is not None and strategy is not _default.get()[0]:
        entries.append(Entry(strategy, by_set_strategy=True))


def get_loss_reduction() -> ReduceOp:
    """Return how losses of replicas are to be combined: `ReduceOp.SUM`. Kept for programs of tf.distribute."""
    return ReduceOp.SUM


def current() -> Entry | None:
    """Return the innermost entry of this thread, or `None` when nothing was entered.

    The default strategy's scope and `run` are nothing: they change no answer. Its `merge_call` is cross-replica.
    """
    entries = _stack.entries
    if not entries:
        return None
    entry = entries[-1]
    return None if _is_default(entry.strategy) and not entry.merging else entry


def innermost() -> Entry | None:
    """Return the innermost entry of this thread, of whatever strategy."""
    return _stack.entries[-1] if _stack.entries else None


def push(entry: Entry) -> None:
    """Make an entry current."""
    _stack.entries.append(entry)


def pop(entry: Entry) -> None:
    """Take back the entry that was pushed last.

    Raises:
        RuntimeError: If another entry was pushed after this one and is still there.
    """
    _require_innermost(entry)
    _stack.entries.pop()


def called(entry: Entry, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function with an entry current.

    No `with` statement, as a signal handler may raise between any two of its steps, and would leave the entry there
    for ever: here the interpreter looks for signals only between the `try` and the `finally`.

    Raises:
        RuntimeError: If the function entered a scope and did not leave it.
    """
    entries = _stack.entries
    depth = len(entries)
    try:
        entries.append(entry)
        result = fn(*args, **kwargs)
        _require_innermost(entry)
        return result
    finally:
        del entries[depth:]


def _is_default(strategy: Strategy) -> bool:
    return _default.made is not None and strategy is _default.made[0]


def _require_innermost(entry: Entry) -> None:
    entries = _stack.entries
    if not entries or entries[-1] is not entry:
        raise RuntimeError(
            "scope nesting error: a scope was left while one that was entered after it is still open; "
            "leave scopes in the reverse order of entering them"
        )
