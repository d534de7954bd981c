"""Which strategy is current on this thread, and whether the code runs in replica or cross-replica context.

Each thread has a stack of entries. `Strategy.scope` and `run`, `merge_call` and `update` push an entry and pop it
again; all other code only reads the stack. Every module may import this one, so strategies and replica contexts are
two protocols here. The functions for users are in `contexts`.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Protocol, TypeVar, final

from mpidist.transport.group.thread_guard import waits_for_autograd
from mpidist.transport.shared_errors import callback_errors, of_callback
from mpidist.transport.topology import Topology

__all__ = [
    "CurrentReplica",
    "CurrentStrategy",
    "Entry",
    "Scope",
    "call",
    "copy_entries",
    "cross_replica_error",
    "current",
    "current_replica",
    "current_strategy",
    "exchange_entries",
    "innermost",
    "innermost_of",
    "is_default",
    "is_innermost",
    "parts_of",
    "set_strategy",
    "set_default_factory",
]


# What to do instead of a call of all replicas inside the function of `run`.
_ALL_REDUCE: Final = "call mpidist.get_replica_context().all_reduce there"
_INSTEAD_IN_RUN: Final[Mapping[str, str]] = {
    "reduce": _ALL_REDUCE,
    "reduce_to": _ALL_REDUCE,
    "batch_reduce": _ALL_REDUCE,
    "batch_reduce_to": _ALL_REDUCE,
    "gather": "call mpidist.get_replica_context().all_gather there",
    "barrier()": "leave it out, as each all_reduce() there waits for all ranks",
    "run": "call the function itself there",
    "scope": "leave it out: the strategy is current there",
}
_OUT_OF_RUN: Final = "call it outside, or in the function of mpidist.get_replica_context().merge_call"
# What a call of a function with `yield` or `async` returns, before anything of its body has run.
_NOT_RUN: Final = frozenset({types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType})


class CurrentStrategy(Protocol):
    """The public names of `Strategy` that the modules below it use, and programs: `get_replica_context().strategy`."""

    @property
    def _parts(self) -> Any:
        """The strategy's `StrategyParts`."""

    @property
    def topology(self) -> Topology:
        """Which ranks are on which nodes."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that are combined at each step."""

    @property
    def is_chief(self) -> bool:
        """Whether this rank is rank 0 of the strategy."""

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


_Strategy = TypeVar("_Strategy", bound=CurrentStrategy)


class CurrentReplica(Protocol):
    """The public names of `ReplicaContext` that the modules below it use."""

    @property
    def strategy(self) -> CurrentStrategy:
        """The strategy."""

    @property
    def replica_id_in_sync_group(self) -> int:
        """The replica's number among all replicas."""

    @property
    def calls(self) -> Any:
        """Makes the replica's calls: `JointCalls`, or `SoloCalls` if each rank is one replica."""


@final
class Entry(NamedTuple):
    """One level of the stack: the current strategy and, in `run`, the replica context.

    `is_update` and `is_merge_call`: which of `StrategyExtended.update` and `ReplicaContext.merge_call` pushed it. Of
    this rank's copies of a variable `update` changes the one of `copy_number`. `experimental_set_strategy` pushes what
    `is_set_globally`, and no `with` statement will pop.
    """

    strategy: CurrentStrategy
    replica_context: CurrentReplica | None = None
    is_update: bool = False
    copy_number: int = 0
    is_merge_call: bool = False
    is_set_globally: bool = False


_entries_of_threads: Final[dict[int, list[Entry]]] = {}


@final
class _Stack(threading.local):
    def __init__(self) -> None:
        self.entries: list[Entry] = []
        _entries_of_threads[threading.get_ident()] = self.entries


@final
class _DefaultStrategy:
    """The strategy that is current where no strategy was entered: of this process alone, made when first used."""

    def __init__(self) -> None:
        self.factory: Callable[[], tuple[CurrentStrategy, CurrentReplica]] | None = None
        self.made: tuple[CurrentStrategy, CurrentReplica] | None = None
        self._lock = threading.Lock()

    def get(self) -> tuple[CurrentStrategy, CurrentReplica]:
        if self.made is None:
            if self.factory is None:
                raise RuntimeError("there is no default strategy before `import mpidist` has finished")
            with self._lock:  # two threads must not make one each
                self.made = self.made or self.factory()
        return self.made


_stack = _Stack()
_default = _DefaultStrategy()


@final
class Scope(AbstractContextManager[_Strategy]):
    """`with strategy.scope():`. One scope may be entered several times, also while it is open."""

    def __init__(self, strategy: _Strategy) -> None:
        self._strategy = strategy
        self._entries: list[Entry] = []

    def __enter__(self) -> _Strategy:
        parts_of(self._strategy).require_cross_replica("scope")  # `scope()` may have been called elsewhere
        self._entries.append(Entry(self._strategy))
        _stack.entries.append(self._entries[-1])
        return self._strategy

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        own = self._entries.pop()
        try:
            _require_innermost(own)
        finally:  # where the scope is refused, too: no `with` statement leaves it again
            _stack.entries[:] = [entry for entry in _stack.entries if entry is not own]
        if error is not None:
            _raise_own(error)


