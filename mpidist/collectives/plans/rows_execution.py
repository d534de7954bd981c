"""Reductions in the order of a tree where a rank or a node has several rows. Those of GPUs go through the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np

from mpidist.collectives.arguments.operands import NewResults, Spec
from mpidist.collectives.arguments.out_arrays import target_arrays, write_outs
from mpidist.collectives.plans.call import Execution, ReductionCall
from mpidist.collectives.plans.local_sums import LocalSums
from mpidist.transport import arrays
from mpidist.transport.group.row_reduction import all_reduce_rows
from mpidist.transport.group.started_calls import Pending, Steps
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.host_memory.result_memory import SumMemory
from mpidist.transport.reduction import Reduction
from mpidist.transport.tree import ReplicaTree

__all__ = ["RowList", "RowsExecution"]


@final
class RowList(NamedTuple):
    """Arrays of one dtype, `wire`, and kind of memory, which are reduced as one."""

    indices: tuple[int, ...]
    wire: np.dtype[Any]
    device: bool
    reduction: Reduction
    divide_by: int


@final
class RowsExecution(Execution):
    """Carries out the calls of one plan: adds replicas to rows, all-reduces the rows, and copies the sums out.

    `is_wanted`: for each result, whether this rank is a destination.
    """

    def __init__(
        self,
        group: SyncGroup,
        tree: ReplicaTree,
        lists: Sequence[RowList],
        local_sums: LocalSums,
        memory: SumMemory,
        specs: Sequence[Spec],
        result_dtypes: Sequence[np.dtype[Any]],
        is_wanted: Sequence[bool],
    ) -> None:
        self._group, self._tree, self._lists = group, tree, lists
        self._local_sums, self._specs, self._result_dtypes = local_sums, specs, result_dtypes
        self._memory, self._is_wanted = memory, is_wanted
        self._new_results = NewResults(specs, result_dtypes, group.result_memory)
        self._uses_device = any(spec.device for spec in specs)

    def prepare(self, call: ReductionCall, is_started: bool) -> None:
        """Check that the GPU can be used now."""
        if self._uses_device:
            self._group.devices.require_usable(call.name)

    def finish(self, call: ReductionCall, has_same_places: bool) -> list[Any]:
        shared, specs, dtypes = self._group.shared, self._specs, self._result_dtypes
        if call.outs is None:
            results = self._new_results.take()
        else:
            results = target_arrays(call.outs, specs, dtypes, shared)
        with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
            for row_list in self._lists:
                total = self._reduce(row_list, call.components)
                at = 0
                for index in row_list.indices:
                    count = specs[index].num_elements
                    part = total[at : at + count].reshape(specs[index].shape)
                    results[index][...] = part if row_list.divide_by == 1 else part / row_list.divide_by
                    at += count
        if call.outs is not None:
            write_outs(call.outs, results, shared)
            if self._uses_device:
                arrays.wait_for_writes(call.outs)
            return list(call.outs)
        return [result if wanted else None for result, wanted in zip(results, self._is_wanted, strict=True)]

    def steps(self, call: ReductionCall, pending: Pending, has_same_places: bool) -> Steps:
        while not pending.may_block and self._group.topology.size > 1:
            yield 0
        return self.finish(call, has_same_places)

    def _reduce(self, row_list: RowList, components: Sequence[Sequence[Any]]) -> Any:
        """Return the sum of all replicas' arrays, one array after the other. Collective."""
        count = sum(self._specs[index].num_elements for index in row_list.indices)
        num_rows = self._local_sums.num_rows
        if row_list.device:
            rows = [arrays.empty((count,), row_list.wire, device=True) for _ in range(num_rows)]
        else:
            rows = self._memory.take([(count,)] * num_rows, [row_list.wire] * num_rows)
        self._local_sums.add_to_rows(components, row_list.indices, rows)
        if self._group.topology.size == 1:
            return rows[0]
        on_host = [arrays.to_host(row) for row in rows] if row_list.device else rows
        all_reduce_rows(self._group.levels, self._tree, row_list.reduction.ufunc, on_host, on_host[0])
        return arrays.to_device(on_host[0]) if row_list.device else on_host[0]
