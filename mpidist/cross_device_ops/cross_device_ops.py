"""The public face of all-reduce algorithms."""

from __future__ import annotations

import sys
from abc import ABC
from collections.abc import Iterable
from copy import copy
from typing import Any, final

from mpidist import context_stack
from mpidist.collectives.plans.reduce_algorithm import ReduceAlgorithm
from mpidist.context_stack import parts_of
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.options import CommunicationOptions, ReduceOp, options_or_hints
from mpidist.transport.failures.exit_code import ends_normally
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.mpi.library import Intracomm

__all__ = ["CrossDeviceOps"]


class CrossDeviceOps(ReduceAlgorithm, ABC):
    """An algorithm that reduces values of all ranks to destinations.

    Pass one to a strategy as `cross_device_ops`, or use it alone: inside a strategy's scope it works on the
    strategy's ranks, and `bind` makes one that is bound to a communicator, for use anywhere.

    A subclass writes one short method, `_all_reduce`. Checks, packing, means, destinations and logs are outside of it.

    Args:
        num_packs: Number of packs of equal size: the arrays of one dtype of a call are concatenated and cut into that
            many. 0 does not concatenate. `CommunicationOptions.bytes_per_pack` overrides it.
        reduce_to_root: Reduces a flat buffer to one rank, for calls whose destinations are not all ranks; by default
            the transport's reduce.
        is_replaceable: Whether the options `reproducible` and `RING` replace this algorithm by another one. False for
            one that adds by a rule of its own, not as `Reduction` says: it ignores `reproducible`, and refuses `RING`.

    Raises:
        TypeError: If `num_packs` is no whole number.
        ValueError: If `num_packs` is negative.
    """

    _bound: BoundOps | None = None
    _in_scope: BoundOps | None = None

    @final
    def bind(self, comm: Intracomm | None = None) -> CrossDeviceOps:
        """Make an object of the same class that works on the ranks of a communicator. Collective.

        Args:
            comm: An intra-communicator of mpi4py, which is duplicated; `None` means `MPI.COMM_WORLD`.

        Returns:
            The bound object. Free its communicators with `close`, or use it in a `with` statement.
        """
        group = SyncGroup.from_mpi(comm)
        group.owner = type(self).__name__
        bound = copy(self)
        try:
            bound._bound = BoundOps(self, group)
        except Exception:  # on all ranks
            group.close()
            raise
        return bound

    @final
    def close(self) -> None:
        """Free the communicators that `bind` made. Collective.

        Raises:
            RuntimeError: If this object was not made by `bind`.
        """
        self._close(sys.exc_info()[1])

    @final
    def __enter__(self) -> CrossDeviceOps:
        return self

    @final
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or not ends_normally(error):
            self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if self._bound is None:
            raise RuntimeError(f"this {type(self).__name__} was not made by bind(), so there is nothing to close")
        self._bound.group.close(self._bound.options.timeout_seconds, error)

    @final
    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce one value of every rank to the destinations. Collective.

        Args:
            reduce_op: A `ReduceOp` or its name in any case.
            per_replica_value: This rank's contribution: an array, a number, or a nest of them. The mean of a `Mirrored`
                value is the value itself; its sum over several ranks is refused.
            destinations: A rank, a sequence of ranks, `"all"`, `"/rank:3"`, a distributed value or a variable; or the
                same object as `per_replica_value`, which means all ranks. An `int` is always a rank.
            options: Override the strategy's.
            out: A nest of arrays like the result, which the result is written to; for all ranks as destinations. May
                be `per_replica_value` itself.
            experimental_hints: The old name of `options` (deprecated).

        Returns:
            The result where this rank is a destination, in `out` if given; else `None`.

        Raises:
            InvalidArgumentError: If the ranks' arguments differ, or cannot be reduced. On every rank.
            ValueError: If `reduce_op` or `destinations` is none of the values above.
            RuntimeError: Inside `run`, unless `bind` has made this object.
        """
        options = options_or_hints(options, experimental_hints)
        return self._ops("reduce").reduce(reduce_op, per_replica_value, destinations, options, out=out)

    @final
    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce many values at once. Collective.

        Values with the same destinations are packed into few large messages.

        Args:
            reduce_op: A `ReduceOp` or its name in any case.
            value_destination_pairs: Tuples of a value and its destinations, each as in `reduce`.
            options: Override the strategy's.
            experimental_hints: As in `reduce`.

        Returns:
            The results, in the order of the pairs; `None` for each pair whose destinations do not include this rank.

        Raises:
            InvalidTypeError: If the pairs are not iterable.
            ValueError: If a pair is not a tuple of two.
            InvalidArgumentError: As in `reduce`.
            RuntimeError: As in `reduce`.
        """
        options = options_or_hints(options, experimental_hints)
        return self._ops("batch_reduce").batch_reduce(reduce_op, value_destination_pairs, options)

    @final
    def broadcast(self, tensor: Any, destinations: Any, *, root: int = 0, out: Any = None) -> Any:
        """Send one rank's value to the destinations. Collective.

        Args:
            tensor: An array, a number, or a nest of them, of the same form, shapes and dtypes on every rank. The
                numbers of other ranks than the root are ignored.
            destinations: As in `reduce`.
            root: The rank whose value is sent.
            out: A nest of arrays like `tensor`, which the value is written to; for all ranks as destinations. May be
                `tensor` itself.

        Returns:
            The root's value where this rank is a destination, in `out` if given; else `None`.

        Raises:
            InvalidArgumentError: If the ranks' arguments differ. On every rank.
            ValueError: If `destinations` is none of the values that `reduce` takes, or there is no rank `root`.
            RuntimeError: As in `reduce`.
        """
        return self._ops("broadcast").broadcast(tensor, destinations, root=root, out=out)

    @final
    def _ops(self, call: str) -> BoundOps:
        """Return the calls of the ranks that this object is bound to, else those of the current strategy."""
        if self._bound is not None:
            return self._bound
        entry, name = context_stack.current(), type(self).__name__
        if entry is None:
            raise RuntimeError(
                f"{name} is bound to no ranks: call it inside `with strategy.scope():`, or call bind(comm) and use the "
                "object that bind returns"
            )
        if entry.replica_context is not None:
            raise context_stack.cross_replica_error(call, f" of {name}()")
        parts = parts_of(entry.strategy)
        if self._in_scope is None or self._in_scope.group is not parts.group:
            options = parts.options.merge(self._options)
            self._in_scope = BoundOps(self, parts.group, options, parts.replicas)
        return self._in_scope
