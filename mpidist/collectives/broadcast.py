"""Broadcast: the values of one rank, sent to other ranks."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, final

import numpy as np

from mpidist import nest
from mpidist.collectives.arguments.checked_outs import CheckedOuts
from mpidist.collectives.arguments.destinations import ranks_of, send_to
from mpidist.collectives.arguments.operands import Operands, host_sizes, require_memory, require_values, result_arrays
from mpidist.collectives.arguments.out_arrays import (
    copy_overwritten,
    flatten_out,
    native_outs,
    target_arrays,
    write_outs,
)
from mpidist.collectives.arguments.signature import Arguments, agreed_call
from mpidist.errors import InvalidArgumentError
from mpidist.nest.text import array_names, form_text
from mpidist.options import CommunicationOptions
from mpidist.transport import arrays
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.values import DistributedValues
from mpidist.whole_number import whole_number

__all__ = ["broadcast"]


@final
class _Broadcast(Arguments):
    """The arguments of a broadcast, and its new results; `per_node_indices` are those of outs that a node shares."""

    def __init__(self, group: SyncGroup, call: str, tensor: Any, destinations: Any, root: Any, out: Any) -> None:
        self.ranks = ranks_of(destinations, group.topology.size, tensor)
        self.root = whole_number("root", root, 0)
        if self.root >= group.topology.size:
            raise ValueError(f"root {root} is not one of the ranks 0 to {group.topology.size - 1}")
        leaves, self.structure = nest.flatten(tensor)
        leaves = [leaf.values[0] if isinstance(leaf, DistributedValues) else leaf for leaf in leaves]
        require_values(leaves, tensor)
        self.operands = Operands.of(leaves, group.devices, call)
        if any(spec.dtype.hasobject or spec.dtype.names is not None for spec in self.operands.specs):
            raise InvalidArgumentError("cannot broadcast an array of Python objects or records; needed numbers")
        dtypes = [spec.dtype for spec in self.operands.specs]
        self.outs: list[Any] | None = None
        self.results: list[Any] = []
        self.per_node_indices: list[int] = []
        if out is not None:
            if len(self.ranks) < group.topology.size:
                raise ValueError(
                    f'out takes the value on every rank, so destinations must be "all", got {destinations!r}'
                )
            operands = self.operands
            self.outs = outs = native_outs(flatten_out(self.structure, False, out), leaves, operands.arrays)
            checked = CheckedOuts(outs, operands.arrays, operands.specs, dtypes, group.shared)
            self.per_node_indices = checked.per_node_indices
        else:
            num_local = group.topology.local_size
            require_memory(num_local * sum(host_sizes(self.operands.specs, dtypes)), num_local)
            self.results = result_arrays(self.operands.specs, dtypes, group.result_memory)

    def key(self) -> Hashable:
        return self.ranks, self.root, tuple(self.per_node_indices), self.structure, self.operands.key

    def describe(self) -> dict[str, str]:
        fields = {
            "destinations": str(self.ranks),
            "root": str(self.root),
            "outs that are per-node arrays": ", ".join(f"out {index}" for index in self.per_node_indices) or "none",
            "form of the nest": form_text(self.structure),
        }
        names = array_names(self.structure)
        return fields | {name: repr(spec) for name, spec in zip(names, self.operands.specs, strict=True)}


def broadcast(
    group: SyncGroup,
    call: str,
    tensor: Any,
    destinations: Any,
    options: CommunicationOptions,
    error: Exception | None = None,
    root: int = 0,
    out: Any = None,
) -> Any:
    """Send one rank's value to the destinations: `CrossDeviceOps.broadcast`. Collective.

    One broadcast per array, S bytes to each rank; if not all ranks are destinations, one message to each destination.
    """

    def open_arguments() -> _Broadcast:
        return _Broadcast(group, call, tensor, destinations, root, out)

    with agreed_call(group, call, options, open_arguments, error) as (opened, _):
        values, results, outs = opened.operands.arrays, opened.results, opened.outs
        if outs is not None:
            specs = opened.operands.specs
            dtypes = [spec.dtype for spec in specs]
            results = target_arrays(outs, specs, dtypes, group.shared)
            values = copy_overwritten(values, results)
        for array, result in zip(values, results, strict=True):
            _send(group, array, result, opened.root, opened.ranks)
        if outs is not None:
            write_outs(outs, results, group.shared)
            arrays.wait_for_writes(outs)
            return out
    return nest.rebuild(tensor, opened.operands.restore(results)) if group.topology.rank in opened.ranks else None


def _send(group: SyncGroup, array: Any, result: Any, root: int, ranks: tuple[int, ...]) -> None:
    """Send the root's array into the `result` of the other ranks."""
    if result.dtype.kind in "SU" and result.nbytes:  # sent as bytes: one element may be longer than a message
        array, result = arrays.bytes_of(np.ascontiguousarray(array)), arrays.bytes_of(result)
    levels = group.levels_of(arrays.is_device(result))
    if len(ranks) == group.topology.size and array.flags.c_contiguous and array.dtype == result.dtype:
        levels.world.broadcast(array.reshape(-1), root, result.reshape(-1))
        return
    if group.topology.rank == root and result is not array:
        result[...] = array
    send_to(levels.world, result.reshape(-1), root, ranks)