def parts_of(strategy: CurrentStrategy) -> Any:
    """Return the `StrategyParts` of a strategy, for the library itself and not for programs."""
    return strategy._parts


def cross_replica_error(call: str, whose: str = "") -> RuntimeError:
    """Make the error of a call of all replicas inside the function of `run`. `whose`: the owner of the method."""
    return RuntimeError(
        f"{call}{whose} requires being in cross-replica context, and was called inside the function of strategy.run(); "
        f"{_INSTEAD_IN_RUN.get(call, _OUT_OF_RUN)}"
    )


def set_default_factory(factory: Callable[[], tuple[CurrentStrategy, CurrentReplica]]) -> None:
    """Set the function that makes the default strategy and its replica context."""
    _default.factory = factory


def current_strategy() -> CurrentStrategy:
    """Return the strategy of the innermost scope, else the default strategy, of this process alone."""
    entry = current()
    return _default.get()[0] if entry is None else entry.strategy


def current_replica() -> CurrentReplica | None:
    """Return the replica context: `None` in cross-replica context; the default strategy's where nothing was entered."""
    entry = current()
    return _default.get()[1] if entry is None else entry.replica_context


def set_strategy(strategy: CurrentStrategy | None) -> None:
    """Make a strategy current until the next call, in place of that of the last call; `None`: the default strategy.

    Inside a strategy's scope, `run`, `merge_call` or `update` it is a `RuntimeError`.
    """
    entries = _stack.entries
    if entries and not entries[-1].is_set_globally:
        raise RuntimeError("experimental_set_strategy must not be called inside a strategy's scope or run")
    entries.clear()
    if strategy is not None and strategy is not _default.get()[0]:
        entries.append(Entry(strategy, is_set_globally=True))


def current() -> Entry | None:
    """Return the innermost entry of this thread; `None` if there is none.

    Entries of the default strategy count as none, as they do not change what is current; but its `merge_call` does.
    """
    entry = innermost()
    if entry is None:
        return None
    return None if is_default(entry.strategy) and not entry.is_merge_call else entry


def is_innermost(replica: CurrentReplica) -> bool:
    """Whether the innermost entry of this thread is that of a replica."""
    entries = _stack.entries
    return bool(entries) and entries[-1].replica_context is replica


def innermost() -> Entry | None:
    """Return the innermost entry of this thread, also of the default strategy; `None` if there is none.

    A thread of autograd, which calls a hook, has that of the thread in `backward()`.
    """
    if _stack.entries:
        return _stack.entries[-1]
    if not isinstance(threading.current_thread(), threading._DummyThread):
        return None
    threads = list(_entries_of_threads.items())
    found = [entries[-1] for ident, entries in threads if entries and waits_for_autograd(ident)]
    return found[0] if len(found) == 1 else None


def innermost_of(thread: threading.Thread) -> Entry | None:
    """Return the innermost entry of a thread, also of the default strategy; `None` if there is none."""
    if thread is threading.current_thread():
        return innermost()
    entries = _entries_of_threads.get(thread.ident or 0)
    return entries[-1] if entries else None


def copy_entries() -> list[Entry]:
    """Copy this thread's stack, for a replica that takes turns with others on this thread."""
    return list(_stack.entries)


def exchange_entries(entries: list[Entry]) -> list[Entry]:
    """Make another stack this thread's, and return the stack that was this thread's before."""
    before, _stack.entries = _stack.entries, entries
    return before


def call(entry: Entry, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function with an entry pushed, and refuse it if it entered a scope and did not leave that scope.

    So is one with `yield` or `async`, whose body was not executed.

    This is no context manager: a signal handler may raise between the steps of a `with` statement, and the entry would
    stay for ever. Here signal handlers run inside the `try` alone.
    """
    entries = _stack.entries
    depth = len(entries)
    try:
        entries.append(entry)
        result = fn(*args, **kwargs)
        if not entries or entries[-1] is not entry:
            _require_innermost(entry)
        if type(result) in _NOT_RUN and result.__name__ != "<genexpr>":
            name = getattr(fn, "__qualname__", type(fn).__name__)
            if isinstance(result, types.CoroutineType):
                result.close()  # else Python warns that nobody has awaited it
            raise TypeError(
                f"{name} returned a {type(result).__name__}, whose body was not executed: pass "
                "a function without `yield` and `async`, or return list(...) of a generator"
            )
        return result
    except BaseException as error:
        _raise_own(error)
        raise
    finally:
        del entries[depth:]
        if entries and entries[-1] is entry:  # the function left a scope that was entered before the call
            del entries[-1]
        if callback_errors:  # which refer to arrays
            callback_errors.pop(threading.get_ident(), None)


def is_default(strategy: CurrentStrategy) -> bool:
    """Whether a strategy is the default one."""
    return _default.made is not None and strategy is _default.made[0]


def _raise_own(error: BaseException) -> None:
    """Raise this library's error in place of that of a library which has called it back, such as JAX."""
    own = of_callback(error)
    if own is not error:
        raise own from None


def _require_innermost(entry: Entry) -> None:
    entries = _stack.entries
    if not entries or entries[-1] is not entry:
        raise RuntimeError(
            "scope nesting error: a scope was left while one that was entered after it is still open; "
            "leave scopes in the reverse order of entering them"
        )
