"""Rank 0's values, sent to others."""

from __future__ import annotations

from typing import Any

from mpidist import nest
from mpidist.collectives.arguments import Operands, result_arrays
from mpidist.collectives.describing import specs_text
from mpidist.collectives.destinations import ranks_of, send_to
from mpidist.collectives.leaves import require_values
from mpidist.errors import InvalidArgumentError
from mpidist.nest import array_names, form_text
from mpidist.options import CommunicationOptions
from mpidist.transport import Joining, SyncGroup, arrays

__all__ = ["broadcast"]


def broadcast(
    group: SyncGroup,
    call: str,
    tensor: Any,
    destinations: Any,
    options: CommunicationOptions,
    error: Exception | None = None,
) -> Any:
    """Send rank 0's value to the destinations: `CrossDeviceOps.broadcast`. Collective.

    One broadcast per array, S bytes to each rank; or one message to each destination, if they are not all ranks.

    Args:
        group: The ranks.
        call: What errors call it.
        tensor: An array, a number, or a nest of them; only rank 0's numbers matter.
        destinations: As in `CrossDeviceOps.reduce`.
        options: `timeout_seconds` counts.
        error: What the caller knows to be wrong on this rank. It is raised, and on all ranks.

    Returns:
        Rank 0's value where this rank is a destination, else `None`.

    Raises:
        InvalidArgumentError: If the ranks' arguments differ. On every rank.
    """
    structure: nest.Structure = nest.LEAF
    operands, fingerprint = Operands([]), 0
    ranks: tuple[int, ...] = (0,)

    def describe() -> dict[str, str]:
        fields = {"destinations": str(ranks), "form of the nest": form_text(structure)}
        return fields | {name: repr(spec) for name, spec in zip(array_names(structure), operands.specs, strict=True)}

    try:
        ranks = ranks_of(destinations, group.topology.size, tensor)
        leaves, structure = nest.flatten(tensor)
        require_values(leaves, tensor)
        operands = Operands.of(leaves, group.devices, call)
        if any(spec.dtype.hasobject or spec.dtype.names is not None for spec in operands.specs):
            raise InvalidArgumentError("cannot broadcast an array of Python objects or records; needed numbers")
        fingerprint = group.agreement.fingerprint(call, (ranks, structure, operands.key), describe)
    except Exception as problem:  # whatever it is, the other ranks must learn of it
        error = error or problem
    details = specs_text(operands.specs)
    group.enter(call)
    with group.moving():
        group.agree(Joining(call, fingerprint, describe, options.timeout_seconds, error, 0, details))
        results = result_arrays(operands.specs, [spec.dtype for spec in operands.specs])
        for array, result in zip(operands.arrays, results, strict=True):
            _send(group, array, result, ranks)
    return nest.rebuild(tensor, operands.restore(results)) if group.topology.rank in ranks else None


def _send(group: SyncGroup, array: Any, result: Any, ranks: tuple[int, ...]) -> None:
    levels = group.levels_of(arrays.is_device(result))
    if len(ranks) == group.topology.size and array.flags.c_contiguous and array.dtype == result.dtype:
        levels.world.broadcast(array.reshape(-1), 0, result.reshape(-1))
        return
    if group.topology.rank == 0:
        result[...] = array
    send_to(levels.world, result.reshape(-1), 0, ranks)
