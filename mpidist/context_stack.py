"""Which strategy is current on this thread, and seen from where: across replicas, or from inside one.

The answer is a stack per thread. `Strategy.scope` and `run`, `merge_call` and `update` push an entry and pop it
again; everything else only looks. Hardly anything of mpidist is imported here, so that every module may look:
a strategy is known by two protocols. The functions for users are in `contexts`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, final

from mpidist.transport import Topology

__all__ = [
    "CurrentReplica",
    "CurrentStrategy",
    "Entry",
    "called",
    "current",
    "current_replica",
    "current_strategy",
    "default_strategy",
    "innermost",
    "is_default",
    "pop",
    "push",
    "replace_set_strategy",
    "set_default_factory",
]


class CurrentStrategy(Protocol):
    """What modules that `Strategy` is built on know of a strategy: some of its public names."""

    @property
    def extended(self) -> Any:
        """The strategy's `StrategyExtended`."""

    @property
    def topology(self) -> Topology:
        """Where the ranks are."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that are combined at each step."""

    @property
    def is_chief(self) -> bool:
        """Whether this rank is the first of the strategy's."""

    @property
    def run(self) -> Callable[..., Any]:
        """See `Strategy.run`."""

    @property
    def reduce(self) -> Callable[..., Any]:
        """See `Strategy.reduce`."""

    @property
    def gather(self) -> Callable[..., Any]:
        """See `Strategy.gather`."""

    @property
    def scope(self) -> Callable[..., Any]:
        """See `Strategy.scope`."""


class CurrentReplica(Protocol):
    """What modules that `ReplicaContext` is built on know of a replica context."""

    @property
    def strategy(self) -> CurrentStrategy:
        """The strategy."""

    @property
    def replica_id_in_sync_group(self) -> int:
        """The number of the replica."""


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

    strategy: CurrentStrategy
    replica_context: CurrentReplica | None = None
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
        self.factory: Callable[[], tuple[CurrentStrategy, CurrentReplica]] | None = None
        self.made: tuple[CurrentStrategy, CurrentReplica] | None = None
        self._lock = threading.Lock()

    def get(self) -> tuple[CurrentStrategy, CurrentReplica]:
        if self.made is None:
            if self.factory is None:
                raise RuntimeError("there is no default strategy before `import mpidist` is through")
            with self._lock:  # threads that ask at once get the same one
                self.made = self.made or self.factory()
        return self.made


_stack = _Stack()
_default = _Default()


def set_default_factory(factory: Callable[[], tuple[CurrentStrategy, CurrentReplica]]) -> None:
    """Say how the default strategy and its replica context are made."""
    _default.factory = factory


def default_strategy() -> CurrentStrategy:
    """Return the strategy of this process alone."""
    return _default.get()[0]


def current_strategy() -> CurrentStrategy:
    """Return the current strategy: that of the innermost scope, else the default one of this process alone."""
    entry = current()
    return _default.get()[0] if entry is None else entry.strategy


def current_replica() -> CurrentReplica | None:
    """Return the current replica context: `None` across replicas, the default one where nothing was entered."""
    entry = current()
    return _default.get()[1] if entry is None else entry.replica_context


def replace_set_strategy(strategy: CurrentStrategy | None) -> None:
    """Make a strategy current, without an end, in place of the one that this function made current before.

    Args:
        strategy: The strategy; `None` leaves.

    Raises:
        RuntimeError: If a strategy was entered in another way.
    """
    entries = _stack.entries
    if entries and not entries[-1].by_set_strategy:
        raise RuntimeError("experimental_set_strategy must not be called inside a strategy's scope or run")
    entries.clear()
    if strategy is not None and strategy is not _default.get()[0]:
        entries.append(Entry(strategy, by_set_strategy=True))


def current() -> Entry | None:
    """Return the innermost entry of this thread, or `None` when nothing was entered.

    The default strategy's scope and `run` are nothing: they change no answer. Its `merge_call` is cross-replica.
    """
    entries = _stack.entries
    if not entries:
        return None
    entry = entries[-1]
    return None if is_default(entry.strategy) and not entry.merging else entry


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


def is_default(strategy: CurrentStrategy) -> bool:
    """Whether a strategy is the default one."""
    return _default.made is not None and strategy is _default.made[0]


def _require_innermost(entry: Entry) -> None:
    entries = _stack.entries
    if not entries or entries[-1] is not entry:
        raise RuntimeError(
            "scope nesting error: a scope was left while one that was entered after it is still open; "
            "leave scopes in the reverse order of entering them"
        )
