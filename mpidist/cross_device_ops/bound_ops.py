"""An algorithm at work: the reductions and broadcasts of one group of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

from mpidist.collectives.arguments.destinations import ranks_of, rebuild_results
from mpidist.collectives.arguments.signature import name_call, require_usable
from mpidist.collectives.broadcast import broadcast
from mpidist.collectives.indexed_slices import all_reduce_slices, has_slices
from mpidist.collectives.open_call import PendingResult, open_all_reduce, open_batch_reduce
from mpidist.collectives.plans.local_sums import require_tree_order
from mpidist.collectives.plans.reduce_algorithm import ReduceAlgorithm
from mpidist.collectives.reductions import Reductions
from mpidist.collectives.repeated_calls import key_of_repeated
from mpidist.options import CommunicationImplementation, CommunicationOptions, ReduceOp
from mpidist.replicas import Replicas
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.text import name_ranks

__all__ = ["BoundOps"]


def _is_of_slices(pair: Any) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and has_slices(pair[0])


@final
class BoundOps:
    """The reductions and broadcasts of one group of ranks by one algorithm.

    Args:
        algorithm: The algorithm. Also an attribute.
        group: The ranks, a group that the caller closes. Also an attribute.
        options: Override the algorithm's own.
        replicas: Which replicas this rank carries; by default one. Also an attribute.

    Attributes:
        options: The defaults of all calls.

    Raises:
        UnavailableError: If `options` ask for NCCL and it is not available.
        ValueError: If the algorithm does not work on these ranks. Or, if `replicas` are to be added in the order of a
            tree, if the options or the algorithm ask for another order, or for rounding on the way.
    """

    def __init__(
        self,
        algorithm: ReduceAlgorithm,
        group: SyncGroup,
        options: CommunicationOptions | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        algorithm._require_ranks(group.topology.size)
        self.algorithm, self.group = algorithm, group
        self.replicas = Replicas.one_per_rank(group.topology) if replicas is None else replicas
        self.options = CommunicationOptions()
        self.options = self._merge(algorithm._options.merge(options))
        self._reductions = Reductions(group, algorithm, self.configuration, self.replicas)

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
    ) -> Any:
        """Reduce one value of every rank to the destinations: `CrossDeviceOps.reduce`. Collective."""
        size, num_ranks, error = self.group.topology.size, 0, None
        try:
            num_ranks = len(ranks_of(destinations, size, value))
            if out is not None and num_ranks < size:
                raise ValueError(f'out takes the result on every rank, so pass destinations "all", not {destinations}')
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = name_call(problem, "reduce")
        if error is None and num_ranks < size:
            return self.batch_reduce(reduce_op, [(value, destinations)], options, call="reduce")[0]
        return self.all_reduce(reduce_op, value, options, out=out, call="reduce", error=error)

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        *,
        call: str = "batch_reduce",
    ) -> list[Any]:
        """Reduce many values at once: `CrossDeviceOps.batch_reduce`. Collective."""
        error = None
        if isinstance(pairs, Iterable) and not isinstance(pairs, (list, tuple)):
            try:
                pairs = list(pairs)
            except Exception as problem:  # of any kind: the other ranks must learn of it
                error = name_call(problem, call)
        reduction_call, opened = open_batch_reduce(
            self._reductions, self._merge, call, reduce_op, pairs, options, error
        )
        if reduction_call.error is not None and isinstance(pairs, (list, tuple)) and any(map(_is_of_slices, pairs)):
            return self._batch_reduce_slices(reduce_op, pairs, options, call)
        results = iter(self._reductions.run(reduction_call))
        return [pair.close(results, self.group.topology.rank) for pair in opened]

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
            options: Override those of this object.
            out: A nest of arrays like the result, which the result is written to. May be `value` itself.
            call: The name of the call, for errors and logs.
            error: What the caller found wrong on this rank; raised on all ranks.

        Returns:
            `out`, if given; else a nest like `value`.

        Raises:
            InvalidArgumentError: If the ranks' arguments differ, or cannot be reduced. On every rank.
        """
        reductions = self._reductions
        repeated = key_of_repeated(call, reduce_op, value, options, out, error)
        if repeated is not None:
            own = None if options is None else options.timeout_seconds
            timeout = self.options.timeout_seconds if own is None else own
            if (result := reductions.repeated.run(timeout, *repeated)) is not None:
                if out is not None:
                    return out
                return rebuild_results(value, result, {}) if type(result) is list else result
        reduction_call, mirrored = open_all_reduce(reductions, self._merge, call, reduce_op, value, options, out, error)
        if reduction_call.error is not None and has_slices(value):  # which it refuses
            return self._all_reduce_slices(reduce_op, value, options, out, call, error)
        results = reductions.run(reduction_call)
        if repeated is not None:
            reductions.repeated.add(repeated[0], reduction_call)
        return out if out is not None else rebuild_results(value, results, mirrored)

    def _all_reduce_slices(
        self, reduce_op: Any, value: Any, options: Any, out: Any, call: str, error: Exception | None
    ) -> Any:
        merged = self.options
        try:
            merged = self._merge(options)
            if out is not None:
                raise ValueError("out takes no IndexedSlices, whose numbers of rows are not known before: leave it out")
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = error or name_call(problem, call)

        def reduce_dense(rest: Any) -> Any:
            return self.all_reduce(reduce_op, rest, options, call=call)

        return all_reduce_slices(self.group, call, reduce_op, value, merged, self.replicas, error, reduce_dense)

    def _batch_reduce_slices(self, reduce_op: Any, pairs: Sequence[Any], options: Any, call: str) -> list[Any]:
        """Reduce the pairs of `IndexedSlices` one by one on all ranks, and the others at once. Collective."""
        results, rank, size = [], self.group.topology.rank, self.group.topology.size
        dense = [pair for pair in pairs if not _is_of_slices(pair)]
        rest = iter(self.batch_reduce(reduce_op, dense, options, call=call) if dense else [])
        for at, pair in enumerate(pairs):
            if not _is_of_slices(pair):
                results.append(next(rest))
                continue
            value, error = pair[0], None
            ranks: tuple[int, ...] = ()
            try:
                ranks = ranks_of(pair[1], size, value)
            except Exception as problem:  # of any kind: the other ranks must learn of it
                error = name_call(problem, call)
            name = f"{call} of pair {at} to {name_ranks(ranks)}"
            result = self._all_reduce_slices(reduce_op, value, options, None, name, error)
            results.append(result if rank in ranks else None)
        return results

    def start_all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
        call: str = "start_all_reduce",
        error: Exception | None = None,
    ) -> PendingResult:
        """Start an all-reduce, and return before it completes. Collective; all ranks start calls in the same order.

        Args:
            reduce_op: As in `all_reduce`.
            value: As in `all_reduce`. It must not be changed until `wait` has returned.
            options: As in `all_reduce`.
            out: As in `all_reduce`.
            call: As in `all_reduce`.
            error: As in `all_reduce`.

        Returns:
            A handle, whose `wait` returns or raises what `all_reduce` would.
        """
        reductions = self._reductions
        reduction_call, mirrored = open_all_reduce(reductions, self._merge, call, reduce_op, value, options, out, error)
        return PendingResult(reductions.group, reductions.start(reduction_call), value, out, mirrored)

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
        """Send one rank's value to the destinations: `CrossDeviceOps.broadcast`. Collective.

        Args:
            tensor: An array, a number, or a nest of them.
            destinations: As in `reduce`.
            root: The rank whose value is sent.
            out: A nest of arrays like `tensor`, which the value is written to; for all ranks as destinations.
            call: The name of the call, for errors.
            error: What the caller found wrong on this rank; raised on all ranks.

        Returns:
            The root's value where this rank is a destination, in `out` if given; else `None`.
        """
        return broadcast(self.group, call, tensor, destinations, self.options, error, root, out)

    def _merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Override this object's options by those of a call, and refuse what the algorithm cannot do."""
        if options is None:
            return self.options
        merged, algorithm = self.options.merge(options), self.algorithm
        require_usable(options)
        if self.replicas.tree is not None:
            require_tree_order(merged, None if algorithm._is_replaceable else type(algorithm).__name__)
            merged = merged.merge(CommunicationOptions(reproducible=True))  # they have an order in any case
        if options.implementation is CommunicationImplementation.RING and not algorithm._is_replaceable:
            own = f"this {type(algorithm).__name__} adds by a function of its own"
            raise ValueError(f"{own}, which a ring cannot call; leave one out")
        return merged

    @property
    def configuration(self) -> tuple[Any, ...]:
        """The algorithm's name and parameters, and the options, which must be equal on all ranks."""
        return *self.algorithm._configuration, self.options
