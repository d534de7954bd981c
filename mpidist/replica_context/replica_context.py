"""The context of code inside `Strategy.run`: one replica, and the collectives over all replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import numpy as np

from mpidist import context_stack
from mpidist.collectives.open_call import PendingResult
from mpidist.context_stack import CurrentStrategy, parts_of
from mpidist.options import CommunicationOptions, ReduceOp, options_or_hints
from mpidist.transport.devices import Device
from mpidist.transport.failures import open_groups
from mpidist.whole_number import whole_number

__all__ = ["ReplicaContext", "SharedResult"]

# What to do instead of a call of one replica where no strategy is current.
_REDUCE: Final = "call strategy.reduce() there, or call it in the function of strategy.run()"
_INSTEAD_OUT_OF_RUN: Final = {
    "all_reduce": _REDUCE,
    "start_all_reduce": _REDUCE,
    "reduce_scatter": _REDUCE,
    "all_gather": "call strategy.gather() there, or call it in the function of strategy.run()",
    "merge_call": "call the function itself there",
}


@final
class SharedResult:
    """A started all-reduce, as one of the replicas of a rank holds it: see `PendingResult`.

    `results`, empty at first, takes what `share` returns: the result for each replica of the rank.
    """

    def __init__(
        self, pending: PendingResult, share: Callable[[int, PendingResult], list[Any]], results: list[Any], at: int
    ) -> None:
        self._pending, self._share, self._results, self._at = pending, share, results, at

    def is_done(self) -> bool:
        """Whether the result is there. See `PendingResult.is_done`."""
        return self._pending.is_done()

    def wait(self) -> Any:
        """Wait for the result. See `PendingResult.wait`."""
        if not self._results:  # no replica has waited before, so none uses its outs yet
            self._results += self._share(self._at, self._pending)
        return self._results[self._at]


@final
class ReplicaContext:
    """A replica that this rank carries, during one `Strategy.run`.

    Get it with `mpidist.get_replica_context()`.

    Args:
        strategy: The strategy whose replica this is.
        replica_id_in_sync_group: The replica's number among all replicas.
        calls: Makes the calls: `JointCalls` or `SoloCalls`. Also an attribute.
        device: This replica's device; `None` for the rank's.
    """

    def __init__(
        self,
        strategy: CurrentStrategy,
        replica_id_in_sync_group: int,
        calls: Any,
        device: Device | None = None,
    ) -> None:
        self._strategy = strategy
        self._replica_id = replica_id_in_sync_group
        self.calls = calls
        self._device = device

    @property
    def strategy(self) -> CurrentStrategy:
        """The strategy whose replica this is."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """This replica's number, 0 to `num_replicas_in_sync - 1`: the rank, unless ranks carry several replicas."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that are combined at each step."""
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str, ...]:
        """This replica's device, in a tuple of one: `("/rank:1/cpu:0",)`."""
        if self._device is not None:
            return (f"/rank:{self._strategy.topology.rank}{self._device}",)
        return tuple(parts_of(self._strategy).local_devices)

    def rng(self, seed: int, *key: int) -> np.random.Generator:
        """Make a random generator that is this replica's alone. Local.

        Its numbers follow from the seed, the key and the replica's id, so they are the same on any number of ranks, and
        after a restart at any step. For dropout, put the step into the key:

            ctx = mpidist.get_replica_context()
            mask = ctx.rng(7, step).random(x.shape) >= 0.1

        A second call with the same arguments starts with the same numbers again: give each use, such as each layer, a
        key of its own, `ctx.rng(7, step, layer)`.

        Args:
            seed: A whole number >= 0, the same on all replicas.
            key: Whole numbers >= 0, such as the step: another key, other numbers.

        Raises:
            TypeError: If `seed` or a part of `key` is no whole number.
            ValueError: If one is negative.
        """
        entropy = whole_number("ReplicaContext.rng: seed", seed, 0)
        spawn_key = (
            self._replica_id,
            *(whole_number(f"ReplicaContext.rng: key[{at}]", part, 0) for at, part in enumerate(key)),
        )
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy, spawn_key=spawn_key)))

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        *,
        weight: Any = None,
        out: Any = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce every replica's value, and give every replica the result. Collective.

        Args:
            reduce_op: A `ReduceOp` or its name in any case.
            value: This replica's contribution: an array, a number, or a nest of them.
            options: Override the strategy's.
            weight: For means: how much this replica's value weighs, as a number >= 0, such as its number of rows. The
                mean is the sum of values times weights, divided by the sum of weights. A value of weight 0 does not
                count, whatever it is, also one that is not a number.
            out: A nest of arrays like the result, into which the result is written. May be `value` itself.
            experimental_hints: The old name of `options` (deprecated).

        Returns:
            `out`, if given; else a nest like `value`, of new arrays. If the number of replicas was chosen, these are
            shared by the replicas of a rank, and read-only.

        Raises:
            InvalidArgumentError: If the ranks' arguments differ, or cannot be reduced, or all weights are 0. On every
                rank.
            ValueError: If `weight` is negative or not finite, or given for another operation. On every rank.
            DeadlineExceededError: If not all ranks called in time.
            RuntimeError: If this context is not the current one.
        """
        if not context_stack.is_innermost(self):
            self._require_default("all_reduce")
        if experimental_hints is not None:
            options = options_or_hints(options, experimental_hints)
        return self.calls.all_reduce(reduce_op, value, options, weight, out)

    def start_all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
    ) -> PendingResult | SharedResult:
        """Start an all-reduce, of the gradients that are ready, say, and return before it completes. Collective.

        Every rank starts the same reductions in the same order. Started reductions progress while others are started.

        Args:
            reduce_op: As in `all_reduce`.
            value: As in `all_reduce`. It must not be changed until `wait()` has returned.
            options: As in `all_reduce`.
            out: As in `all_reduce`.

        Returns:
            A handle. Its `wait()` returns or raises what `all_reduce` would.
        """
        if not context_stack.is_innermost(self):
            self._require_default("start_all_reduce")
        started: PendingResult | SharedResult = self.calls.start_all_reduce(reduce_op, value, options, out)
        return started

    def reduce_scatter(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: int = 0,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
    ) -> Any:
        """Reduce every replica's value, and give each replica its part of the result along an axis. Collective.

        Args:
            reduce_op: A `ReduceOp` or its name in any case.
            value: An array of at least one dimension, or a nest of them, of the same shapes on every replica.
            axis: The axis; negative counts from the end.
            options: Override the strategy's.
            out: A nest of arrays like the result, which the replica's part is written to.

        Returns:
            `out`, if given; else a nest like `value`. Replica r gets the r-th part of the axis. Lengths differ by at
            most one, longer parts come first. `all_gather` of the parts gives what `all_reduce` returns.

        Raises:
            InvalidArgumentError: If the replicas' arguments differ, or cannot be reduced. On every rank.
        """
        if not context_stack.is_innermost(self):
            self._require_default("reduce_scatter")
        return self.calls.reduce_scatter(reduce_op, value, axis, options, out)

    def all_gather(
        self,
        value: Any,
        axis: int,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Concatenate every replica's value along an axis, in the order of replicas. Collective.

        Args:
            value: An array of at least one dimension, or a nest of them. Lengths along `axis` may differ between ranks.
            axis: The axis; negative counts from the end.
            options: Override the strategy's.
            out: A nest of arrays like the result, which the result is written to. A value may be the part of it that is
                this rank's own.
            experimental_hints: The old name of `options` (deprecated).

        Returns:
            `out`, if given; else a nest like `value`, the same on all replicas.

        Raises:
            InvalidArgumentError: If shapes differ along another axis, or a value has no such axis. On every rank.
        """
        if not context_stack.is_innermost(self):
            self._require_default("all_gather")
        if experimental_hints is not None:
            options = options_or_hints(options, experimental_hints)
        return self.calls.all_gather(value, axis, options, out)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Leave replica context for one call: run `merge_fn(strategy, *args, **kwargs)` across replicas. Collective.

        The function runs on every rank, not once: guard what only the chief shall do with `strategy.is_chief`.

        Args:
            merge_fn: The function.
            args: The function's arguments after the strategy. Where a rank is one replica, they are passed unchanged: a
                bare array is the rank's contribution to what the function reduces. If the number of replicas was
                chosen, arrays become `PerReplica` values, and so does what differs between the replicas of the rank.
            kwargs: The function's keyword arguments, likewise.

        Returns:
            What the function returned, with this replica's component in place of each distributed value.

        Raises:
            InvalidArgumentError: If another rank makes another call. On every rank.
            RuntimeError: If this context is not the current one.
        """
        if not context_stack.is_innermost(self):
            self._require_default("merge_call")
        return self.calls.merge_call(merge_fn, args, kwargs)

    def _require_default(self, call: str) -> None:
        """Refuse a call outside of `run`, unless this is the default strategy's context and no strategy was entered."""
        here = context_stack.current_replica()
        if here is self:
            if context_stack.innermost() is None and open_groups.num_strategies():
                raise RuntimeError(
                    f"{call} was called outside of strategy.run(), where the default strategy, of this process alone, "
                    f"is current, so nothing would be combined with the other ranks; {_INSTEAD_OUT_OF_RUN[call]}"
                )
            return
        if here is None:
            raise RuntimeError(
                f"ReplicaContext.{call} needs to be inside the function of strategy.run(): the current context is "
                "cross-replica, where the strategy's own methods reduce"
            )
        if here.strategy is not self._strategy:
            raise RuntimeError(
                f"ReplicaContext.{call}: mismatching strategies; this context belongs to {self._strategy}, "
                f"and the current one is {here.strategy}"
            )
        raise RuntimeError(
            f"ReplicaContext.{call}: mismatching ReplicaContext; this one was current in another call of run() or on "
            "another thread. Ask mpidist.get_replica_context() for the current one"
        )
