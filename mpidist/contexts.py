"""Which strategy and which replica context are current: the functions for users."""

from __future__ import annotations

from typing import cast

from mpidist import context_stack
from mpidist.options import ReduceOp
from mpidist.replica_context.replica_context import ReplicaContext
from mpidist.strategy import Strategy

__all__ = [
    "experimental_set_strategy",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]


def get_strategy() -> Strategy:
    """Return the strategy of the innermost scope, else the default strategy, of this process alone."""
    return cast(Strategy, context_stack.current_strategy())


def has_strategy() -> bool:
    """Whether a strategy other than the default one is current."""
    entry = context_stack.current()
    return entry is not None and not context_stack.is_default(entry.strategy)


def get_replica_context() -> ReplicaContext | None:
    """Return the current replica context.

    Returns:
        Inside the function of `Strategy.run` the replica context of that call; in cross-replica context `None`;
        outside of both the context of the default strategy, which has one replica.
    """
    return context_stack.current_replica()  # type: ignore[return-value]  # without the call of `cast`


def in_cross_replica_context() -> bool:
    """Whether the caller is inside a scope, `merge_call` or `update`, and not inside `run`."""
    entry = context_stack.current()
    return entry is not None and entry.replica_context is None


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Make a strategy current without a `with` statement, in place of the strategy that was set before.

    Args:
        strategy: The strategy; `None` makes the default strategy current again.

    Raises:
        RuntimeError: Inside a `with strategy.scope():`.
        TypeError: If `strategy` is no strategy.
    """
    if strategy is not None and not hasattr(strategy, "scope"):
        raise TypeError(f"experimental_set_strategy takes a strategy or None, got {strategy!r}")
    context_stack.set_strategy(strategy)


def get_loss_reduction() -> ReduceOp:
    """Return how losses of replicas are to be combined: `ReduceOp.SUM`. Kept for programs of tf.distribute."""
    return ReduceOp.SUM
