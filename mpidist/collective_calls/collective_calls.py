"""The collective calls of a strategy: every rank makes them, in the same order."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from mpidist import nest
from mpidist.collective_calls.object_calls import broadcast_object, gather_object
from mpidist.collective_calls.symmetric_empty import symmetric_empty
from mpidist.cross_device_ops.axis_reduction import reduce_along_axis
from mpidist.cross_device_ops.weighted_mean import weighted_mean
from mpidist.options import CommunicationOptions, ReduceOp, options_or_hints
from mpidist.strategy_parts import StrategyParts
from mpidist.transport import arrays
from mpidist.transport.array_libraries.libraries import library_of, writable_like
from mpidist.values import contributions

__all__ = ["CollectiveCalls"]


class CollectiveCalls(ABC):
    """The collective calls of a strategy. Its part `Strategy` has the others.

    Args:
        parts: The parts of the strategy.
    """

    def __init__(self, parts: StrategyParts) -> None:
        self._parts = parts

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: int | tuple[int, ...] | None = None,
        options: CommunicationOptions | None = None,
        *,
        weight: Any = None,
        out: Any = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce a value of every rank, and give every rank the result. Collective.

        Args:
            reduce_op: A `ReduceOp` or its name in any case.
            value: This rank's contribution, or a distributed value, or a nest of them.
            axis: An axis, or a tuple of axes, to reduce along on every rank, too. A mean is then the sum over all ranks
                divided by the count over all ranks, so that ranks with more rows weigh more. `()` means `None`.
            options: Override the strategy's.
            weight: For means without `axis`: how much this rank's value weighs, as a number >= 0; of several replicas a
                `PerReplica`. The mean is the sum of values times weights, divided by the sum of weights. A value of
                weight 0 does not count, whatever it is.
            out: A nest of arrays like the result, which the result is written to. May be `value` itself.
            experimental_hints: The old name of `options` (deprecated).

        Returns:
            `out`, if given; else a nest like `value`, of new arrays without these axes.

        Raises:
            InvalidArgumentError: If the ranks' arguments differ, or cannot be reduced, or all weights are 0. On every
                rank.
            ValueError: If `weight` is negative or not finite, or given for another operation or with `axis`. On every
                rank.
            RuntimeError: Inside `run`, where `ReplicaContext.all_reduce` takes the place of this method.
        """
        self._parts.require_computing("reduce")
        ops = self._parts.cross_device_ops
        if experimental_hints is not None:
            options = options_or_hints(options, experimental_hints)
        has_axis = axis is not None and not (isinstance(axis, tuple) and not axis)
        if weight is not None:
            return weighted_mean(ops, "reduce", reduce_op, value, weight, options, out=out, has_axis=has_axis)
        if axis is not None and has_axis:
            return reduce_along_axis(ops, reduce_op, value, axis, options, out)
        return ops.all_reduce(reduce_op, value, options, out=out, call="reduce")

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate every rank's value along an axis, in rank order, for every rank. Collective.

        Args:
            value: An array of at least one dimension, a distributed value of one, or a nest. Lengths along `axis` may
                differ between ranks.
            axis: The axis; negative counts from the end.

        Returns:
            A nest like `value`.

        Raises:
            InvalidArgumentError: If shapes differ along another axis, or a value has no such axis. On every rank.
            RuntimeError: Inside `run`, where `ReplicaContext.all_gather` takes the place of this method.
        """
        self._parts.require_computing("gather")
        return self._parts.all_gather("gather", value, axis, None)

    def broadcast(self, value: Any, root: int = 0, *, out: Any = None) -> Any:
        """Give every rank the value of one rank. Collective.

        Args:
            value: An array, a number, or a nest of them, of the same form, shapes and dtypes on every rank. The numbers
                of other ranks than the root are ignored.
            root: The rank whose value is sent.
            out: A nest of arrays like `value`, which the root's value is written to. May be `value` itself.

        Returns:
            `out`, if given; else a nest like `value`.

        Raises:
            InvalidArgumentError: If the ranks' arguments differ. On every rank.
            ValueError: If there is no rank `root`. On every rank.
            RuntimeError: Inside `run`, and of workers of parameter servers.
        """
        self._require_lock_step("broadcast")
        return self._parts.cross_device_ops.broadcast(value, "all", root=root, out=out)

    def broadcast_object(self, obj: Any, root: int = 0, *, pickle: bool = False) -> Any:
        """Give every rank an object of one rank. Collective: two broadcasts.

        Args:
            obj: On the root: `None`, a number, a text, an array, or a list, tuple or dict of them. On other ranks it is
                ignored.
            root: The rank whose object is sent.
            pickle: Send an object of any kind that can be pickled. Unpickling may run any code that the root chose.

        Returns:
            A copy of the root's object, on the root, too.

        Raises:
            InvalidArgumentError: If the ranks' arguments differ, or the root's object cannot be sent. On every rank.
            ValueError: If there is no rank `root`. On every rank.
            Exception: What unpickling raised on the lowest rank where it did. On every rank.
            RuntimeError: Inside `run`, and of workers of parameter servers.
        """
        self._require_lock_step("broadcast_object")
        return broadcast_object(self._parts.group, obj, root, pickle, self._parts.options)

    def gather_object(self, obj: Any, *, pickle: bool = False) -> list[Any]:
        """Give every rank the objects of all ranks. Collective: one all-gather.

        Args:
            obj: This rank's object, as in `broadcast_object`. Objects of ranks may be of different kinds and sizes.
            pickle: As in `broadcast_object`.

        Returns:
            Copies of the objects, in rank order.

        Raises:
            InvalidArgumentError: If the ranks' arguments differ, or the object of a rank cannot be sent. On every rank.
            Exception: What unpickling raised on the lowest rank where it did. On every rank.
            RuntimeError: Inside `run`, and of workers of parameter servers.
        """
        self._require_lock_step("gather_object")
        return gather_object(self._parts.group, obj, pickle, self._parts.options)

    def barrier(self) -> None:
        """Wait until all ranks call this method. Collective.

        With parameter servers: until all workers call it, and all their changes are made. On workers.

        Raises:
            InvalidArgumentError: If other ranks make another call meanwhile.
            DeadlineExceededError: If not all ranks come within the strategy's `timeout_seconds`.
            RuntimeError: Inside `run`.
        """
        service = self._parts.service
        if service is not None:
            self._parts.group.require_open("barrier()")
            service.meet_peers("barrier()")
            return
        self._parts.require_cross_replica("barrier()")
        self._parts.agree("barrier()", {}, variant=1)  # a variant makes ranks meet also where calls are not compared

    def symmetric_empty(self, shape: int | Sequence[int], dtype: Any, *, per_node: bool = False) -> Any:
        """Allocate an array that all ranks of a node can reach. Collective.

        A strategy whose devices the user named as GPUs gives an array in the rank's device memory, unless `per_node`.

        Args:
            shape: The shape, the same on every rank.
            dtype: The dtype, the same on every rank.
            per_node: Make one array for all ranks of a node, which reductions and broadcasts write (`out=`) and all
                ranks read, instead of one for each rank. Always in host memory, as ranks share no other.

        Returns:
            An array of uninitialised numbers, which lives until `close`.

        Raises:
            TypeError: If the shape of a rank does not consist of whole numbers. On every rank.
        """
        return symmetric_empty(self._parts, [(shape, dtype, False)], per_node)[0]

    def symmetric_empty_like(self, value: Any, *, per_node: bool = False) -> Any:
        """Allocate arrays like those of a nest, as `symmetric_empty` does. Collective.

        An array for one in device memory lies there, too, unless `per_node`.

        Returns:
            A nest like `value`: of tensors for tensors of PyTorch, for example; of arrays of NumPy or CuPy for numbers,
            and for arrays that cannot be written, as those of JAX.
        """
        specs: list[tuple[Any, Any, bool]] = []
        leaves: list[Any] = []
        error = None
        try:
            leaves, _ = nest.flatten(contributions(value))
            natives = [library_of(leaf).to_native(leaf) for leaf in leaves]
            specs = [(one.shape, one.dtype.newbyteorder("="), arrays.is_device(one)) for one in natives]
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = problem
        allocated = symmetric_empty(self._parts, specs, per_node, error)
        return nest.rebuild(contributions(value), list(map(writable_like, leaves, allocated)))

    def raise_together(self, what: str = "") -> AbstractContextManager[None]:
        """Raise an exception of one rank on all ranks, at the end of a block of local work. Collective.

            with strategy.raise_together("reading the shards"):
                data = read(my_files)

        At the end of the block all ranks wait for each other. If a rank had an exception, all ranks raise that of the
        lowest such rank: of the same type and text, with that rank's traceback as the cause; or a `PeerFailedError`
        with the text where the exception cannot be pickled. The strategy stays usable. Cost: one small all-reduce.

        Args:
            what: What the block does, for errors; equal on all ranks.

        Raises:
            InvalidArgumentError: If other ranks make another call meanwhile.
            DeadlineExceededError: If not all ranks reach the end of the block within the strategy's `timeout_seconds`.
        """
        return self._parts.raise_together("raise_together", what)

    def _require_lock_step(self, call: str) -> None:
        self._parts.require_cross_replica(call)
        if self._parts.service is not None:
            raise RuntimeError(
                f"{call} of a {type(self).__name__}: its workers are not in step, and make no call together but "
                "barrier(); let them share what they need in variables"
            )


for _method in filter(callable, vars(CollectiveCalls).values()):  # Python names methods so in errors of its own
    _method.__qualname__ = _method.__qualname__.replace(CollectiveCalls.__name__, "Strategy")
