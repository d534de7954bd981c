"""The base class of all-reduce algorithms: their public calls, and the group of ranks that they are bound to.

A subclass writes one short method, `_all_reduce`. Checks, packing, means, destinations and logs are outside of it.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any, ClassVar, final

from mpidist import context_stack
from mpidist.collectives import (
    Algorithm,
    PendingResult,
    Reduce,
    Reductions,
    broadcast,
    key_of_repeated,
    open_all_reduce,
    open_batch_reduce,
    rebuild_results,
    require_num_packs,
    require_tree_order,
    require_usable,
)
from mpidist.cross_device_ops.world_reductions import world_all_reduce, world_reduce, world_ring_all_reduce
from mpidist.options import CommunicationImplementation, CommunicationOptions, Compression, ReduceOp, options_or_hints
from mpidist.replicas import Replicas
from mpidist.transport import FusedReducer, Intracomm, Levels, Reduction, SyncGroup, ends_normally

__all__ = ["CrossDeviceOps"]

ReduceToRoot = Callable[[Levels, Any, Reduction, int], None]


class CrossDeviceOps(Algorithm):
    """An algorithm that reduces values of all ranks to destinations.

    Pass one to a strategy as `cross_device_ops`, or use it alone: inside a strategy's scope it works on the
    strategy's ranks, and `bind` makes one that is bound to a communicator.

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

    _compresses_between_nodes: ClassVar[bool] = False  # if False, compression rounds every rank's contribution

    def __init__(
        self, num_packs: int = 1, reduce_to_root: ReduceToRoot = world_reduce, is_replaceable: bool = True
    ) -> None:
        require_num_packs(type(self).__name__, num_packs)
        self._num_packs = int(num_packs)
        self._options = CommunicationOptions()
        self._reduce_to_root = reduce_to_root
        self._is_replaceable = is_replaceable
        self._bound: Reductions | None = None
        self._in_scope: Reductions | None = None
        self._owns_group = False

    @abstractmethod
    def _all_reduce(self, levels: Levels, buffer: Any, reduction: Reduction) -> None:
        """Leave the reduction of all ranks' buffers in every rank's buffer. The one method that an algorithm writes.

        The first phase that adds takes `reduction`, and later phases take `reduction.rest`. An algorithm that sends
        each number through `world` and `across_nodes` at most once as a contribution and once as a result may set
        `_compresses_between_nodes`: then these two communicators round numbers to half precision.

        Args:
            levels: The communicators.
            buffer: [n], flat and contiguous, of the same length and dtype on every rank.
            reduction: The elementwise operation.
        """

    def _fused_reducer_of(self, levels: Levels) -> FusedReducer | None:
        """Return the reducer of lists of arrays that may take this algorithm's place: `levels.fused`, or `None`."""
        return None

    @property
    def group(self) -> SyncGroup:
        """The ranks that this object is bound to; if it is not bound, those of the current strategy."""
        return self._reductions().group

    @property
    def configuration(self) -> tuple[Any, ...]:
        """Class, `num_packs` and options, which must be equal on all ranks."""
        return type(self).__name__, self._num_packs, self._options

    @final
    def bind(self, comm: Intracomm | None = None) -> CrossDeviceOps:
        """Make an object of the same class that works on the ranks of a communicator. Collective.

        Args:
            comm: An intra-communicator of mpi4py, which is duplicated; `None` means `MPI.COMM_WORLD`.

        Returns:
            The bound object. Free its communicators with `close`, or use it in a `with` statement.
        """
        bound = self.bound_to(SyncGroup.from_mpi(comm))
        bound._owns_group, bound.group.owner = True, type(self).__name__
        return bound

    @final
    def bound_to(
        self, group: SyncGroup, options: CommunicationOptions | None = None, replicas: Replicas | None = None
    ) -> CrossDeviceOps:
        """Make an object of the same class for a group that the caller owns and closes.

        Args:
            group: The ranks.
            options: Override this object's own.
            replicas: Which replicas this rank carries; by default one.

        Raises:
            UnavailableError: If `options` ask for NCCL and it is not available.
            ValueError: If `replicas` are to be added in the order of a tree, and the options or this algorithm ask for
                another order, or for rounding on the way.
        """
        self.require_ranks(group.topology.size)
        bound = copy(self)
        carried = Replicas.one_per_rank(group.topology) if replicas is None else replicas
        bound._bound = Reductions(group, bound, carried)
        bound._options = bound._merge(options)
        if carried.tree is not None:
            bound._options = bound._merge(CommunicationOptions(reproducible=True))
        return bound

    @final
    def close(self) -> None:
        """Free the communicators that `bind` made. Collective.

        Raises:
            RuntimeError: If this object was not made by `bind`.
        """
        if self._bound is None or not self._owns_group:
            raise RuntimeError(f"this {type(self).__name__} was not made by bind(), so there is nothing to close")
        self._bound.group.close(self._options.timeout_seconds, sys.exc_info()[1])

    @final
    def __enter__(self) -> CrossDeviceOps:
        return self

    @final
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or not ends_normally(error):
            self.close()

    @final
    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce one value of every rank to the destinations. Collective.

        Args:
            reduce_op: A `ReduceOp` or its name in any case.
            per_replica_value: This rank's contribution: an array, a number, or a nest of them. The mean of a `Mirrored`
                value is the value itself; its sum over several ranks is refused.
            destinations: A rank, a sequence of ranks, `"all"`, `"/rank:3"`, a distributed value or a variable.
            options: Override the strategy's.
            experimental_hints: The old name of `options` (deprecated).

        Returns:
            The result where this rank is a destination, else `None`.

        Raises:
            InvalidArgumentError: If the ranks' arguments differ, or cannot be reduced. On every rank.
            ValueError: If `reduce_op` or `destinations` is none of the values above.
        """
        options = options_or_hints(options, experimental_hints)
        return self._batch_reduce("reduce", reduce_op, [(per_replica_value, destinations)], options)[0]

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
            TypeError: If the pairs are not iterable.
            ValueError: If a pair is not a tuple of two.
            InvalidArgumentError: As in `reduce`.
        """
        options = options_or_hints(options, experimental_hints)
        return self._batch_reduce("batch_reduce", reduce_op, value_destination_pairs, options)

    @final
    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
        call: str = "all_reduce",
        error: Exception | None = None,
    ) -> Any:
        """Reduce a nest of every rank's values, and give every rank the result. Collective.

        Args:
            reduce_op: A `ReduceOp` or its name in any case.
            value: This rank's contribution: an array, a number, or a nest of them.
            options: Override the strategy's.
            out: A nest of arrays like the result, which the result is written to. May be `value` itself.
            call: The name of the call, for errors and logs.
            error: What the caller found wrong on this rank; raised on all ranks.

        Returns:
            `out`, if given; else a nest like `value`.

        Raises:
            InvalidArgumentError: As in `reduce`.
        """
        reductions = self._reductions()
        repeated = key_of_repeated(call, reduce_op, value, options, out, error)
        if repeated is not None and (result := reductions.repeated.run(*repeated)) is not None:
            return out if out is not None else rebuild_results(value, result, {}) if type(result) is list else result
        reduction_call, mirrored = open_all_reduce(reductions, self._merge, call, reduce_op, value, options, out, error)
        results = reductions.run(reduction_call)
        if repeated is not None:
            reductions.repeated.add(repeated[0], reduction_call)
        return out if out is not None else rebuild_results(value, results, mirrored)

    @final
    def start_all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
        error: Exception | None = None,
    ) -> PendingResult:
        """Start an all-reduce, and return before it completes. Collective; all ranks start calls in the same order.

        Args:
            reduce_op: As in `all_reduce`.
            value: As in `all_reduce`. It must not be changed until `wait` has returned.
            options: As in `all_reduce`.
            out: As in `all_reduce`.
            error: As in `all_reduce`.

        Returns:
            A handle, whose `wait` returns or raises what `all_reduce` would.
        """
        reductions = self._reductions()
        name = "start_all_reduce"
        reduction_call, mirrored = open_all_reduce(reductions, self._merge, name, reduce_op, value, options, out, error)
        return PendingResult(reductions.group, reductions.start(reduction_call), value, out, mirrored)

    @final
    def broadcast(
        self,
        tensor: Any,
        destinations: Any,
        *,
        root: int = 0,
        out: Any = None,
        call: str = "broadcast",
        error: Exception | None = None,
    ) -> Any:
        """Send one rank's value to the destinations. Collective.

        Args:
            tensor: An array, a number, or a nest of them, of the same form, shapes and dtypes on every rank. The
                numbers of other ranks than the root are ignored.
            destinations: As in `reduce`.
            root: The rank whose value is sent.
            out: A nest of arrays like `tensor`, which the value is written to; for all ranks as destinations. May be
                `tensor` itself.
            call: The name of the call, for errors.
            error: What the caller found wrong on this rank; raised on all ranks.

        Returns:
            The root's value where this rank is a destination, in `out` if given; else `None`.

        Raises:
            InvalidArgumentError: If the ranks' arguments differ. On every rank.
            ValueError: If `destinations` is none of the values that `reduce` takes, or there is no rank `root`.
        """
        return broadcast(self.group, call, tensor, destinations, self._options, error, root, out)

    @final
    def _batch_reduce(
        self,
        call: str,
        reduce_op: ReduceOp | str,
        pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None,
    ) -> list[Any]:
        reductions = self._reductions()
        reduction_call, opened = open_batch_reduce(reductions, self._merge, call, reduce_op, pairs, options)
        results = iter(reductions.run(reduction_call))
        return [pair.close(results, reductions.group.topology.rank) for pair in opened]

    @final
    def _merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Override this object's options by those of a call, and refuse what this algorithm cannot do."""
        if options is None:
            return self._options
        merged = self._options.merge(options)
        require_usable(options)
        if self._bound is not None and self._bound.replicas.tree is not None:
            require_tree_order(merged, None if self._is_replaceable else type(self).__name__)
        if options.implementation is CommunicationImplementation.RING and not self._is_replaceable:
            own = f"this {type(self).__name__} adds by a function of its own"
            raise ValueError(f"{own}, which a ring cannot call; leave one out")
        return merged

    @final
    def _reductions(self) -> Reductions:
        """Return the reductions of the ranks that this object is bound to, else those of the current strategy."""
        if self._bound is not None:
            return self._bound
        entry = context_stack.current()
        if entry is None:
            raise RuntimeError(
                f"{type(self).__name__} is bound to no ranks: call it inside `with strategy.scope():`, or call "
                "bind(comm) and use the object that bind returns"
            )
        group = entry.strategy.extended.group
        if self._in_scope is None or self._in_scope.group is not group:
            self._in_scope = Reductions(group, self, entry.strategy.extended.replicas)
        return self._in_scope

    @property
    def num_packs(self) -> int:
        """Number of packs of the arrays of one call and dtype; 0 does not concatenate."""
        return self._num_packs

    @property
    def compresses_between_nodes(self) -> bool:
        """See `Algorithm`."""
        return self._compresses_between_nodes

    @final
    def name_for(self, options: CommunicationOptions) -> str:
        """See `Algorithm`."""
        name = "in rank order" if options.reproducible and self._is_replaceable else type(self).__name__
        if options.implementation is CommunicationImplementation.RING and not options.reproducible:
            name = "RING"
        if options.compression is Compression.NONE:
            return name
        return f"{name}, {options.compression} {'everywhere' if options.compress_everywhere else 'between nodes'}"

    @final
    def fused_reducer_for(self, options: CommunicationOptions, levels: Levels) -> FusedReducer | None:
        """See `Algorithm`."""
        if options.implementation is CommunicationImplementation.RING:
            return None
        if options.reproducible and self._is_replaceable:
            return levels.fused if levels.fused is not None and levels.fused.keeps_rank_order else None
        return self._fused_reducer_of(levels)

    @final
    def all_reduce_for(self, options: CommunicationOptions) -> Reduce:
        """See `Algorithm`."""
        if options.reproducible and self._is_replaceable:
            return world_all_reduce
        if options.implementation is CommunicationImplementation.RING:
            return world_ring_all_reduce
        return self._all_reduce

    @final
    def reduce_to(self, root: int) -> Reduce:
        """See `Algorithm`."""
        return lambda levels, buffer, reduction: self._reduce_to_root(levels, buffer, reduction, root)
