"""What every all-reduce algorithm shares: its public calls, and being tied to a group of ranks.

A subclass writes one short method, `_all_reduce`. Checks, packing, means, destinations and logs are around it.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any, ClassVar, Final, final

from mpidist import context_stack, nest
from mpidist.collectives import (
    NO_MIRRORED,
    Algorithm,
    MirroredLeaves,
    PendingResult,
    Reduce,
    ReductionCall,
    Reductions,
    ValueWithDestinations,
    broadcast,
    flatten_contributions,
    flatten_out,
    rebuild_results,
    require_num_packs,
    require_usable,
)
from mpidist.cross_device_ops.of_world import all_reduce_of_world, reduce_to_root, ring_of_world
from mpidist.options import CommunicationImplementation, CommunicationOptions, Compression, ReduceOp, options_or_hints
from mpidist.transport import FusedReducer, Intracomm, Levels, Reduction, SyncGroup, ends_normally

__all__ = ["CrossDeviceOps"]

ReduceToRoot = Callable[[Levels, Any, Reduction, int], None]
_DEFAULTS: Final = CommunicationOptions()


class CrossDeviceOps(Algorithm):
    """How values of all ranks are combined, and where the result goes.

    Give one to a strategy as `cross_device_ops`, or use it alone: inside a strategy's scope it works on the
    strategy's ranks, and `bind` makes one that is tied to a communicator.

    Args:
        num_packs: Number of packs, of equal size, that the arrays of one call and dtype are concatenated and cut
            to. 0 does not concatenate. `CommunicationOptions.bytes_per_pack` wins over it.
        reduce_to_root: How a flat buffer is reduced where not all ranks want the result; by default as the
            transport does it.
        is_replaceable: Whether `reproducible` and `RING` may put another algorithm in the place of this one, which adds
            as `Reduction` says. One with a rule of its own is used whatever the options, or refuses them.

    Raises:
        TypeError: If `num_packs` is no whole number.
        ValueError: If `num_packs` is negative.
    """

    _compresses_between_nodes: ClassVar[bool] = False  # else every rank rounds what it contributes

    def __init__(
        self, num_packs: int = 1, reduce_to_root: ReduceToRoot = reduce_to_root, is_replaceable: bool = True
    ) -> None:
        require_num_packs(type(self).__name__, num_packs)
        self._num_packs = int(num_packs)
        self._options = _DEFAULTS
        self._reduce_to_root = reduce_to_root
        self._is_replaceable = is_replaceable
        self._bound: Reductions | None = None
        self._in_scope: Reductions | None = None
        self._owns_group = False

    @abstractmethod
    def _all_reduce(self, levels: Levels, buffer: Any, reduction: Reduction) -> None:
        """Leave the reduction of all ranks' buffers in every rank's buffer.

        The one method that an algorithm writes. It hands `reduction` to the first phase that adds, and
        `reduction.rest` to those after it. `_compresses_between_nodes` says that what it sends through `world` and
        `across_nodes` may be rounded to half precision: that each number passes there once, as a contribution or as
        a result.

        Args:
            levels: The communicators.
            buffer: [n], flat and contiguous, of the same length and dtype on every rank.
            reduction: The elementwise operation.
        """

    def _fused_reducer_of(self, levels: Levels) -> FusedReducer | None:
        """Say who reduces lists of arrays in this algorithm's place: `levels.fused`, or nobody."""
        return None

    @property
    def group(self) -> SyncGroup:
        """The ranks that this object is tied to, or else those of the scope."""
        return self._tied().group

    @property
    def configuration(self) -> tuple[Any, ...]:
        """What must be equal on all ranks: class, packs and options."""
        return type(self).__name__, self._num_packs, self._options

    @final
    def bind(self, comm: Intracomm | None = None) -> CrossDeviceOps:
        """Make an object of the same class that works on the ranks of a communicator. Collective.

        Args:
            comm: An intra-communicator of mpi4py; `None` is `MPI.COMM_WORLD`. It is duplicated.

        Returns:
            The bound object. Give its communicators back with `close`, or use it in a `with` statement.
        """
        bound = self.bound_to(SyncGroup.from_mpi(comm))
        bound._owns_group = True
        return bound

    @final
    def bound_to(self, group: SyncGroup, options: CommunicationOptions | None = None) -> CrossDeviceOps:
        """Make an object of the same class for a group that stays its owner's.

        Args:
            group: The ranks.
            options: Laid over this object's own.

        Raises:
            UnavailableError: If `options` insist on NCCL where it cannot be had.
        """
        self.require_ranks(group.topology.size)
        bound = copy(self)
        bound._options, bound._bound = self._merge(options), Reductions(group, bound)
        return bound

    @final
    def close(self) -> None:
        """Free the communicators that `bind` made. Collective.

        Raises:
            RuntimeError: If this object was not made by `bind`.
        """
        if self._bound is None or not self._owns_group:
            raise RuntimeError(f"this {type(self).__name__} was not made by bind(), so it has nothing to close")
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
            per_replica_value: This rank's contribution: an array, a number, or a nest of them. A `Mirrored` value
                has no contributions: its mean is itself.
            destinations: A rank, a sequence of ranks, `"all"`, `"/rank:3"`, a distributed value or a variable.
            options: Laid over the strategy's.
            experimental_hints: `options` under an old name (deprecated).

        Returns:
            The result where this rank is a destination, else `None`.

        Raises:
            InvalidArgumentError: If the ranks' arguments differ, or cannot be reduced. On every rank.
            ValueError: If `reduce_op` or `destinations` is none of what is listed.
        """
        options = options_or_hints(options, experimental_hints)
        return self._batch("reduce", reduce_op, [(per_replica_value, destinations)], options)[0]

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

        Values with the same destinations travel together, in few large messages.

        Args:
            reduce_op: A `ReduceOp` or its name in any case.
            value_destination_pairs: Tuples of a value and its destinations, each as in `reduce`.
            options: Laid over the strategy's.
            experimental_hints: As in `reduce`.

        Returns:
            The results, in the order of the pairs; `None` for those that this rank is no destination of.

        Raises:
            TypeError: If the pairs are not iterable.
            ValueError: If one is not a tuple of two.
            InvalidArgumentError: As in `reduce`.
        """
        options = options_or_hints(options, experimental_hints)
        return self._batch("batch_reduce", reduce_op, value_destination_pairs, options)

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
            options: Laid over the strategy's.
            out: A nest of arrays like the result, which then takes it. May be `value` itself.
            call: What errors and logs call it.
            error: What the caller knows to be wrong on this rank. It is raised, and on all ranks.

        Returns:
            A nest like `value`; `out`, if it was given.

        Raises:
            InvalidArgumentError: As in `reduce`.
        """
        reductions = self._tied()
        opened, kept = self._open(reductions.group, call, reduce_op, value, options, out, error)
        results = reductions.run(opened)
        return out if out is not None else rebuild_results(value, results, kept)

    @final
    def start_all_reduce(
        self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None, *, out: Any = None
    ) -> PendingResult:
        """Start an all-reduce, and return before it is done. Collective; all ranks start calls in the same order.

        Args:
            reduce_op: As in `all_reduce`, and so are the others.
            value: This rank's contribution, not to be changed until the result is there.
            options: Laid over the strategy's.
            out: A nest of arrays that takes the result.

        Returns:
            A handle, whose `wait` returns what `all_reduce` does, or raises it.
        """
        reductions = self._tied()
        opened, kept = self._open(reductions.group, "start_all_reduce", reduce_op, value, options, out, None)
        return PendingResult(reductions.group, reductions.start(opened), value, out, kept)

    def _open(
        self, group: SyncGroup, call: str, reduce_op: Any, value: Any, options: Any, out: Any, error: Exception | None
    ) -> tuple[ReductionCall, MirroredLeaves]:
        leaves: list[Any] = []
        structure: nest.Structure = nest.LEAF
        kept = NO_MIRRORED
        outs = None
        op = ReduceOp.SUM
        merged = self._options
        try:
            op = reduce_op if type(reduce_op) is ReduceOp else ReduceOp.of(reduce_op)
            if options is not None:
                merged = self._merge(options)
            leaves, structure, kept = flatten_contributions(op, value, group)
            if out is not None:
                outs = flatten_out(structure, bool(kept), out)
        except Exception as problem:  # whatever it is, the other ranks must learn of it
            error = error or problem
        return ReductionCall(call, op, merged, leaves, structure, tuple(kept), None, outs, error), kept

    @final
    def broadcast(
        self, tensor: Any, destinations: Any, *, call: str = "broadcast", error: Exception | None = None
    ) -> Any:
        """Send rank 0's value to the destinations. Collective.

        Args:
            tensor: An array, a number, or a nest of them, of the same form, shapes and dtypes on every rank; only
                rank 0's numbers matter.
            destinations: As in `reduce`.
            call: What errors call it.
            error: What the caller knows to be wrong on this rank. It is raised, and on all ranks.

        Returns:
            Rank 0's value where this rank is a destination, else `None`.

        Raises:
            InvalidArgumentError: If the ranks' arguments differ. On every rank.
            ValueError: If `destinations` is none of what is listed.
        """
        return broadcast(self.group, call, tensor, destinations, self._options, error)

    @final
    def _batch(
        self,
        call: str,
        reduce_op: ReduceOp | str,
        pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None,
    ) -> list[Any]:
        reductions = self._tied()
        group = reductions.group
        op, merged, error = ReduceOp.SUM, self._options, None
        opened: list[ValueWithDestinations] = []
        try:
            op = ReduceOp.of(reduce_op)
            merged = self._merge(options)
            opened = [ValueWithDestinations.open(op, pair, group) for pair in pairs]
        except Exception as problem:  # whatever it is, the other ranks must learn of it
            error = problem
        leaves = [leaf for pair in opened for leaf in pair.leaves]
        ranks = tuple(pair.ranks for pair in opened for _ in pair.leaves)
        forms, kept = tuple(pair.structure for pair in opened), tuple(tuple(pair.mirrored) for pair in opened)
        made = ReductionCall(call, op, merged, leaves, forms, kept, ranks, None, error)
        results = iter(reductions.run(made))
        return [pair.close(results, group.topology.rank) for pair in opened]

    @final
    def _merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        if options is None:
            return self._options
        merged = self._options.merge(options)
        require_usable(options)
        if options.implementation is CommunicationImplementation.RING and not self._is_replaceable:
            name = type(self).__name__
            raise ValueError(f"this {name} adds by a function of its own, which a ring cannot; leave one of them out")
        return merged

    @final
    def _tied(self) -> Reductions:
        if self._bound is not None:
            return self._bound
        entry = context_stack.current()
        if entry is None:
            raise RuntimeError(
                f"{type(self).__name__} is tied to no ranks: call it inside `with strategy.scope():`, or on what its "
                "bind(comm) returns"
            )
        group = entry.strategy.extended.group
        if self._in_scope is None or self._in_scope.group is not group:
            self._in_scope = Reductions(group, self)
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
            return all_reduce_of_world
        if options.implementation is CommunicationImplementation.RING:
            return ring_of_world
        return self._all_reduce

    @final
    def reduce_to(self, root: int) -> Reduce:
        """See `Algorithm`."""
        return lambda levels, buffer, reduction: self._reduce_to_root(levels, buffer, reduction, root)
