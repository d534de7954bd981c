"""An algorithm at work: the reductions and broadcasts of one group of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, final

import numpy as np

from mpidist.collectives.arguments.destinations import ranks_of, rebuild_results, values_and_ranks
from mpidist.collectives.arguments.signature import name_call, require_usable
from mpidist.collectives.broadcast import broadcast
from mpidist.collectives.indexed_slices import all_reduce_slices, has_slices
from mpidist.collectives.open_call import PendingResult, open_all_reduce
from mpidist.collectives.plans.local_sums import require_tree_order
from mpidist.collectives.plans.reduce_algorithm import ReduceAlgorithm
from mpidist.collectives.reductions import Reductions
from mpidist.collectives.repeated_calls import NO_OTHERS, Described, key_of_array, key_of_repeated, of_first_replica
from mpidist.options import CommunicationImplementation, CommunicationOptions, ReduceOp
from mpidist.replicas import Replicas
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.text import name_ranks
from mpidist.values import Contributions

__all__ = ["BoundOps"]

_MAX_COPIED_BYTES: Final = 1 << 16  # of an array in another layout: a copy takes less time than to check its call again


@final
class BoundOps:
    """The reductions and broadcasts of one group of ranks, which the caller closes, by one algorithm.

    Attributes:
        options: The defaults of all calls.
        reductions: Carries the reductions out.

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
        self.reductions = Reductions(group, algorithm, self.configuration, self.replicas)

    def of_bare_values(self) -> BoundOps:
        """Return the same for calls in `run`, where each rank has one replica, whose value is not distributed."""
        return BoundOps(self.algorithm, self.group, self.options, replace(self.replicas, are_bare=True))

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
        size, error = self.group.topology.size, None
        ranks: tuple[int, ...] = ()
        try:
            ranks = ranks_of(destinations, size, value)
            if out is not None and len(ranks) < size:
                raise ValueError(f'out takes the result on every rank, so pass destinations "all", not {destinations}')
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = name_call(problem, "reduce")
        result = self.all_reduce(reduce_op, value, options, out=out, call="reduce", error=error, ranks=[ranks])
        return result if self.group.topology.rank in ranks else None

    def batch_reduce(
        self, reduce_op: ReduceOp | str, pairs: Iterable[tuple[Any, Any]], options: CommunicationOptions | None = None
    ) -> list[Any]:
        """Reduce many values at once: `CrossDeviceOps.batch_reduce`. Collective."""
        values: list[Any] = []
        ranks: list[tuple[int, ...]] = []
        error = None
        try:
            values, ranks = values_and_ranks(pairs, self.group.topology.size)
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = name_call(problem, "batch_reduce")
        results = self.all_reduce(reduce_op, values, options, call="batch_reduce", error=error, ranks=ranks)
        rank = self.group.topology.rank
        return [result if rank in own else None for result, own in zip(results, ranks, strict=True)]

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
        call: str = "all_reduce",
        error: Exception | None = None,
        ranks: Sequence[tuple[int, ...]] = (),
    ) -> Any:
        """Reduce a nest of every rank's values, and give every rank the result, in `out` if given. Collective.

        `call` is the name in errors and logs. `error` is the caller's error on this rank; raised on all ranks. `ranks`
        are the destinations of the nest, or of each value of a list: all by default. Other ranks must drop the result.
        """
        is_to_some = ranks and {*map(len, ranks)} != {self.group.topology.size}
        destinations = tuple(ranks) if is_to_some else None
        reductions, first, others, into = self.reductions, value, NO_OTHERS, out
        if type(value) is Contributions or not self.replicas.are_bare:
            first, others, into = of_first_replica(value, out, self.replicas.num_here)
        repeated: Described | None = None
        if options is None and error is None and destinations is None:
            repeated = key_of_array(call, reduce_op, first, into, ())
        if repeated is None:
            repeated = key_of_repeated(call, reduce_op, first, options, into, error, destinations)
        late_out = None
        if repeated is None and not others and destinations is None and self._may_copy(first, into):
            with suppress(MemoryError):  # the other ranks make the call
                # It is reduced in place, so that an out of another dtype than the result is refused.
                copy = np.array(first, order="C")
                repeated = key_of_repeated(call, reduce_op, copy, options, None if into is None else copy, error)
                late_out = into
        result = None
        if repeated is not None:
            timeout = self.options.timeout_seconds if options is None else self.timeout_of(options)
            result = reductions.repeated.run(timeout, *repeated, others)
        if result is not None:
            if late_out is not None:
                late_out[...] = result
            if out is not None:
                return out
            return rebuild_results(value, result, {}) if type(result) is list else result
        given = reduce_op, value, options, out
        reduction_call, mirrored = open_all_reduce(reductions, self._merge, call, *given, error, destinations)
        if reduction_call.error is not None and has_slices(value):  # which it refuses
            to_some = "; ".join(map(name_ranks, destinations or ()))
            return self._all_reduce_slices(*given, f"{call} to {to_some}" if to_some else call, error)
        results = reductions.run(reduction_call)
        if repeated is not None:
            reductions.repeated.add(repeated[0], reduction_call)
        return out if out is not None else rebuild_results(value, results, mirrored)

    def _may_copy(self, value: Any, out: Any) -> bool:
        """Whether an array is small and may be copied, in C's layout, and the result copied to `out`. Local."""
        if type(value) is not np.ndarray or value.nbytes > _MAX_COPIED_BYTES:
            return False
        if out is None:
            return True
        is_like = type(out) is np.ndarray and (out.shape, out.dtype) == (value.shape, value.dtype)
        return is_like and out.flags.forc and out.flags.writeable and self.group.shared.is_private(out)

    def _all_reduce_slices(
        self, reduce_op: Any, value: Any, options: Any, out: Any, call: str, error: Exception | None
    ) -> Any:
        merged = self.options
        try:
            merged = self._merge(options)
            if out is not None:
                raise ValueError("out takes no IndexedSlices, whose numbers of rows are unknown before: leave it out")
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = error or name_call(problem, call)

        def reduce_dense(rest: Any) -> Any:
            return self.all_reduce(reduce_op, rest, options, call=call)

        return all_reduce_slices(self.group, call, reduce_op, value, merged, self.replicas, error, reduce_dense)

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
        """Start `all_reduce`, and return before it completes. Collective; all ranks start calls in the same order."""
        reductions, key = self.reductions, None
        if self.replicas.are_bare and self.group.agreement.is_node_barrier:
            repeated = key_of_repeated(f"start {call}", reduce_op, value, options, out, error)
            if repeated is not None and repeated[1] is not None:  # not tensors, whose objects are often new
                pending, is_known = reductions.repeated.start(self.timeout_of(options), *repeated)
                if pending is not None:
                    return PendingResult(reductions.group, pending, value, out, {})
                key = None if is_known else repeated[0]
        reduction_call, mirrored = open_all_reduce(reductions, self._merge, call, reduce_op, value, options, out, error)
        return PendingResult(reductions.group, reductions.start(reduction_call, key), value, out, mirrored)

    def compare_all_reduce(self, call: str, reduce_op: Any, value: Any, options: Any, out: Any) -> None:
        """Check the arguments of an `all_reduce` on all ranks, and reduce nothing. Collective."""
        arguments = reduce_op, value, options, out, None
        self.reductions.compare(open_all_reduce(self.reductions, self._merge, call, *arguments)[0])

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
        """Send one rank's value to the destinations: `CrossDeviceOps.broadcast`. Collective."""
        return broadcast(self.group, call, tensor, destinations, self.options, error, root, out)

    def timeout_of(self, options: CommunicationOptions | None) -> float | None:
        """Return the deadline of a call with these options, in seconds. Local."""
        own = None if options is None else options.timeout_seconds
        return self.options.timeout_seconds if own is None else own

    def _merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Override this object's options by those of a call, and refuse options that the algorithm does not support."""
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
