"""A variable whose copies are kept equal: what replicas assign is aggregated before it is written."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import numpy as np

from mpidist import context_stack
from mpidist.context_stack import parts_of
from mpidist.options import ReduceOp
from mpidist.transport import arrays
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.values import Contributions, require_contributions
from mpidist.variables.assigning import store
from mpidist.variables.casting import is_python_number
from mpidist.variables.rules import VariableAggregation, VariableSynchronization
from mpidist.variables.sparse_updates import AGGREGATED_CALLS, change_rows, checked_rows
from mpidist.variables.variable import Variable

__all__ = ["MirroredVariable"]


@final
class MirroredVariable(Variable, synchronization=VariableSynchronization.ON_WRITE):
    """A variable whose copies are kept equal: every rank writes the aggregate of what the replicas assign.

    The replicas of one rank share the rank's copy. What one of them assigns with aggregation NONE waits in the
    `PendingWrites` of the run, until all of them have assigned the same.
    """

    _is_trainable_by_default = True

    def is_mirrored_over(self, group: SyncGroup) -> bool:
        """Return True for the ranks of its strategy, in cross-replica context."""
        entry = context_stack.innermost()
        return group is parts_of(self._strategy).group and (entry is None or entry.replica_context is None)

    def memory(self) -> Any:
        """Return this rank's copy, to be written with equal values on all ranks; `None` if ranks share it. Local."""
        self._forget_copies()
        return None if self._placement.is_shared else self._value

    def _place(self, value: Any) -> Sequence[Any]:
        self._placement = parts_of(self._strategy).variable_placement.for_value(value)
        stored = self._placement.store(value)
        is_on_several = arrays.is_device(stored) and parts_of(self._strategy).replicas.has_several_gpus
        self._gpu_copies: dict[int, Any] | None = {} if is_on_several else None  # by GPU, read since the last write
        if parts_of(self._strategy).group.settings.check_values:
            parts_of(self._strategy).mirrored.append(weakref.ref(self))
        return (stored,) * (1 if self._replicas is None else self._replicas.num_here)

    def _here(self) -> Any:
        context = self._sharing_context()
        if context is None:
            return self._value
        seen = context.calls.pending.read(context.replica_id_in_sync_group, self._value)
        if seen is not self._value or self._gpu_copies is None:
            return seen
        index = arrays.current_gpu()
        if index not in self._gpu_copies:
            self._gpu_copies[index] = arrays.on_current_device(self._value)
        return self._gpu_copies[index]

    def _read_view(self) -> Any:
        return self._local_view if self._replicas is None else self.local_value()

    def _sharing_context(self) -> context_stack.CurrentReplica | None:
        """Return the current replica's context in `run`, if replicas share copies: then assignments wait in it.

        Also on a rank with one replica: what replicas of another rank refuse in their next call is written on no rank.
        """
        if self._replicas is None or not self._replicas.share_ranks:
            return None
        entry = context_stack.innermost()
        return entry.replica_context if entry is not None and entry.strategy is self._strategy else None

    def _assign_in_replica(self, value: Any, ufunc: np.ufunc | None) -> None:
        if self._aggregation is VariableAggregation.NONE:
            self._require_own_copy()
            if self._replicas is None:
                self._write(value, ufunc)
            else:
                self._change_here(partial(store, array=self._cast(value), ufunc=ufunc))
            return
        array, error = self._value, None
        try:
            array = self._contribution(value)
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = problem
        context = context_stack.current_replica()
        assert context is not None
        context.calls.write_together(self._call_of(ufunc), partial(self._write_aggregate, ufunc), array, error)

    def _write_aggregate(self, ufunc: np.ufunc | None, given: Sequence[Any], error: Exception | None) -> None:
        """Aggregate what the replicas of all ranks assign, `given` on this rank, and write it."""
        ops, call = parts_of(self._strategy).cross_device_ops, self._call_of(ufunc)
        if self._takes_first:
            value = ops.broadcast(given[0], "all", call=call, error=error)
        else:
            value = ops.all_reduce(ReduceOp[self._aggregation.name], Contributions(given), call=call, error=error)
        self._write(value, ufunc)

    def _call_of(self, ufunc: np.ufunc | None) -> str:
        """Name an assignment, which must be of one kind on all replicas."""
        return f"assignment to {self._what}" + ("" if ufunc is None else f" by {ufunc.__name__}")

    def _change_here(self, change: Callable[[Any], None]) -> None:
        """Change the copy as the current replica alone sees it."""
        context = self._sharing_context()
        if context is None:
            change(self._value)
        else:
            replica_id = context.replica_id_in_sync_group
            context.calls.pending.change(replica_id, self._name, self._value, change, self._forget_copies)

    def _forget_copies(self) -> None:
        """Forget the copies on other GPUs, because this rank's copy is written."""
        if self._gpu_copies is not None:
            self._gpu_copies.clear()

    def _write(self, value: Any, ufunc: np.ufunc | None) -> None:
        self._forget_copies()
        if not self._placement.is_shared:
            store(self._value, self._cast(value), ufunc)
            return
        array, error = self._value, None
        try:
            array = self._cast(value)
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = problem
        self._placement.write(self._what, partial(store, self._value, array, ufunc), error)

    def _require_own_copy(self) -> None:
        if self._placement.is_shared:
            what = f"variable {self._name!r} has aggregation NONE and is one for all ranks of a node"
            raise ValueError(f"{what}: a replica cannot assign to it by itself; choose SUM, MEAN, ...")

    def _contribution(self, value: Any) -> Any:
        num_replicas = self._strategy.num_replicas_in_sync
        if self._aggregation is VariableAggregation.SUM and num_replicas > 1:
            require_contributions(ReduceOp.SUM, [value], parts_of(self._strategy).group, num_replicas)
            if is_python_number(value):
                raise ValueError(
                    f"a non-DistributedValues value {value!r} cannot be reduced: assigned to variable {self._name!r} "
                    f"with aggregation SUM, it would count {num_replicas} times. Assign an array that this replica "
                    "contributes"
                )
        array = self._cast(value)
        return array if array.shape == self.shape else np.broadcast_to(array, self.shape)

    def _scatter(self, call: str, delta: Any) -> None:
        entry = self._current_entry(call)
        context = None if entry is None else entry.replica_context
        aggregates = context is not None and self._aggregation is not VariableAggregation.NONE
        if context is not None and not aggregates:
            self._require_own_copy()
        elif aggregates and call not in AGGREGATED_CALLS and not self._takes_first:
            raise NotImplementedError(
                f"{call} of variable {self._name!r} has no {self._aggregation} over replicas; choose aggregation "
                "ONLY_FIRST_REPLICA or NONE, or change the rows outside of strategy.run()"
            )
        rows, error = (np.empty(0, np.int64), self._value), None
        try:
            rows = checked_rows(delta, self._value, f"variable {self._name!r}")
        except Exception as problem:
            error = problem
        if context is None or not aggregates:
            if context is None or self._replicas is None or error is not None:
                self._forget_copies()
                self._placement.write(self._what, partial(change_rows, call, self._value, *rows), error)
            else:
                self._change_here(partial(change_rows, call, indices=rows[0], values=rows[1]))
            return
        if self._takes_first and context.replica_id_in_sync_group != 0:
            rows = rows[0][:0], rows[1][:0]
        what = f"{call} of {self._what}"
        context.calls.write_together(what, partial(self._write_rows, call, what), rows, error)

    @property
    def _takes_first(self) -> bool:
        return self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA

    def _write_rows(self, call: str, what: str, given: Sequence[Any], error: Exception | None) -> None:
        """Gather the rows of the replicas of all ranks, `given` on this rank, and change these rows of the copy."""
        indices, values = parts_of(self._strategy).all_gather(what, Contributions(given), 0, None, error)
        if self._aggregation is VariableAggregation.MEAN:
            values = (values / self._strategy.num_replicas_in_sync).astype(self.dtype, copy=False)
        self._forget_copies()
        self._placement.write(self._what, partial(change_rows, call, self._value, indices, values))
