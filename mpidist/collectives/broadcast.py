"""Broadcast: rank 0's values, sent to other ranks."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, final

import numpy as np

from mpidist import nest
from mpidist.collectives.arguments import (
    Arguments,
    Operands,
    agreed_call,
    ranks_of,
    require_values,
    result_arrays,
    send_to,
)
from mpidist.errors import InvalidArgumentError
from mpidist.nest import array_names, form_text
from mpidist.options import CommunicationOptions
from mpidist.transport import SyncGroup, arrays
from mpidist.values import DistributedValues

__all__ = ["broadcast"]


@final
class _Broadcast(Arguments):
    def __init__(self, group: SyncGroup, call: str, tensor: Any, destinations: Any) -> None:
        self.ranks = ranks_of(destinations, group.topology.size, tensor)
        leaves, self.structure = nest.flatten(tensor)
        leaves = [leaf.values[0] if isinstance(leaf, DistributedValues) else leaf for leaf in leaves]
        require_values(leaves, tensor)
        self.operands = Operands.of(leaves, group.devices, call)
        if any(spec.dtype.hasobject or spec.dtype.names is not None for spec in self.operands.specs):
            raise InvalidArgumentError("cannot broadcast an array of Python objects or records; needed numbers")

    def key(self) -> Hashable:
        return self.ranks, self.structure, self.operands.key

    def describe(self) -> dict[str, str]:
        fields = {"destinations": str(self.ranks), "form of the nest": form_text(self.structure)}
        names = array_names(self.structure)
        return fields | {name: repr(spec) for name, spec in zip(names, self.operands.specs, strict=True)}


def broadcast(
    group: SyncGroup,
    call: str,
    tensor: Any,
    destinations: Any,
    options: CommunicationOptions,
    error: Exception | None = None,
) -> Any:
    """Send rank 0's value to the destinations: `CrossDeviceOps.broadcast`. Collective.

    One broadcast per array, S bytes to each rank; if not all ranks are destinations, one message to each destination.

    Args:
        group: The ranks.
        call: The name of the call, for errors.
        tensor: An array, a number, or a nest of them; the numbers of rank 0 are sent.
        destinations: As in `CrossDeviceOps.reduce`.
        options: Only `timeout_seconds` is used.
        error: An error that the caller found on this rank, which all ranks raise; `None` for none.

    Returns:
        Rank 0's value where this rank is a destination, else `None`.

    Raises:
        InvalidArgumentError: If the ranks' arguments differ. On every rank.
    """

    def open_arguments() -> _Broadcast:
        return _Broadcast(group, call, tensor, destinations)

    with agreed_call(group, call, options, open_arguments, error) as (opened, _):
        results = result_arrays(opened.operands.specs, [spec.dtype for spec in opened.operands.specs])
        for array, result in zip(opened.operands.arrays, results, strict=True):
            _send(group, array, result, opened.ranks)
    return nest.rebuild(tensor, opened.operands.restore(results)) if group.topology.rank in opened.ranks else None


def _send(group: SyncGroup, array: Any, result: Any, ranks: tuple[int, ...]) -> None:
    if result.dtype.kind in "SU" and result.nbytes:  # sent as bytes: one text may be longer than a message
        array, result = arrays.bytes_of(np.ascontiguousarray(array)), arrays.bytes_of(result)
    levels = group.levels_of(arrays.is_device(result))
    if len(ranks) == group.topology.size and array.flags.c_contiguous and array.dtype == result.dtype:
        levels.world.broadcast(array.reshape(-1), 0, result.reshape(-1))
        return
    if group.topology.rank == 0:
        result[...] = array
    send_to(levels.world, result.reshape(-1), 0, ranks)
